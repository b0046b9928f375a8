"""The elastic recipe: after a kill, the same number of ranks ends with the same bits, and another
number loses nothing."""

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recipes.elastic import experiment, train
from recipes.elastic.account import audit
from recipes.elastic.agents import Agents
from recipes.elastic.faults import KINDS, Fault, plan
from recipes.elastic.runs import run, same, states_after
from recipes.elastic.settings import Settings, read_settings
from recipes.errors import RecipeError
from recipes.result_files import read_csv
from tests.recipes.conftest import wait_until
from tests.support.cases import thorough
from tests.support.ranks import on_processes
from torchcomp import SpecError

STEPS, EVERY = 60, 16


def settings_of(method: str, folder: Path) -> Settings:
    options = experiment.METHODS[method]
    return Settings(**options, steps=STEPS, checkpoint_every=EVERY, out=str(folder))


def finished(ranks: int, settings: Settings) -> list[dict[str, Any]]:
    """Train until the run is complete, and return the states of all ranks."""
    on_processes(ranks, train_to_the_end, settings)
    return states_after(settings.steps, Path(settings.out))


def train_to_the_end(settings: Settings) -> None:
    one = train.Run(settings)
    one.train()
    one.method.close()


def killed_after(step: int, settings: Settings) -> None:
    """Train until rank 1 dies, which the other ranks notice in an exchange."""
    one = train.Run(settings)

    def die(taken: int) -> None:
        if taken == step:
            os.kill(os.getpid(), signal.SIGKILL)

    if one.rank == 1:
        one.log.after_step = die
    one.train()


@pytest.mark.parametrize("method", ["bidirectional", *thorough(["ef", "local"])])
def test_a_killed_run_ends_with_the_same_bits_or_conserves(method: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = settings_of(method, folder)
    outcomes = on_processes(3, killed_after, 41, settings, catch=True)
    assert all(isinstance(outcome, Exception) for outcome in outcomes)
    steps = [int(path.parent.name[5:]) for path in folder.glob("*/*/complete.json")]
    assert sorted(steps) == [16, 32]

    resized = tmp_path / "resized"
    shutil.copytree(folder, resized)
    whole = finished(3, replace(settings, out=str(tmp_path / "whole")))
    assert same(finished(3, settings), whole)

    states = finished(2, replace(settings, out=str(resized)))
    found = audit(states, settings)
    assert len(states) == 2
    assert found.deviation < 1e-13
    assert found.unsent > 0.01


def test_the_audit_finds_what_is_lost(tmp_path: Path) -> None:
    settings = replace(settings_of("bidirectional", tmp_path), steps=EVERY)
    states = finished(1, settings)
    assert audit(states, settings).deviation < 1e-13
    states[0]["method"]["slots"]["server_error"]["tensors"]["0.weight"][5] += 1e-6
    assert audit(states, settings).deviation > 1e-9


def test_the_plan_is_drawn_from_its_seed() -> None:
    faults = plan(20, 2000, range(2, 5), seed=3)
    assert faults == plan(20, 2000, range(2, 5), seed=3) != plan(20, 2000, range(2, 5), seed=4)
    assert {fault.kind for fault in faults} == {*KINDS}
    assert {fault.nodes for fault in faults} == {2, 3, 4}
    steps = [fault.step for fault in faults]
    assert steps == sorted(steps)
    assert 0 < steps[0] < steps[-1] < 2000


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--batch", "50"], RecipeError),
        (["--outer", "nesterov()"], RecipeError),
        (["--sync", "every(8)", "--outer", "slowmo()"], RecipeError),
        (["--compress", "topkk"], SpecError),
    ],
)
def test_flags_that_cannot_be_used(flags: list[str], error: type[Exception]) -> None:
    with pytest.raises(error):
        read_settings(flags, 4)


