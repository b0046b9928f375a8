"""Method texts, simulated ranks, and the convergence experiment on JointSpar."""

import copy
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from recipes.errors import RecipeError
from recipes.jointspar import (
    convergence,
    convergence_drawing,
    convergence_runs,
    convergence_summary,
    tables,
)
from recipes.jointspar.layer_training import attach, build_optimizer, paper_schedule
from recipes.jointspar.methods import Dense, LayerSampling, TopK, check_optimizer, parse_method
from recipes.jointspar.networks import ResidualMLP
from recipes.jointspar.parts import SEEDS
from recipes.jointspar.simulation import SimulatedRanks
from recipes.result_files import read_csv
from tests.support.ranks import on_threads
from torchcomp.jointspar import Baseline, Literal

RESULTS = Path(convergence.__file__).parent / "results"
PER_RANK = 'jointspar(0.5, selection="per-rank", rule=Literal(alpha=1e-06, bound=None))'


# --- Method texts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("dense", Dense()),
        ("topk(0.3)", TopK(0.3)),
        ("jointspar(0.6)", LayerSampling(0.6)),
        ('jointspar(0.6, costs="bytes", topk=0.05)', LayerSampling(0.6, "bytes", topk=0.05)),
        ("jointspar(0.6, rule=None)", LayerSampling(0.6, rule=None)),
        ("jointspar(0.6, rule=Baseline(alpha=0.03))", LayerSampling(0.6, rule=Baseline(0.03))),
        (PER_RANK, LayerSampling(0.5, selection="per-rank", rule=Literal(1e-6))),
    ],
)
def test_a_method_prints_as_the_text_that_builds_it(text: str, method: Any) -> None:
    assert parse_method(text) == method
    assert str(method) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("densed", ["densed", "dense"]),
        ("topk", ["topk", "budget"]),
        ("jointspar(0.6, bugdet=1)", ["bugdet"]),
        ("jointspar(2)", ["budget", "2"]),
        ('jointspar(0.6, costs="byte")', ["costs", "byte", "bytes"]),
        ('jointspar(0.6, selection="rank")', ["selection", "per-rank"]),
        ("jointspar(0.6, rule=Litera(1))", ["Litera", "Literal"]),
        ("jointspar(0.6, rule=3)", ["rule", "int"]),
        ("jointspar(0.6, p_min=0.7)", ["p_min", "0.7", "0.6"]),
        ('jointspar(0.6, costs="bytes", rule=Literal(1e-8))', ["Literal", "bytes", "layers"]),
        ("jointspar(0.6", ["jointspar(0.6"]),
        ("__import__('os')", ["__import__"]),
    ],
)
def test_bad_methods_are_refused(text: str, words: list[str]) -> None:
    with pytest.raises(RecipeError) as raised:
        parse_method(text)
    assert all(word in str(raised.value) for word in words), raised.value


def test_lars_needs_sets_that_the_ranks_share() -> None:
    for optimizer in ("sgd", "lars-own"):
        check_optimizer(parse_method(PER_RANK), optimizer)
    with pytest.raises(RecipeError, match=r"lars .*per-rank.*lars-own or sgd"):
        check_optimizer(parse_method(PER_RANK), "lars")


