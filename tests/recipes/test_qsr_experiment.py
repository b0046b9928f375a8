"""The experiment that compares schedules: real ranks, exact counts, files, and going on."""

import argparse
import csv
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recipes.errors import RecipeError
from recipes.image_data.sources import digits
from recipes.qsr import comparison, experiment, figures, ledger, local_training, processes, task
from tests.recipes.forked_ranks import RECIPES
from tests.support.ranks import on_threads
from torchcomp.errors import SpecError

FOLDER = RECIPES / "qsr"

RANKS = 2
NUMEL = 64 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10
SMALL_GRID = comparison.Grid((0.1,), (2,), (2,), (1, 4), (0.5,), (4,), (1000,))

PUBLISHED = [
    (".", comparison.METHODS),
    ("no_label_noise", ("parallel", "constant H", "QSR", "SWAP")),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # Sums of a batch are split among threads, and round by their number.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def _one_model_at_a_time() -> Iterator[None]:
    # Weights are drawn from torch's own random numbers, which threads share and processes do not.
    build, lock = task.Task.build, threading.Lock()

    def alone(opened: Any, seed: int) -> nn.Module:
        with lock:
            return build(opened, seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task.Task, "build", alone)
        yield


# --- The rules, as the paper writes them ----------------------------------------------------------


def counted(schedule: str, peak: float, total: int, warmup: int) -> int:
    """Synchronisations of a run, by going through its rounds."""
    name, *words = re.findall(r"[a-z_]+|[\d.]+", schedule)
    numbers = [float(word) for word in words if word[0].isdigit()]
    syncs = step = 0
    while step < total:
        step += min(period(name, numbers, rate(step, peak, total, warmup), step, warmup), total)
        syncs += 1
    return syncs


def rate(step: int, peak: float, total: int, warmup: int) -> float:
    if step < warmup:
        return 1e-6 + (peak - 1e-6) * step / warmup
    done = (step - warmup) / (total - warmup)
    return 1e-6 + (peak - 1e-6) * 0.5 * (1 + math.cos(math.pi * done))


def period(name: str, numbers: list[float], eta: float, step: int, warmup: int) -> int:
    if name in ("parallel", "every"):
        return int(numbers[0]) if numbers else 1
    if name in ("post_local", "swap"):
        after = int(numbers[1]) if name == "post_local" else 10**9
        return 1 if step < numbers[0] else after
    coefficient, exponent, base = numbers if name == "power" else (numbers[0], 2, numbers[1])
    return int(base if step < warmup else max(base, (coefficient / eta) ** exponent // 1))


def test_the_counts_by_hand() -> None:
    assert counted("qsr(alpha=0.0175, h_base=4)", 0.008, 93_600, 10_000) == 9_711
    assert counted("post_local(switch=10, h=4)", 0.1, 21, 2) == 10 + 3
    assert counted("swap(switch=10)", 0.1, 21, 2) == 10 + 1


# --- The experiment on two ranks ------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[argparse.Namespace, Any]:
    """A whole experiment of 22 steps a run, with every method and two seeds."""
    out = tmp_path_factory.mktemp("qsr")
    arguments = experiment.parse(["--quick", "--epochs", "2", "--out", str(out)])
    arguments.grid = SMALL_GRID
    torch.set_num_threads(1)
    everyone = on_threads(RANKS, processes.on_this_rank, arguments, {})
    assert all(other == everyone[0] for other in everyone)
    experiment.save(everyone[0], out)
    return arguments, everyone[0]


def rows(path: Path) -> list[dict[str, str]]:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# command: ")
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def test_every_count_is_exact(finished: tuple[argparse.Namespace, Any]) -> None:
    arguments, _ = finished
    runs = rows(arguments.out / "runs.csv")
    # Parallel is tuned at one rate; then each of seven methods runs with two seeds.
    assert len(runs) == (1 + 1 + 3 * 2 + 1 + 1) + 7 * 2
    for run in runs:
        syncs = counted(run["schedule"], 0.1, 22, 11)
        assert int(run["syncs"]) == syncs, run["schedule"]
        # In an all-reduce each of two ranks sends half of the model twice.
        assert int(run["nbytes"]) == syncs * NUMEL * 4


def test_the_tables_say_what_the_runs_ended_with(finished: tuple[argparse.Namespace, Any]) -> None:
    arguments, outcome = finished
    runs = rows(arguments.out / "runs.csv")
    tuning = rows(arguments.out / "tuning.csv")
    for row in rows(arguments.out / "results.csv"):
        mine = [trial for trial in tuning if trial["method"] == row["method"]]
        chosen = next(trial for trial in mine if trial["schedule"] == row["schedule"])
        assert all(float(chosen["validation"]) >= float(trial["validation"]) for trial in mine)
        tested = [
            float(run["accuracy"])
            for run in runs
            if (run["schedule"], run["part"]) == (row["schedule"], "test")
        ]
        middle, apart = sum(tested) / 2, abs(tested[0] - tested[1]) / math.sqrt(2)
        assert float(row["mean"]) == pytest.approx(middle, abs=1e-3)
        assert float(row["deviation"]) == pytest.approx(apart, abs=1e-3)
    names = [line.split("  ")[0].strip() for line in experiment.table(outcome).splitlines()]
    assert names[1:-1] == list(comparison.METHODS)


def test_the_pictures_are_drawn(finished: tuple[argparse.Namespace, Any]) -> None:
    arguments, outcome = finished
    for name in ("schedules.png", "accuracy.png"):
        assert (arguments.out / name).read_bytes().startswith(b"\x89PNG")
    starts, lengths = figures.rounds(outcome, "power(coef=0.2, exponent=3, h_base=2)")
    assert (starts[0], starts[-1], sum(lengths[:-1])) == (0, 22, 22)
    assert lengths[:3] == [2, 2, 2]


def test_an_experiment_that_was_cut_off_goes_on(
    finished: tuple[argparse.Namespace, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, whole = finished
    known = ledger.read_outcomes(arguments.out / "runs.csv")
    lost = [run for run in known if (run.schedule, run.part) == ("parallel", "test")]
    trained: list[str] = []
    train: Callable[..., Any] = local_training.run

    def noted(task: Any, schedule: str, **options: Any) -> Any:
        trained.append(schedule)
        return train(task, schedule, **options)

    monkeypatch.setattr(comparison, "run", noted)
    kept = {run: outcome for run, outcome in known.items() if run not in lost}
    again = on_threads(RANKS, processes.on_this_rank, arguments, kept)[0]
    assert trained == ["parallel"] * (RANKS * len(lost))
    assert again == whole
    assert ledger.read_outcomes(arguments.out / "runs.csv") == known


@pytest.mark.thorough
def test_the_command_starts_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--quick", "--epochs", "2", "--seeds", "1", "--ranks", "1", "--methods", "SWAP"]
    monkeypatch.setattr(sys, "argv", ["recipes/qsr/experiment.py", *words, "--out", str(tmp_path)])
    experiment.main()
    (row,) = rows(tmp_path / "results.csv")
    assert (row["method"], row["bytes"], row["ahead"]) == ("SWAP", "0", "nan")
    assert "0 runs were known" in capsys.readouterr().out


@pytest.mark.parametrize(("folder", "methods"), PUBLISHED)
def test_the_published_results_are_whole_and_their_counts_exact(
    folder: str, methods: tuple[str, ...]
) -> None:
    length = experiment.LENGTHS["digits"]
    total, warmup = length.steps(360), length.warmup_steps(360)
    runs = rows(FOLDER / "results" / folder / "runs.csv")
    for run in runs:
        syncs = counted(run["schedule"], float(run["lr"]), total, warmup)
        assert int(run["syncs"]) == syncs, run["schedule"]
        # Four ranks: each sends 2 * 3/4 of the model.
        assert int(run["nbytes"]) == syncs * NUMEL * 4 * 6 // 4
    results = rows(FOLDER / "results" / folder / "results.csv")
    assert tuple(row["method"] for row in results) == methods
    for row in results:
        mine = [run for run in runs if (run["schedule"], run["part"]) == (row["schedule"], "test")]
        assert sorted(int(run["seed"]) for run in mine) == [0, 1, 2, 3, 4]
        middle = sum(float(run["accuracy"]) for run in mine) / 5
        assert float(row["mean"]) == pytest.approx(middle, abs=1e-3)


# --- CIFAR-10 by path -----------------------------------------------------------------------------


def test_cifar10_is_read_from_its_archive(
    cifar_archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_training, "BN_IMAGES", 20)
    opened = task.open_task("cifar10", cifar_archive, 0.0)
    assert [len(part.labels) for part in (opened.train, opened.validation, opened.test)] == [
        *(90, 10, 20)
    ]
    length = local_training.Length(batch=10, epochs=1, warmup_epochs=0)
    outcomes = on_threads(
        2,
        lambda: local_training.run(
            opened, "every(4)", lr=0.1, seed=0, length=length, judged=opened.test
        ),
    )
    assert outcomes[0].syncs == 3
    # Weights and re-estimated statistics are alike on both ranks.
    assert outcomes[0] == outcomes[1]


# --- Data and bad input ---------------------------------------------------------------------------


def test_the_parts_of_the_digits_are_disjoint_and_only_training_labels_are_wrong() -> None:
    opened = task.open_task("digits", None, 0.2)
    parts = (opened.train, opened.validation, opened.test)
    assert [len(part.labels) for part in parts] == [360, 719, 718]
    clean = task._joined(digits())
    order = {"train": slice(0, None, 5), "odd": slice(1, None, 5)}
    wrong = (opened.train.labels != torch.from_numpy(clean.labels[order["train"]])).float().mean()
    # A tenth of the labels that are drawn anew are right again.
    assert 0.12 < float(wrong) < 0.24
    assert torch.equal(opened.validation.labels[::2], torch.from_numpy(clean.labels[order["odd"]]))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--dataset", "cifar10"], "--data is not given: cifar10 is read from there"),
        (["--data", "nowhere"], "--data nowhere: --dataset digits is embedded"),
        (["--out", __file__], "must be a folder, and cannot be made: File exists"),
        (["--resume", "--out", "nowhere"], "--resume finds no nowhere/runs.csv"),
        (["--resume", "--out", str(RECIPES / "qsr")], "--resume finds no"),
    ],
)
def test_what_is_missing_is_told_before_anything_starts(
    words: list[str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["experiment.py", *words])
    with pytest.raises(SystemExit, match=problem):
        experiment.main()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--ranks", "3"], "--ranks must divide the batch of 32 images"),
        (["--epochs", "8"], "--epochs must exceed the 8 of warm-up"),
    ],
)
def test_numbers_that_cannot_be_used_are_refused(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        experiment.parse(words)
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--label-noise", "1.5"], "--label-noise must be a number from 0 to 1, not 1.5"),
        (["--seeds", "0"], "--seeds must be a whole number of at least 1, not 0"),
    ],
)
def test_numbers_out_of_range_are_refused(words: list[str], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        experiment.parse(words)


def test_a_method_that_is_named_twice_is_run_once() -> None:
    assert experiment.parse(["--methods", "SWAP", "QSR", "SWAP"]).methods == ["SWAP", "QSR"]


def test_runs_of_another_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("# command: other\nmethod,accuracy\n")
    with pytest.raises(RecipeError, match="whose columns are not dataset, label_noise, ranks"):
        ledger.read_outcomes(tmp_path / "runs.csv")
