"""The soak: it finds planted faults, and small runs pass."""

import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.soak_fuzz import Messages, Problem, Specs
from benchmarks.soak_states import CLIENTS, RANKS, mutate_states
from benchmarks.soak_training import FAMILIES, Verdict, train
from tests.support.cases import only
from tests.support.mutations import at, replaced
from tests.support.outcomes import assert_refused
from tests.support.ranks import on_threads
from torchcomp import RankMismatchError
from torchcomp.routes.codec import Codec


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    """Take samples without the garbage collection, which goes through all of pytest's objects."""
    monkeypatch.setattr("gc.collect", lambda: 0)


@pytest.mark.parametrize("family", only(FAMILIES, now=["ef topk", "local steps, compressed"]))
def test_a_short_run_keeps_replicas_equal_and_loses_nothing(family):
    ranks = on_threads(4, train, family, 24, 4)
    verdict = Verdict.of(ranks)
    assert verdict.correct
    assert ranks[0].loads == 1


@pytest.mark.parametrize("target", [Messages(), Specs()], ids=["messages", "specs"])
def test_cases_end_in_every_way_that_they_may(target):
    assert {target.run(random.Random(number)) for number in range(150)} == set(target.RESULTS)


def test_a_decoder_that_writes_outside_of_its_tensor_is_found():
    def decode(self, messages, out, key, divisor):
        torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).zero_()

    with mock.patch.object(Codec, "mean", decode), pytest.raises(Problem):
        [Messages().run(random.Random(number)) for number in range(100)]


@pytest.mark.parametrize("name", only(CLIENTS, now=["states of a handle"]))
def test_some_mutated_states_have_no_problem(name):
    outcome = mutate_states(name, every=20)
    assert outcome.problems == []
    assert outcome.counts["refused"] >= outcome.counts["loaded"] > 0


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
    ids=str,
)
def test_a_value_that_differs_between_ranks_is_found_after_loading(name, path):
    def body():
        client = CLIENTS[name]()
        client.train(0, 3)
        state = client.source.state_dict()
        value = at(state, path)
        changed = replaced(state, path, value / 2 if path[-1] == "rho" else value + 1)
        client.source.load_state_dict(state if dist.get_rank() else changed)
        client.train(3, 8)

    assert_refused(RANKS, body, RankMismatchError)