# --- Simulated ranks ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        ("sgd", "dense"),
        ("sgd", PER_RANK),
        ("lars-own", 'jointspar(0.5, selection="per-rank", rule=Baseline(0.03))'),
        ("sgd", "jointspar(0.5, rule=Literal(1e-6))"),
        ("lars", 'jointspar(0.5, costs="bytes", rule=Baseline(0.03))'),
        ("lars", "jointspar(0.5, rule=None)"),
    ],
)
def test_simulated_ranks_train_as_ddp_does(optimizer: str, text: str) -> None:
    method, ranks, steps = parse_method(text), 3, 12
    torch.manual_seed(0)
    start = ResidualMLP(8, 3, hidden=(4, 16), width=6)
    images, labels = torch.randn(steps, ranks, 5, 8), torch.randint(0, 3, (steps, ranks, 5))
    hyperparameters = paper_schedule(steps, 0.1, optimizer)

    def real() -> tuple[dict[str, Any], dict[str, float]]:
        model = DistributedDataParallel(copy.deepcopy(start))
        handle = attach(method, model, seed=7)
        samples = isinstance(method, LayerSampling)
        stepper = build_optimizer(model, hyperparameters, handle if samples else None)
        for step in range(steps):
            stepper.zero_grad()
            mine = images[step, dist.get_rank()], labels[step, dist.get_rank()]
            cross_entropy(model(mine[0]), mine[1]).backward()
            stepper.step()
        return model.module.state_dict(), handle.p if samples else {}

    module = copy.deepcopy(start)
    simulated = SimulatedRanks(module, method, ranks, seed=7)
    stepper = build_optimizer(module, hyperparameters, simulated if simulated.samplers else None)
    for step in range(steps):
        batches = list(zip(images[step], labels[step], strict=True))
        losses = [lambda x=x, y=y: cross_entropy(module(x), y) for x, y in batches]
        assert simulated.backward(losses)
        stepper.step()

    outcomes = on_threads(ranks, real)
    for name, weights in module.state_dict().items():
        torch.testing.assert_close(weights, outcomes[0][0][name])
    assert len(simulated.samplers) == {"dense": 0}.get(text, 3 if "per-rank" in text else 1)
    for sampler, (_, p) in zip(simulated.samplers, outcomes, strict=False):
        assert sampler.p.tolist() == pytest.approx(list(p.values()))


def test_simulated_ranks_count_what_is_computed_and_sent() -> None:
    module = ResidualMLP(8, 3, hidden=(4, 16), width=6)
    method = parse_method('jointspar(0.5, selection="per-rank", rule=None)')
    simulated = SimulatedRanks(module, method, ranks=4, seed=0)
    losses = [lambda: module(torch.ones(2, 8)).square().mean()] * 4
    for _ in range(80):
        assert simulated.backward(losses)
    assert simulated.computed == pytest.approx(0.5, abs=0.06)
    # A layer is sent unless all four ranks drop it.
    assert simulated.sent == pytest.approx(1 - 0.5**4, abs=0.06)
    assert simulated.extremes == (0.5, 0.5)


def test_a_gradient_that_is_not_finite_ends_a_simulated_run() -> None:
    module = ResidualMLP(8, 3, hidden=(4,), width=6)
    simulated = SimulatedRanks(module, parse_method("jointspar(0.5)"), ranks=2, seed=0)
    losses = [lambda: module(torch.ones(2, 8)).sum(), lambda: module(torch.ones(2, 8)).sum() * 1e40]
    assert not simulated.backward(losses)


@pytest.mark.parametrize("text", ["topk(0.3)", "jointspar(0.5, topk=0.05)"])
def test_methods_that_need_real_ranks_are_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="simulated"):
        SimulatedRanks(ResidualMLP(8, 3, hidden=(4,)), parse_method(text), 2, 0)


# --- Runs and summaries ---------------------------------------------------------------------------


def test_a_run_is_measured_after_every_epoch() -> None:
    run = convergence_runs.SimulatedRun("sgd", 8, "jointspar(0.5)", 0.0125, seed=3)
    trajectory = convergence_runs.simulate(run, epochs=3)
    assert len(trajectory.losses) == len(trajectory.tests) == 3
    assert trajectory.losses[-1] < trajectory.losses[0]
    assert trajectory.tests[-1] > 60
    assert trajectory == convergence_runs.simulate(run, epochs=3)
    # Linear scaling: the same number of images per worker.
    assert convergence_runs.steps_per_epoch(8) == 1202 // 200


def test_a_run_that_diverges_has_no_accuracy() -> None:
    run = convergence_runs.SimulatedRun("sgd", 8, "dense", 100.0, seed=0)
    trajectory = convergence_runs.simulate(run, epochs=2)
    assert math.isnan(trajectory.tests[-1])
    assert math.isnan(trajectory.losses[-1])


def test_per_rank_sets_replace_lars_by_lars_with_own_norms() -> None:
    for optimizer, expected in (("lars", "lars-own"), ("sgd", "sgd")):
        run = convergence_runs.SimulatedRun(optimizer, 2, PER_RANK, 0.1, 0)
        assert convergence_runs.optimizer_for(run) == expected
    run = convergence_runs.SimulatedRun("lars", 2, "jointspar(0.5)", 0.1, 0)
    assert convergence_runs.optimizer_for(run) == "lars"


