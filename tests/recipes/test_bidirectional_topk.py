"""The experiments of the bidirectional TopK thesis, compared with real ranks and serial loops."""

import itertools
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from recipes.bidirectional_topk import (
    accuracy,
    counterexample,
    downlink,
    experiment,
    pictures,
    problems,
    runs,
    simulation,
    summary,
    training,
    union,
)
from recipes.bidirectional_topk.methods import METHODS
from recipes.bidirectional_topk.runs import Run
from recipes.bidirectional_topk.serial import SerialWorkers
from recipes.errors import RecipeError
from recipes.experiments import ResultTable
from recipes.result_files import read_csv
from recipes.spread import Spread
from tests.recipes.forked_ranks import RECIPES
from tests.support.patience import PATIENCE
from tests.support.ranks import on_threads
from torchcomp.keys import Key
from torchcomp.prepared import Prepared

FOLDER = RECIPES / "bidirectional_topk"

PROGRAM = [sys.executable, "-m", "recipes.bidirectional_topk.experiment"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SIMULATED = [
    'bidirectional(topk(0.02), topk(0.02), selection="exact")',
    'bidirectional(topk(0.02, scope="model"), topk(0.01, scope="model"), selection="exact")',
    'bidirectional(topk(0.1, values="int8"), topk(0.1), selection="shard")',
    'ef(topk(0.02), exchange="allgather")',
    'ef(topk(0.02), exchange="sharded")',
]


# --- The counterexample ---------------------------------------------------------------------------


def serial(method: str, lr: float, steps: int) -> list[float]:
    """The algorithms as written in the thesis, except that lr is applied outside the residual."""
    w = np.full(100, 20.0)
    eps, delta = np.zeros((3, 100)), np.zeros(100)
    values = []
    for _ in range(steps):
        values.append(sum(((w - a) ** 2).sum() / 2 for a in (1.0, 5.0, 10.0)) / 3)
        messages = np.zeros((3, 100))
        for q, a in enumerate((1.0, 5.0, 10.0)):
            x = eps[q] + (w - a)
            messages[q] = x if method == "downlink only" else largest(x)
            eps[q] = x - messages[q]
        s = (messages[0] + messages[1] + messages[2]) / 3
        if method != "unidirectional":
            x = s + delta
            s = largest(x)
            delta = x - s
        w = w - lr * s
    return values


def largest(x: Any) -> Any:
    """Keep the first entry of largest magnitude."""
    kept = np.zeros_like(x)
    index = np.abs(x).argmax()
    kept[index] = x[index]
    return kept


@pytest.mark.thorough
def test_the_ranks_follow_the_algorithms_of_the_thesis() -> None:
    steps = 20
    jobs = [(method, 0.01) for method in counterexample.METHODS]
    for run in counterexample.on_ranks(jobs, steps):
        expected = serial(run.method, 0.01, steps)
        # Only the order of summation of F differs.
        np.testing.assert_allclose(run.values, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("method", list(counterexample.METHODS))
def test_the_weights_are_the_serial_ones_bit_for_bit(method: str) -> None:
    def body() -> Tensor:
        model = DistributedDataParallel(counterexample.Quadratic())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        torchcomp.register(model, counterexample.METHODS[method])
        for _ in range(150):
            optimizer.zero_grad()
            model(counterexample.CENTRES[dist.get_rank()]).backward()
            optimizer.step()
        return model.module.w.detach()

    w = on_threads(3, body)[0]
    assert torch.equal(w, serial_weights(method, 150))


def serial_weights(method: str, steps: int) -> Tensor:
    """In torch, because its SGD step is a fused multiply-add, which NumPy lacks."""
    w = torch.full((100,), 20.0, dtype=torch.float64)
    eps, delta = torch.zeros(3, 100).double(), torch.zeros(100).double()
    for _ in range(steps):
        messages = []
        for q, a in enumerate((1.0, 5.0, 10.0)):
            x = (w - a) + eps[q]
            messages.append(
                x if method == "downlink only" else torch.from_numpy(largest(x.numpy()))
            )
            eps[q] = x - messages[-1]
        s = (messages[0] + messages[1] + messages[2]) / 3
        if method != "unidirectional":
            x = s + delta
            s = torch.from_numpy(largest(x.numpy()))
            delta = x - s
        w = w.add(s, alpha=-0.01)
    return w


def test_a_number_that_differs_from_the_thesis_s_is_named() -> None:
    values = [700.0] * counterexample.STEPS
    values[300], values[500] = 698.906, 697.687
    run = counterexample.CounterexampleRun("unidirectional", 0.01, tuple(values))
    row = dict(zip(counterexample.COLUMNS, map(str, run.cells()), strict=True))
    (difference,) = counterexample.differences([row])
    assert difference.startswith("unidirectional, mean F over [400, 1000): 69")
    assert difference.endswith(" 701.309")


def test_published_runs_have_the_thesis_s_numbers_and_lack_nothing() -> None:
    table = published_tables()["counterexample"]
    assert len(table.rows) == 15
    assert counterexample.missing(counterexample.LRS, table) == []
    assert counterexample.differences(table.rows) == []
    table.rows.pop(0)
    assert counterexample.missing(counterexample.LRS, table) == [[("unidirectional", 0.005)]]


@pytest.mark.slow
def test_the_whole_counterexample_is_the_thesis_s(tmp_path: Path) -> None:
    command = [*PROGRAM, "--only", "counterexample", "--quick", "--out", str(tmp_path)]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stdout + run.stderr
    for numbers in counterexample.PUBLISHED.values():
        assert all(run.stdout.count(number) >= 2 for number in numbers)
    assert (tmp_path / "counterexample.png").read_bytes().startswith(b"\x89PNG")


# --- The simulation -------------------------------------------------------------------------------


def small_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        # The last layer fills a group of its own, so there are two groups.
        return nn.Sequential(nn.Linear(64, 1200), nn.ReLU(), nn.Linear(1200, 250))


def batches(ranks: int, steps: int) -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(5)
    return [
        [
            (
                torch.randn(10, 64, generator=generator),
                torch.randint(10, (10,), generator=generator),
            )
            for _ in range(ranks)
        ]
        for _ in range(steps)
    ]


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("spec", SIMULATED)
def test_simulated_workers_train_like_real_ranks(spec: str) -> None:
    count, data = 4, batches(4, 4)
    models = [small_model() for _ in range(count)]

    def body() -> tuple[Tensor, int, int]:
        model = DistributedDataParallel(models[dist.get_rank()])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = torchcomp.register(model, spec)
        for step in data:
            images, labels = step[dist.get_rank()]
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
        stats = handle.stats
        return weights(model.module), stats.bytes_sent, stats.bytes_received

    real = on_threads(count, body)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    simulated = simulation.Workers(model, spec, count)
    for step in data:
        assert simulated.backward(partial(loss_of, model, step))
        optimizer.step()
    for averager, (expected, sent, received) in zip(simulated.averagers, real, strict=True):
        assert torch.equal(weights(model), expected)
        assert (averager.stats.bytes_sent, averager.stats.bytes_received) == (sent, received)


def test_the_log_contains_all_received_bytes() -> None:
    model, data = small_model(), batches(4, 2)
    simulated = simulation.Workers(model, SIMULATED[2], 4)
    for step in data:
        simulated.backward(partial(loss_of, model, step))
    for exchange, averager in zip(simulated.exchanges, simulated.averagers, strict=True):
        assert sum(received.nbytes for received in exchange.log) == averager.stats.bytes_received


def loss_of(model: nn.Module, step: list[tuple[Tensor, Tensor]], rank: int) -> Tensor:
    images, labels = step[rank]
    return cross_entropy(model(images), labels)


def test_a_worker_that_fails_ends_the_step_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (step,) = small_model(), batches(3, 1)
    simulated = simulation.Workers(model, SIMULATED[0], 3)
    method = type(simulated.averagers[0].aggregator)
    aggregate = method.aggregate

    def fails(method: Any, g: Tensor, bucket: Prepared, key: Key) -> None:
        if bucket.exchange.rank == 1:
            raise ZeroDivisionError("planted")
        aggregate(method, g, bucket, key)

    monkeypatch.setattr(method, "aggregate", fails)
    with pytest.raises(ZeroDivisionError, match="planted"):
        simulated.backward(partial(loss_of, model, step))


def test_replicas_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (step,) = small_model(), batches(3, 1)
    simulated = simulation.Workers(model, "mean", 3)
    method = type(simulated.averagers[0].aggregator)
    mean = method.aggregate

    def drifts(method: Any, g: Tensor, bucket: Prepared, key: Key) -> None:
        mean(method, g, bucket, key)
        g[0] += bucket.exchange.rank == 2

    monkeypatch.setattr(method, "aggregate", drifts)
    with pytest.raises(AssertionError, match=r"0 and 2 .*step 1"):
        simulated.backward(partial(loss_of, model, step))


@pytest.mark.parametrize("spec", ["mean", SIMULATED[0]])
def test_a_run_that_diverges_is_reported(spec: str) -> None:
    model, (step,) = small_model(), batches(3, 1)
    simulated = simulation.Workers(model, spec, 3)
    assert simulated.backward(partial(loss_of, model, step))
    step[1][0][0, 0] = torch.nan
    assert not simulated.backward(partial(loss_of, model, step))


# --- The serial form ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> problems.Problem:
    return problems.open_problem("digits", "cnn", None)


def serial_steps(
    problem: problems.Problem, workers: SerialWorkers, steps: int, seed: int = 0
) -> None:
    chosen = training.batches(problem, workers.count, seed)
    for shares in itertools.islice(chosen, steps):
        mine = problem.train.take(shares)
        assert workers.step(mine.images, mine.labels, lr=0.3)


def residuals(workers: simulation.Workers) -> Tensor:
    names = list(workers.parameters)
    each = [dict(averager.state.items("error")) for averager in workers.averagers]
    return torch.stack([torch.cat([of_rank[name] for name in names]) for of_rank in each])


@pytest.mark.parametrize("method", METHODS)
def test_serial_workers_train_like_simulated_ones(method: str, digits: problems.Problem) -> None:
    models = digits.build(0), digits.build(0)
    # More workers than are computed together.
    count = 27
    simulated = simulation.Workers(models[0], METHODS[method].spec(0.001), count)
    serial = SerialWorkers(models[1], METHODS[method], count, 0.001)
    training.train(digits, simulated, models[0], lr=0.3, steps=3, seed=0)
    serial_steps(digits, serial, 3)
    # Only the order of some sums differs.
    torch.testing.assert_close(weights(models[1]), weights(models[0]), rtol=0, atol=1e-6)
    if METHODS[method].up:
        expected = residuals(simulated)
        torch.testing.assert_close(serial.residuals, expected, rtol=0, atol=1e-5)
        assert torch.equal(serial.residuals == 0, expected == 0)


@pytest.mark.parametrize("method", METHODS)
def test_simulated_workers_continue_a_serial_run(method: str, digits: problems.Problem) -> None:
    models = digits.build(0), digits.build(0)
    serial = SerialWorkers(models[0], METHODS[method], 3, 0.001)
    whole = SerialWorkers(models[1], METHODS[method], 3, 0.001)
    serial_steps(digits, serial, 4)
    simulated = simulation.Workers(models[0], METHODS[method].spec(0.001), 3)
    simulated.continue_from(serial)
    training.train(digits, simulated, models[0], lr=0.3, steps=2, seed=1)
    serial_steps(digits, whole, 4)
    serial_steps(digits, whole, 2, seed=1)
    torch.testing.assert_close(weights(models[0]), weights(models[1]), rtol=0, atol=1e-6)


def test_the_union_counts_the_entries_that_any_worker_sent(digits: problems.Problem) -> None:
    model = digits.build(0)
    chosen = next(training.batches(digits, 4, seed=0))
    supports = set()
    for shares in chosen:
        mine = digits.train.take(shares)
        gradient = torch.autograd.grad(
            cross_entropy(model(mine.images), mine.labels), list(model.parameters())
        )
        flat = torch.cat([part.flatten() for part in gradient])
        supports |= set(flat.abs().topk(72).indices.tolist())
    serial = SerialWorkers(model, METHODS["unidirectional"], 4, 0.001)
    serial_steps(digits, serial, 1)
    assert (serial.k, serial.union) == (72, len(supports))


def test_a_run_has_its_unions_and_what_was_touched(digits: problems.Problem) -> None:
    run = Run("digits", "cnn", "bidirectional", workers=3, lr=0.1, steps=30, seed=1)
    outcome, _ = runs.train_serially(run, digits)
    assert (outcome.d, outcome.k, len(outcome.unions)) == (71_754, 72, 2)
    assert all(1 < size <= 3 for size in outcome.unions)
    # Some units are never active.
    assert 40_000 < outcome.touched < outcome.d
    assert outcome.accuracy > 20
    row = dict(zip(runs.COLUMNS, map(str, runs.cells(run, outcome)), strict=True))
    assert Run.of(row) == run
    assert runs.missing([run, replace(run, seed=2)], [row]) == [replace(run, seed=2)]


def test_a_run_that_diverges_scores_nothing(digits: problems.Problem) -> None:
    run = Run("digits", "cnn", "dense", workers=2, lr=1e30, steps=5, seed=0)
    outcome, _ = runs.train_serially(run, digits)
    assert (outcome.accuracy, outcome.loss) == (0.0, float("inf"))


def test_shifted_digits_are_the_digits_at_25_places() -> None:
    problem = problems.open_problem("shifted-digits", "mlp", None)
    digits = problems.open_problem("digits", "mlp", None)
    for shifted, plain in ((problem.train, digits.train), (problem.test, digits.test)):
        count, empty = len(plain.labels), float(plain.images.min())
        assert shifted.images.shape == (25 * count, 1, 12, 12)
        for place, (y, x) in enumerate(itertools.product(range(5), repeat=2)):
            mine = slice(place * count, (place + 1) * count)
            found = shifted.images[mine]
            assert torch.equal(found[:, :, y : y + 8, x : x + 8], plain.images)
            assert int((found != empty).sum()) == int((plain.images != empty).sum())
            assert torch.equal(shifted.labels[mine], plain.labels)


# --- The measurements -----------------------------------------------------------------------------


def test_random_supports_overlap_as_drawn_ones_do() -> None:
    rng = np.random.default_rng(0)
    drawn = [
        len(set().union(*(rng.choice(1000, 30, replace=False) for _ in range(20)))) / 30
        for _ in range(200)
    ]
    assert downlink.random_union(1000, 30, 20) == pytest.approx(np.mean(drawn), rel=0.01)


def rows_of(unions: dict[int, dict[int, list[float]]], steps: int = 1000) -> list[dict[str, str]]:
    """Rows of unidirectional runs: by N and seed, a value for each fifth of the steps."""
    rows = []
    for n, by_seed in unions.items():
        for seed, fifths in by_seed.items():
            run = Run("digits", "mlp", "unidirectional", n, union.LR, steps, seed)
            windows = [value for value in fifths for _ in range(steps // 5 // runs.WINDOW)]
            outcome = runs.Outcome(85_002, 86, 80_000 + seed, 90.0, 0.1, tuple(windows))
            row = [*runs.cells(run, outcome), "", "", "", ""]
            rows.append(dict(zip(union.COLUMNS, map(str, row), strict=True)))
    return rows


def test_late_unions_are_those_of_the_last_two_fifths() -> None:
    rows = rows_of({20: {0: [1.0, 2.0, 3.0, 10.0, 12.0], 4: [1.0, 2.0, 3.0, 11.0, 12.0]}})
    (group,) = summary.grouped(rows)
    assert (group.run.workers, group.steps) == (20, 1000)
    assert group.late == {0: 11.0, 4: 11.5}
    assert group.halves == ({0: 10.0, 4: 11.0}, {0: 12.0, 4: 12.0})
    assert (group.change.mean, group.change.count) == (1.5, 2)
    assert group.touched == {0: 80_000, 4: 80_004}
    assert group.random == downlink.random_union(85_002, 86, 20)
    assert group.random_touched == downlink.random_union(80_002, 86, 20)
    assert 10.0 < group.saving[0] < 11.0


def test_longer_runs_are_summarised_over_the_same_steps() -> None:
    fifths = [0.0, 1.0, 2.0, 3.0, 4.0]
    (group,) = summary.grouped(rows_of({20: {0: fifths}}, steps=2000))
    # Steps 601 to 1000 are in the second and third fifth of 2000 steps.
    assert group.late == {0: 1.5}
    assert summary.usual([group]) == []


def test_growth_is_fitted_for_each_seed() -> None:
    line = {n: {0: [0.9 * n + 0.1] * 5, 1: [0.8 * n + 0.2] * 5} for n in (2, 10, 50, 100)}
    fit = summary.growth(summary.grouped(rows_of(line)), lambda each: each.late)
    assert fit.slope.mean == pytest.approx(0.85)
    assert fit.slope.deviation == pytest.approx(0.1 / 2**0.5)
    assert fit.intercept.mean == pytest.approx(0.15)
    assert fit.r2.mean == pytest.approx(1.0)
    power = {n: {0: [n**0.75] * 5} for n in (1, 16, 81)}
    fit = summary.growth(summary.grouped(rows_of(power)), lambda each: each.late)
    assert fit.exponent == Spread(pytest.approx(0.75), pytest.approx(float("nan"), nan_ok=True), 1)
    assert fit.r2.mean < 1


def test_a_confidence_interval_is_student_s() -> None:
    assert summary.confidence(Spread(5.0, 2.0, 3)) == pytest.approx(4.3027 * 2 / 3**0.5, rel=1e-4)


def test_the_learning_rate_is_the_best_on_the_held_out_images() -> None:
    usual = Run("digits", "mlp", "dense", 20, 0.1, 200, 1000, images="validation")
    scored = [
        (usual, 90.0, 0.5),
        (replace(usual, lr=0.3), 95.0, 0.5),
        (replace(usual, lr=0.3, seed=1001), 91.0, 0.4),
        (replace(usual, lr=1.0), 93.0, 0.3),  # as accurate in the mean, with a smaller loss
        (replace(usual, lr=3.0, images="test"), 99.0, 0.1),
        (replace(usual, lr=3.0, workers=50), 99.0, 0.1),
    ]
    rows = [
        dict(zip(runs.COLUMNS, map(str, runs.cells(run, outcome)), strict=True))
        for run, percent, loss in scored
        for outcome in [runs.Outcome(10, 1, 10, percent, loss, (1.0,))]
    ]
    assert accuracy.best_lr(usual, rows) == 1.0
    reported = Run("digits", "mlp", "dense", 20, 1.0, 200, 7)
    assert accuracy.best_lr(reported, rows) == 1.0
    size = accuracy.AccuracySize()
    assert len(size.tuning_runs("digits", ("mlp", 20), [1000, 1001])) == 4 * 4 * 2


def test_reported_runs_at_a_learning_rate_that_is_not_chosen_do_not_count() -> None:
    """An earlier session with another tuning seed may have chosen another one."""
    tried = Run("digits", "mlp", "dense", 20, 0.1, 200, 1000, images="validation")
    reported = replace(tried, images="test", seed=0)
    scored = [
        (tried, 90.0),
        (replace(tried, lr=0.3), 95.0),
        (replace(reported, lr=0.3), 91.0),
        (reported, 80.0),
        (replace(reported, seed=1), 81.0),
    ]
    rows = [
        dict(zip(runs.COLUMNS, map(str, runs.cells(run, outcome)), strict=True))
        for run, percent in scored
        for outcome in [runs.Outcome(10, 1, 10, percent, 0.5, (1.0,))]
    ]
    dense = summary.scores(rows)["mlp", 20]["dense"]
    assert (dense.lr, dense.accuracies) == (0.3, {0: 91.0})
    assert dense.tried == {0.1: 90.0, 0.3: 95.0}


def test_real_averagers_count_the_traffic(digits: problems.Problem) -> None:
    run = Run("digits", "cnn", "bidirectional", workers=3, lr=0.1, steps=2, seed=0)
    row = dict(zip(union.COLUMNS, map(str, union.measure(run, digits)), strict=True))
    (mean,) = summary.traffic_means([row, rows_of({3: {0: [1.0] * 5}})[0]])
    # A message has 4 bytes for each value, and more for its index.
    assert 2 / 3 * 72 * 4 < mean.up < mean.busiest
    assert mean.total == mean.up + mean.down + mean.selection
    assert mean.selection > 0
    for planned, method in ((mean.by_shard, "bidirectional"), (mean.gather, "unidirectional")):
        spec = METHODS[method].spec(0.001, "shard")
        plan = torchcomp.explain(spec, numel=71_754, world_size=3)
        assert planned == plan.bytes_received


@pytest.mark.thorough
def test_the_quick_run_writes_tables_and_pictures_and_is_resumed(tmp_path: Path) -> None:
    command = [*PROGRAM, "--quick", "--only", "union", "accuracy", "--seeds", "4"]
    command += ["--out", str(tmp_path)]

    def run(*flags: str) -> str:
        finished = subprocess.run(
            [*command, *flags], env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE
        )
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    run()
    table = (tmp_path / "union.csv").read_text().splitlines()
    rows = read_csv(tmp_path / "union.csv")
    assert {row["seed"] for row in rows} == {"4"}
    assert {(row["dataset"], row["model"]) for row in rows} == {
        ("digits", "mlp"),
        ("digits", "cnn"),
        ("shifted-digits", "mlp"),
    }
    scores = summary.scores(read_csv(tmp_path / "accuracy.csv"))
    assert [*scores] == [("mlp", 4), ("cnn", 4)]
    for methods in scores.values():
        assert methods.keys() == METHODS.keys()
        for score in methods.values():
            assert score.accuracies.keys() == {4}
            assert score.lr == max(score.tried, key=score.tried.__getitem__)
    for picture in ("union.png", "accuracy.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    # An interruption before the last row: only that one is measured again.
    (tmp_path / "union.csv").write_text("\n".join(table[:-1]) + "\n")
    assert run("--resume").count("union: ") == 1
    assert len((tmp_path / "union.csv").read_text().splitlines()) == len(table)


@pytest.mark.parametrize("dataset", ["mnist", "fashion-mnist", "cifar10"])
@pytest.mark.parametrize("folder", [None, "absent", "."], ids=["no folder", "absent", "empty"])
def test_missing_data_is_an_error(dataset: str, folder: str | None, tmp_path: Path) -> None:
    path = None if folder is None else tmp_path / folder
    named = "--data" if path is None else str(path)
    with pytest.raises(RecipeError, match=named):
        problems.open_problem(dataset, "mlp", path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dataset", "mnist", "--data", "."], r"error: --data \..*MNIST"),
        (["--data", "/nowhere"], r"error: --data /nowhere\b.*--dataset digits"),
        (["--out", __file__], f"error: --out {re.escape(__file__)}"),
        (["--processes", "0"], "error: --processes.*at least 1.*0"),
        (["--only", "workers"], "error: .*--only.*'workers'"),
        (["--quik"], "error: .*--quik"),
        (["--quick", "--out", str(FOLDER / "results")], "error: --quick.*--out.*results"),
        (["--resume", "--dataset", "mnist", "--data", "MNIST"], "error: .*mnist, 1000 steps"),
    ],
)
def test_bad_input_ends_in_one_line_before_anything_starts(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "MNIST" in words:
        words = [*words[:-1], str(mnist_folder(tmp_path / "data")), "--out", str(tmp_path / "out")]
        shutil.copytree(FOLDER / "results", tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    monkeypatch.setattr(sys, "argv", ["experiment.py", *words])
    with pytest.raises(SystemExit) as ended:
        experiment.main()
    line = str(ended.value)
    assert re.match(message, line)
    assert "\n" not in line
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def published_tables() -> dict[str, ResultTable]:
    return experiment.open_tables(experiment.parse(["--resume"]), experiment.WHOLE)


def test_published_tables_are_resumed_with_nothing_missing() -> None:
    tables, seeds = published_tables(), range(5)
    unions, accuracies = tables["union"].rows, tables["accuracy"].rows
    size = experiment.WHOLE
    wanted = size.union.runs("digits", seeds)
    assert runs.missing(wanted, unions) == []
    removed = unions.pop()
    assert runs.missing(wanted, unions) == [Run.of(removed)]
    for case in size.accuracy.cases:
        tuned = size.accuracy.tuning_runs("digits", case, [1000])
        tested = size.accuracy.test_runs("digits", case, seeds, accuracies)
        assert runs.missing(tuned + tested, accuracies) == []


def test_published_unions_are_near_the_thesis_s() -> None:
    groups = summary.usual(summary.grouped(published_tables()["union"].rows))
    assert [group.run.workers for group in groups] == [2, 5, 10, 20, 50, 100]
    late = {group.run.workers: np.mean([*group.late.values()]) for group in groups}
    for n, printed in summary.PUBLISHED.items():
        assert late[n] == pytest.approx(printed, rel=0.1)


def test_pictures_are_drawn_from_the_tables(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "results", tmp_path, dirs_exist_ok=True)
    for name, draw in (
        ("counterexample", pictures.draw_counterexample),
        ("union", pictures.draw_union),
        ("accuracy", pictures.draw_accuracy),
    ):
        picture = tmp_path / f"{name}.png"
        picture.unlink()
        draw(tmp_path)
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_results_of_the_repository_are_not_overwritten_by_accident() -> None:
    assert experiment.parse([]).out == FOLDER / "results"
    assert experiment.parse(["--quick"]).out == Path("runs/bidirectional_topk-quick")
    assert experiment.parse(["--dataset", "mnist"]).out == Path("runs/bidirectional_topk")


# --- Data -----------------------------------------------------------------------------------------


def mnist_folder(folder: Path) -> Path:
    """Write MNIST's files with random pixels: 60 images to train, 20 to test."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, count in (("train", 60), ("t10k", 20)):
        pixels = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        write_idx(raw / f"{name}-images-idx3-ubyte", pixels)
        write_idx(raw / f"{name}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8) % 10)
    return folder


def test_mnist_is_read_from_a_folder(tmp_path: Path) -> None:
    problem = problems.open_problem("mnist", "cnn", mnist_folder(tmp_path))
    assert problem.train.images.shape == (50, 1, 28, 28)
    assert len(problem.validation.labels) == 10
    assert problem.test.labels.tolist() == [i % 10 for i in range(20)]
    assert problem.build(0)(problem.test.images).shape == (20, 10)


def write_idx(path: Path, values: Any) -> None:
    """Lecun's idx format: two zeros, 8 for bytes, the rank, the sizes, the bytes."""
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    path.write_bytes(bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes())


def test_cifar_is_read_from_its_archive(cifar_tarball: Path) -> None:
    problem = problems.open_problem("cifar10", "mlp", cifar_tarball)
    assert problem.test.images.shape == (20, 3, 32, 32)
    assert problem.build(0)(problem.test.images).shape == (20, 10)
