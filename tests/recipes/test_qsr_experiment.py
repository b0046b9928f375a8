"""The comparison of schedules: real ranks, exact counts, files, resuming, and bad input."""

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

from recipes import result_files
from recipes.errors import RecipeError
from recipes.experiments import ResultTable
from recipes.image_data.sources import digits
from recipes.qsr import comparison, experiment, figures, ledger, local_training, processes, task
from tests.recipes.forked_ranks import RECIPES
from tests.support.ranks import on_threads

FOLDER = RECIPES / "qsr"

RANKS = 2
NUMEL = 64 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10
SMALL_GRID = comparison.Grid((0.1,), (2,), (2,), (1, 4), (0.5,), (4,), (1000,))

PUBLISHED = [
    (".", comparison.METHODS),
    ("no_label_noise", ("parallel", "constant H", "QSR", "SWAP")),
]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def _one_model_at_a_time() -> Iterator[None]:
    # Threads share torch's global random generator, from which the weights are drawn.
    build, lock = task.Task.build, threading.Lock()

    def alone(opened: Any, seed: int) -> nn.Module:
        with lock:
            return build(opened, seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task.Task, "build", alone)
        yield


# --- The rules, as the paper defines them ---------------------------------------------------------


def counted(schedule: str, peak: float, total: int, warmup: int) -> int:
    """Count the synchronisations of a run, round by round."""
    name, *words = re.findall(r"[a-z_]+|[\d.]+", schedule)
    numbers = [float(word) for word in words if word[0].isdigit()]
    syncs = step = 0
    while step < total:
        step += min(period(name, numbers, lr_at(step, peak, total, warmup), step, warmup), total)
        syncs += 1
    return syncs


def lr_at(step: int, peak: float, total: int, warmup: int) -> float:
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
    """Run the whole experiment with 22 steps per run, every method and two seeds."""
    out = tmp_path_factory.mktemp("qsr")
    arguments = experiment.parse(["--quick", "--epochs", "2", "--out", str(out)])
    arguments.grid = SMALL_GRID
    torch.set_num_threads(1)
    by_rank = on_threads(RANKS, processes.on_this_rank, arguments, open_runs(arguments))
    assert all(other == by_rank[0] for other in by_rank)
    experiment.save(by_rank[0], out)
    return arguments, by_rank[0]


def open_runs(arguments: argparse.Namespace, *, resume: bool = False) -> ResultTable:
    data = (arguments.dataset, arguments.label_noise)
    return ledger.open_table(arguments.out, *data, RANKS, arguments.length, resume=resume)


def rows(path: Path) -> list[dict[str, str]]:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# command: ")
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def test_every_count_is_exact(finished: tuple[argparse.Namespace, Any]) -> None:
    arguments, _ = finished
    runs = rows(arguments.out / "runs.csv")
    # Parallel is tuned at one learning rate. Then each of seven methods runs with two seeds.
    assert len(runs) == (1 + 1 + 3 * 2 + 1 + 1) + 7 * 2
    for run in runs:
        syncs = counted(run["schedule"], 0.1, 22, 11)
        assert int(run["syncs"]) == syncs, run["schedule"]
        # In an all-reduce, each of two ranks sends half of the model twice.
        assert int(run["nbytes"]) == syncs * NUMEL * 4


def test_the_tables_contain_the_runs_results(
    finished: tuple[argparse.Namespace, Any],
) -> None:
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