def test_the_epochs_to_a_loss_are_interpolated() -> None:
    assert convergence_summary.epochs_to([1.0, 0.01], 0.1) == pytest.approx(1.5)
    assert convergence_summary.epochs_to([0.05, 0.01], 0.1) == 1
    assert math.isnan(convergence_summary.epochs_to([1.0, 0.5], 0.1))
    assert math.isnan(convergence_summary.epochs_to([math.nan, math.nan], 0.1))


def rows_of(method: str, values: dict[int, float], **cells: object) -> list[dict[str, str]]:
    given = {"optimizer": "sgd", "workers": 2, "method": method, "lr": 0.1, **cells}
    texts = {name: str(value) for name, value in given.items()}
    return [{**texts, "seed": str(seed), "test": str(test)} for seed, test in values.items()]


def test_differences_are_paired_and_failed_runs_are_counted() -> None:
    runs = rows_of("dense", {0: 96.0, 1: 98.0, 2: 97.0})
    runs += rows_of("jointspar(0.6)", {0: 95.0, 1: 96.0, 2: math.nan})
    lrs = {("sgd", "dense"): 0.1, ("sgd", "jointspar(0.6)"): 0.1}
    lines = convergence_summary.accuracy_table("sgd", runs, lrs).splitlines()
    assert "97.00 ± 1.00" in lines[2]
    assert "95.50 ± 0.71 (-1.50 ± 0.50), 1 of 3 failed" in lines[3]


def test_speeds_are_ratios_to_dense_training() -> None:
    curves = []
    for method, losses in {"dense": (1.0, 0.01), "jointspar(0.6)": (10.0, 0.1)}.items():
        for seed in (0, 1):
            run = rows_of(method, {seed: 0.0}, quantity="train_loss")[0]
            # The second run of JointSpar never reaches a loss of 0.01.
            last = (losses[1], 0.001 if seed == 0 else losses[1])
            curves.append({**run, "1": str(losses[0]), "2": str(last[0]), "3": str(last[1])})
    lrs = {("sgd", "dense"): 0.1, ("sgd", "jointspar(0.6)"): 0.1}
    lines = convergence_summary.speed_table("sgd", curves, lrs).splitlines()
    # 1.5 and 2 epochs; 2 and 2.5 epochs, the latter of one seed.
    assert "1.33 ± 0.00 |" in lines[4]
    assert "1.25, 1 of 2 reach it" in lines[5]


def test_held_out_images_choose_one_lr_for_all_worker_counts() -> None:
    rows = []
    for lr, by_workers in {0.1: (96.0, 95.0), 0.2: (97.0, math.nan), 0.3: (90.0, 90.0)}.items():
        for workers, validation in zip((2, 8), by_workers, strict=True):
            rows += rows_of("dense", {1000: 0.0}, workers=workers, lr=lr, validation=validation)
    assert convergence_summary.chosen_lrs(rows) == {("sgd", "dense"): 0.1}


def curve_rows(method: str, losses: dict[int, float]) -> list[dict[str, str]]:
    rows = []
    for seed, loss in losses.items():
        for quantity, value in (("train_loss", loss), ("test_accuracy", 95 + loss)):
            row = rows_of(method, {seed: 0.0}, quantity=quantity)[0]
            rows.append({**row, "1": str(value), "2": str(value)})
    return rows


def test_a_picture_has_only_lines_that_are_drawn_and_names_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(
        convergence_drawing, "save_figure", lambda figure, _: figures.append(figure)
    )
    curves = curve_rows("dense", {0: 0.5, 1: 0.4})
    curves += curve_rows("jointspar(0.6)", {0: 0.7, 1: 0.6})
    curves += curve_rows("jointspar(0.3)", {0: 0.9, 1: math.nan})
    lrs = {("sgd", "dense"): 0.1}
    convergence_drawing.draw_convergence("sgd", curves, lrs, tmp_path / "picture.png")
    (figure,) = figures
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["dense", "Baseline, shared sets, layers, 60%"]
    losses, accuracies = figure.axes
    assert [len(each.lines) for each in (losses, accuracies)] == [2, 2]
    (note,) = losses.texts
    assert note.get_text().splitlines()[1:] == ["Baseline, shared sets, layers, 30%"]
    assert not accuracies.texts


