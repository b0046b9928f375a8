"""The soak: it finds planted faults, and small runs pass."""

import os
import random
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.soak_fuzz import Messages, Problem, Specs, fuzz
from benchmarks.soak_states import CLIENTS, RANKS, mutate_states
from benchmarks.soak_training import FAMILIES, Sample, Verdict, train
from tests.support.cases import only
from tests.support.mutations import at, replaced
from tests.support.outcomes import assert_refused
from tests.support.ranks import on_threads
from torchcomp import RankMismatchError
from torchcomp.routes.codec import Codec

# --- Training -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take samples without the garbage collection, which goes through all of pytest's objects."""
    monkeypatch.setattr("gc.collect", lambda: 0)


@pytest.mark.parametrize("family", only(FAMILIES, now=["ef topk", "local steps, compressed"]))
def test_a_short_run_keeps_replicas_equal_and_loses_nothing(family: str) -> None:
    ranks = on_threads(4, train, family, 24, 4)
    verdict = Verdict.of(ranks)
    assert verdict.correct
    assert ranks[0].loads == 1


@pytest.fixture(scope="module")
def verdict() -> Verdict:
    """A verdict that passes."""
    flat = {"growth_kib": 0.0, "trend": 0.0, "descriptors": 0, "threads": 0}
    return Verdict(samples=40, resident_mib=300.0, **flat, equal=40, lost=1e-14, unsent=0.01)


@pytest.mark.parametrize(
    "fault",
    [
        {"growth_kib": 4096.0},
        {"trend": 200.0},
        {"descriptors": 1},
        {"threads": 1},
        {"equal": 39},
        {"lost": 1e-6},
    ],
    ids=lambda fault: next(iter(fault)),
)
def test_a_run_with_a_fault_does_not_pass(verdict: Verdict, fault: dict[str, Any]) -> None:
    assert verdict.passed
    assert not replace(verdict, **fault).passed


def test_a_leak_of_one_rank_is_measured() -> None:
    ranks = on_threads(2, train, "local steps", 8, 4)

    def sample(number: int, leak: int) -> Sample:
        return Sample(500 * number, 10**8 + leak * number, 20 + number, 8, "same")

    flat, leaking = ([sample(number, leak) for number in range(40)] for leak in (0, 500_000))
    verdict = Verdict.of([replace(ranks[0], samples=flat), replace(ranks[1], samples=leaking)])
    assert verdict.trend == pytest.approx(1000)
    assert verdict.growth_kib == pytest.approx(24 * 500_000 / 1024)
    assert (verdict.descriptors, verdict.threads, verdict.equal) == (29, 0, 40)


# --- Messages and specs ---------------------------------------------------------------------------


@pytest.mark.parametrize("target", [Messages(), Specs()], ids=["messages", "specs"])
def test_cases_have_the_same_result_every_time(target: Any) -> None:
    first = results_of(target, 150)
    assert first == results_of(target, 150)
    assert set(first) == set(target.RESULTS)


def results_of(target: Any, cases: int) -> list[str]:
    return [target.run(random.Random(number)) for number in range(cases)]


def test_a_decoder_that_writes_outside_of_its_tensor_is_found() -> None:
    def decode(self: Codec, messages: Any, out: torch.Tensor, key: Any, divisor: int) -> None:
        torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).zero_()

    with mock.patch.object(Codec, "mean", decode), pytest.raises(Problem):
        results_of(Messages(), 100)


class Failing:
    """A target of which some cases end in another way than they may."""

    RESULTS: ClassVar = ("passed",)

    def prepare(self) -> None: ...

    def in_batch(self, number: int) -> Any:
        return nullcontext()

    def run(self, dice: random.Random) -> str:
        chosen = dice.randrange(50)
        if chosen == 1:
            time.sleep(1000)
        if chosen == 2:
            os._exit(7)
        if chosen == 3:
            raise ZeroDivisionError
        return "passed"


@pytest.mark.soak
def test_a_crash_a_hang_and_an_error_are_found_and_the_other_cases_run() -> None:
    # With this seed, two cases hang, one ends the process, and five raise.
    outcome = fuzz(Failing, 100, seed=1, workers=2, hang=2.0)
    assert outcome.counts["passed"] + len(outcome.problems) == 100
    kinds = [problem.partition(": ")[2] for problem in outcome.problems]
    assert any("exit code 7" in kind for kind in kinds)
    assert any("hangs" in kind for kind in kinds)
    assert any(kind.startswith("ZeroDivisionError") for kind in kinds)


# --- States ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", only(CLIENTS, now=["states of a handle"]))
def test_some_mutated_states_have_no_problem(name: str) -> None:
    outcome = mutate_states(name, every=20)
    assert outcome.problems == []
    assert outcome.counts["refused"] > outcome.counts["loaded"] > 0


def named(value: Any) -> str:
    return ".".join(map(str, value)) if isinstance(value, list) else str(value)[:40]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("states of a handle", ["scale"]),
        ("states of a handle, ef21", ["slots", "mean_estimate", "tensors", "0.weight"]),
        ("states of LocalSGD, compressed", ["slots", "reference", "tensors", "0.bias"]),
        ("states of LocalSGD, compressed", ["local_sgd", "fragments", 0, "synced"]),
        ("states of JointSpar", ["jointspar", "averages", "0.bias", 0]),
        ("states of TwoDirection", ["two_direction", "rho"]),
    ],
    ids=named,
)
def test_a_value_that_differs_between_ranks_is_found_after_loading(
    name: str, path: list[Any]
) -> None:
    def body() -> None:
        client = CLIENTS[name]()
        client.train(0, 3)
        state = client.source.state_dict()
        value = at(state, path)
        changed = replaced(state, path, value / 2 if path[-1] == "rho" else value + 1)
        client.source.load_state_dict(state if dist.get_rank() else changed)
        client.train(3, 8)

    assert_refused(RANKS, body, RankMismatchError)