@pytest.fixture
def main_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Run the program in this process, on one rank, with six steps in ``tmp_path``."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    threads = torch.get_num_threads()

    def run_main(*flags: str) -> None:
        monkeypatch.setattr(sys, "argv", ["train", "--steps", "6", "--out", str(tmp_path), *flags])
        train.main()

    yield run_main
    torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.destroy_process_group()


def fill_the_disk(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("/dev/full")


def test_a_last_step_that_cannot_be_saved_is_an_error(
    main_here: Callable[..., None], tmp_path: Path
) -> None:
    fill_the_disk(tmp_path / "checkpoints" / "step-000000006" / ".rank-0.pt")
    with pytest.raises(SystemExit, match=r"step, 6, .*No space left on device"):
        main_here()


def test_a_run_goes_on_if_nothing_but_its_result_can_be_written(
    main_here: Callable[..., None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("steps.csv", "starts.jsonl", "checkpoints/step-000000004/.rank-0.pt"):
        fill_the_disk(tmp_path / name)
    main_here("--checkpoint-every", "4")
    assert len(states_after(6, tmp_path)) == 1
    printed = capfd.readouterr()
    assert len(printed.err.splitlines()) == 2
    assert "step 4 was not saved" in printed.out


def test_weights_that_are_not_finite_are_an_error_of_the_flags(
    main_here: Callable[..., None],
) -> None:
    with pytest.raises(SystemExit, match=r"error: .*gradient"):
        main_here("--lr", "1e200")


def test_a_timeout_is_that_of_the_process_group(
    main_here: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, seen = dist.init_process_group, list[Any]()

    def init_process_group(*arguments: Any, **options: Any) -> None:
        seen.append(options["timeout"])
        begin(*arguments, **options)

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    main_here()
    main_here("--timeout", "7")
    assert seen == [None, timedelta(seconds=7)]


def test_the_committed_table_has_twenty_kills_of_every_method() -> None:
    rows = read_csv(Path(experiment.__file__).parent / "results" / "kills.csv")
    assert [(row["method"], row["size"]) for row in rows] == [
        (method, size) for method in experiment.METHODS for size in experiment.NODES
    ]
    assert {row["kills"] for row in rows} == {"20"}
    assert {row["identical"] for row in rows if row["size"] == "fixed"} == {"yes"}
    assert all(float(row["deviation"]) < 1e-13 for row in rows)


# Under torchrun, with processes that import everything anew.


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_torchrun_restarts_with_other_ranks_after_a_fault(kind: str, tmp_path: Path) -> None:
    settings = replace(settings_of("bidirectional", tmp_path), steps=200, checkpoint_every=40)
    outcome = run(tmp_path, settings, (2, 3), [Fault(kind, 45, 3)])
    assert outcome.ranks[0] == 2
    assert outcome.ranks[-1] == 3
    assert outcome.steps > 200
    assert audit(outcome.states, settings).deviation < 1e-13


@pytest.mark.soak
def test_the_training_recipe_repeats_no_step_when_a_node_joins(tmp_path: Path) -> None:
    printed = tmp_path / "agent-0.txt"
    flags = ["--threads", "1", "--epochs", "400", "--log-every", "1"]
    flags += ["--elastic", "--auto-resume", "--sync", "every(4)"]
    with Agents(tmp_path, (1, 2), flags, module="recipes.train") as agents:

        def is_alive() -> bool:
            return all(agent.poll() is None for agent in agents.alive)

        agents.start()
        wait_until(lambda: (tmp_path / "metrics.jsonl").exists(), is_alive, printed)
        agents.start()
        outputs = [printed, tmp_path / "agent-1.txt"]

        def everything() -> str:
            return "".join(path.read_text() for path in outputs)

        wait_until(lambda: "resumed after step" in everything(), is_alive, printed)
        found = re.search(r"saved step (\d+)", everything())
        assert found is not None
        assert f"resumed after step {found[1]}\n" in everything()
        assert "2 ranks" in everything()