def test_accuracies_are_also_compared_at_the_lr_of_dense_training() -> None:
    runs = rows_of("dense", {0: 97.0, 1: 98.0})
    runs += rows_of("jointspar(0.6)", {0: 96.0, 1: 97.5})
    runs += rows_of("jointspar(0.6)", {0: 90.0, 1: 90.0}, lr=0.025)
    lrs = {("sgd", "dense"): 0.1, ("sgd", "jointspar(0.6)"): 0.025}
    line = convergence_summary.same_lr_table("sgd", runs, lrs).splitlines()[3]
    assert "| 0.1 | 96.75 ± 1.06 (-0.75 ± 0.25) |" in line


# --- The program ----------------------------------------------------------------------------------


def test_the_program_trains_what_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--quick", "--out", str(tmp_path), "--workers", "8", "--optimizers", "lars"]
    words += ["--methods", PER_RANK, "--processes", "1", "--seeds", "5"]
    monkeypatch.setattr(sys, "argv", ["convergence.py", *words])
    convergence.main()
    rows = read_csv(tmp_path / "convergence.csv")
    assert [(row["method"], row["seed"]) for row in rows] == [("dense", "5"), (PER_RANK, "5")]
    assert float(rows[1]["sent"]) > 0.95
    assert len(read_csv(tmp_path / "convergence_tuning.csv")) == 4
    before = (tmp_path / "convergence.csv").read_text()
    assert (tmp_path / "convergence_lars.png").exists()
    monkeypatch.setattr(sys, "argv", ["convergence.py", *words, "--resume"])
    convergence.main()
    assert (tmp_path / "convergence.csv").read_text() == before


def test_rows_of_other_runs_choose_no_learning_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed table can have a seed that is reported now, and other numbers of workers."""
    words = ["--out", str(tmp_path), "--resume", "--seeds", "1000", "--optimizers", "sgd", "sgd"]
    words += ["--workers", "2", "2", "--methods", "jointspar(0.5)"]
    monkeypatch.setattr(sys, "argv", ["convergence.py", *words])
    arguments = convergence.parse(words)
    tuning = convergence.open_table(arguments, "convergence_tuning")
    planned = list(convergence.tuning_runs(arguments))
    assert len(planned) == len(set(planned)) == 2 * 2 * 5
    assert {run.seed for run in planned} == {1001, 1002}
    others = [replace(run, seed=1000) for run in planned] + [
        replace(run, workers=8) for run in planned
    ]
    for run in planned + others:
        # The planned runs prefer 0.0125, the others 0.05.
        best = 0.0125 if run in planned else 0.05
        tuning.add((*run.cells, 0.1, 97.0 if run.lr == best else 50.0, *["0"] * 6))
    trained: list[Any] = []

    def record(runs: Any, *_: Any) -> None:
        trained.extend(runs)

    monkeypatch.setattr(convergence, "train_missing", record)
    monkeypatch.setattr(convergence, "draw_convergence", lambda *_: None)
    convergence.main()
    assert {run.lr for run in trained if run.seed == 1000} == {0.0125}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "topk(0.3)"], "topk"),
        (["--methods", "jointspar(3)"], "budget.*3"),
        (["--workers", "60"], "--workers 60"),
        (["--workers", "0"], "--workers.*0"),
        (["--optimizers", "adam"], "--optimizers.*'adam'"),
        (["--processes", "0"], "--processes.*0"),
    ],
)
def test_bad_flags_are_errors(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["convergence.py", *words, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        convergence.main()
    assert re.search(message, str(ended.value))
    assert list(tmp_path.iterdir()) == []


def test_the_published_runs_are_complete() -> None:
    arguments = convergence.parse(["--resume"])
    finished = {
        convergence_runs.SimulatedRun.of(row) for row in convergence.open_table(arguments).rows
    }
    lrs = convergence_summary.chosen_lrs(read_csv(RESULTS / "convergence_tuning.csv"))
    assert set(convergence.reported_runs(arguments, lrs)) <= finished
    assert {run.seed for run in finished} == set(SEEDS)
    assert len(convergence.open_curves(arguments).rows) == 2 * len(finished)


@pytest.mark.parametrize("name", list(tables.TABLES))
def test_every_table_is_made_from_the_published_results(name: str) -> None:
    lines = tables.TABLES[name](RESULTS).splitlines()
    assert len(lines) > 3
    assert len({line.count("|") for line in lines}) == 1