def test_resume_trains_only_the_missing_runs(
    finished: tuple[argparse.Namespace, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, whole = finished
    table = open_runs(arguments, resume=True)
    known = ledger.read_outcomes(table)
    lost = [row for row in table.rows if (row["schedule"], row["part"]) == ("parallel", "test")]
    trained: list[str] = []
    train: Callable[..., Any] = local_training.train

    def recorded(task: Any, schedule: str, **options: Any) -> Any:
        trained.append(schedule)
        return train(task, schedule, **options)

    monkeypatch.setattr(comparison, "train", recorded)
    table.rows = [row for row in table.rows if row not in lost]
    again = on_threads(RANKS, processes.on_this_rank, arguments, table)[0]
    assert trained == ["parallel"] * (RANKS * len(lost))
    assert again == whole
    assert ledger.read_outcomes(open_runs(arguments, resume=True)) == known


@pytest.mark.thorough
def test_the_command_starts_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--quick", "--epochs", "2", "--seeds", "1", "--ranks", "1", "--methods", "SWAP"]
    words += ["--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["recipes/qsr/experiment.py", *words])
    experiment.main()
    (row,) = rows(tmp_path / "results.csv")
    assert (row["method"], row["bytes"], row["ahead"]) == ("SWAP", "0", "nan")
    assert row["schedule"] in capsys.readouterr().out
    before = (tmp_path / "runs.csv").read_bytes()
    monkeypatch.setattr(sys, "argv", ["recipes/qsr/experiment.py", *words, "--resume"])
    experiment.main()
    assert (tmp_path / "runs.csv").read_bytes() == before


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
        # Each of four ranks sends 2 * 3/4 of the model.
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
        lambda: local_training.train(
            opened, "every(4)", lr=0.1, seed=0, length=length, evaluated=opened.test
        ),
    )
    assert outcomes[0].syncs == 3
    # Weights and re-estimated statistics are equal on both ranks.
    assert outcomes[0] == outcomes[1]


# --- Data and bad input ---------------------------------------------------------------------------


def test_the_parts_of_the_digits_are_disjoint_and_only_training_labels_are_wrong() -> None:
    opened = task.open_task("digits", None, 0.2)
    parts = (opened.train, opened.validation, opened.test)
    assert [len(part.labels) for part in parts] == [360, 719, 718]
    clean = task._joined(digits())
    order = {"train": slice(0, None, 5), "odd": slice(1, None, 5)}
    wrong = (opened.train.labels != torch.from_numpy(clean.labels[order["train"]])).float().mean()
    # A tenth of the replaced labels are right again.
    assert 0.12 < float(wrong) < 0.24
    assert torch.equal(opened.validation.labels[::2], torch.from_numpy(clean.labels[order["odd"]]))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--dataset", "cifar10"], "--data.*cifar10"),
        (["--data", "nowhere"], "--data nowhere.*digits"),
        (["--out", __file__], "--out .*test_qsr_experiment.py"),
        (["--quick", "--out", str(FOLDER / "results")], "--quick.*--out .*results"),
        (["--resume", "--epochs", "9", "--out", str(FOLDER / "results")], "--resume.*160.* 9 "),
        (["--ranks", "3"], "--ranks 3.* 32 "),
        (["--epochs", "8"], "--epochs 8.* 8 "),
        (["--label-noise", "1.5"], r"--label-noise.*1\.5"),
        (["--seeds", "0"], "--seeds.* 0"),
        (["--methods", "SGD"], "--methods.*SGD"),
    ],
)
def test_bad_input_ends_in_one_line_before_anything_starts(
    words: list[str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["experiment.py", *words])
    monkeypatch.setattr(experiment, "on_processes", lambda *_: pytest.fail("it ran"))
    monkeypatch.setattr(result_files, "write_csv", lambda *_, **__: pytest.fail("it wrote"))
    with pytest.raises(SystemExit, match=rf"^error[^\n]*: [^\n]*{problem}[^\n]*$"):
        experiment.main()


def test_quick_and_unpublished_settings_do_not_write_to_the_committed_results() -> None:
    assert experiment.parse([]).out == FOLDER / "results"
    assert experiment.parse(["--quick"]).out == Path("runs/qsr-quick")
    assert experiment.parse(["--seeds", "1"]).out == Path("runs/qsr")


def test_a_method_that_is_named_twice_runs_once() -> None:
    assert experiment.parse(["--methods", "SWAP", "QSR", "SWAP"]).methods == ["SWAP", "QSR"]


def test_resume_refuses_a_file_with_other_columns(tmp_path: Path) -> None:
    arguments = experiment.parse(["--out", str(tmp_path)])
    open_runs(arguments).save()
    path = tmp_path / "runs.csv"
    notes = [line for line in path.read_text().splitlines() if line.startswith("#")]
    path.write_text("\n".join([*notes, "method,accuracy", "QSR,90", ""]))
    with pytest.raises(
        RecipeError, match=r"--resume.*runs.csv.*method, accuracy.*dataset, label_n"
    ):
        open_runs(arguments, resume=True)


def test_the_titles_are_computed_from_the_results() -> None:
    def entry(method: str, schedule: str, nbytes: int, *accuracies: float) -> comparison.Entry:
        outcomes = [local_training.Outcome(value, 0.5, 10, nbytes) for value in accuracies]
        return comparison.Entry(method, schedule, 0.1, tuple(outcomes))

    parallel = entry("parallel", "parallel", 900, 80.0, 82.0)
    qsr = entry("QSR", "qsr(alpha=0.1, h_base=2)", 200, 81.0, 81.0)
    found = comparison.Comparison("digits", 0.2, 100, 10, 0.1, [], [parallel, qsr])
    title = figures.accuracy_title(found)
    for number in ("4.5x", "81.00 %", "+0.00 ± 1.00"):
        assert number in title
    assert "10 times in 100 steps, 10.0x" in figures.schedules_title(found)
    alone = comparison.Comparison("digits", 0.2, 100, 10, 0.1, [], [parallel])
    assert "QSR" not in figures.accuracy_title(alone) + figures.schedules_title(alone)
