"""The experiments of the bidirectional TopK thesis, compared with real ranks and serial loops."""

import os
import re
import shutil
import subprocess
import sys
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
    simulation,
)
from recipes.errors import RecipeError
from recipes.experiments import ResultTable
from recipes.result_files import read_csv, read_notes
from tests.recipes.forked_ranks import RECIPES
from tests.support.patience import PATIENCE
from tests.support.ranks import on_threads
from torchcomp.routes import threshold

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


pytestmark = pytest.mark.usefixtures("one_thread")


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
    simulated = simulation.Workers(model, SIMULATED[0], 4)
    for step in data:
        simulated.backward(partial(loss_of, model, step))
    for exchange, averager in zip(simulated.exchanges, simulated.averagers, strict=True):
        assert sum(received.nbytes for received in exchange.log) == averager.stats.bytes_received


def loss_of(model: nn.Module, step: list[tuple[Tensor, Tensor]], rank: int) -> Tensor:
    images, labels = step[rank]
    return cross_entropy(model(images), labels)


def test_the_threshold_is_found_by_histograms() -> None:
    """With many candidates the search uses other collectives, which are also simulated."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(0, 2**31 - 1, (40_000,), generator=generator, dtype=torch.int32)
    parts = whole.split(10_000)

    def work(exchange: torchcomp.InProcessExchange) -> threshold.Selection:
        query = threshold.Query(parts[exchange.rank], (10_000,) * 4, 500)
        return threshold.find_largest(exchange, [query])[0]

    for selection in torchcomp.run_in_process(4, work):
        assert selection.threshold == int(whole.sort(descending=True).values[499])
        assert sum(selection.counts) == 500


def test_a_threshold_far_above_the_last_one_is_found() -> None:
    """The last bin of the window around the previous threshold is open: all values are in it."""
    x = torch.linspace(100.0, 1000.0, 4000)
    bits = threshold.order_bits(x)
    guess = int(threshold.order_bits(torch.ones(1)))

    def work(exchange: torchcomp.InProcessExchange) -> threshold.Selection:
        query = threshold.Query(bits[exchange.rank :: 4], (1000,) * 4, 5, guess)
        return threshold.find_largest(exchange, [query])[0]

    for selection in torchcomp.run_in_process(4, work):
        assert selection.threshold == int(bits[-5])
        assert sum(selection.counts) == 5


def test_a_worker_that_fails_ends_the_step_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (step,) = small_model(), batches(3, 1)
    simulated = simulation.Workers(model, SIMULATED[0], 3)
    method = type(simulated.averagers[0].aggregator)
    aggregate = method.aggregate

    def fails(method: Any, bucket: Any, exchange: Any, *rest: Any) -> None:
        if exchange.rank == 1:
            raise ZeroDivisionError("planted")
        aggregate(method, bucket, exchange, *rest)

    monkeypatch.setattr(method, "aggregate", fails)
    with pytest.raises(ZeroDivisionError, match="planted"):
        simulated.backward(partial(loss_of, model, step))


def test_replicas_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (step,) = small_model(), batches(3, 1)
    simulated = simulation.Workers(model, "mean", 3)
    method = type(simulated.averagers[0].aggregator)
    mean = method.aggregate

    def drifts(method: Any, bucket: Any, exchange: Any, *rest: Any) -> None:
        mean(method, bucket, exchange, *rest)
        bucket.flat[0] += exchange.rank == 2

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


def test_supports_are_the_entries_that_each_worker_selected() -> None:
    model, (step,) = small_model(), batches(3, 1)
    spec = 'ef(topk(0.001, scope="model"), exchange="allgather")'
    gradients = []
    for rank in range(3):
        model.zero_grad()
        loss_of(model, step, rank).backward()
        gradients.append({name: p.grad.flatten() for name, p in model.named_parameters()})
    simulated = simulation.Workers(model, spec, 3, watch=True)
    simulated.backward(partial(loss_of, model, step))
    for gradient, supports in zip(gradients, simulated.supports, strict=True):
        support = torch.cat(list(supports.values()))
        flat = torch.cat([gradient[name] for name in supports])
        k = simulated.averagers[0].aggregator.compressor.kept(flat.numel())
        assert torch.equal(support.nonzero().flatten(), flat.abs().topk(k).indices.sort().values)


# --- The measurements -----------------------------------------------------------------------------


def test_random_supports_overlap_as_drawn_ones_do() -> None:
    rng = np.random.default_rng(0)
    drawn = [
        len(set().union(*(rng.choice(1000, 30, replace=False) for _ in range(20)))) / 30
        for _ in range(200)
    ]
    assert downlink.random_union(1000, 30, 20) == pytest.approx(np.mean(drawn), rel=0.01)


@pytest.mark.thorough
def test_the_quick_run_writes_tables_and_pictures_and_is_resumed(tmp_path: Path) -> None:
    command = [*PROGRAM, "--quick", "--only", "downlink", "accuracy", "--models", "mlp"]
    command += ["--out", str(tmp_path)]

    def run(*flags: str) -> str:
        finished = subprocess.run(
            [*command, *flags], env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE
        )
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    run()
    table = (tmp_path / "downlink.csv").read_text().splitlines()
    assert table[0].startswith("# command: python ")
    assert str(tmp_path) not in "".join(line for line in table if not line.startswith("# command"))
    rows = read_csv(tmp_path / "downlink.csv")
    assert [int(row["workers"]) for row in rows] == [2, 4, 8] * 4
    for row in rows:
        assert 1 < float(row["union"]) <= int(row["workers"])
    scores = read_csv(tmp_path / "accuracy.csv")
    assert [row["method"] for row in scores] == list(accuracy.METHODS)
    for picture in ("downlink.png", "accuracy.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    # An interruption before the last row: only that one is measured again.
    (tmp_path / "downlink.csv").write_text("\n".join(table[:-1]) + "\n")
    assert run("--resume").count(": union ") == 1
    assert (tmp_path / "downlink.csv").read_text().splitlines() == table


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
        (["--models", "vgg"], "error: .*--models.*'vgg'"),
        (["--quik"], "error: .*--quik"),
        (["--quick", "--out", str(FOLDER / "results")], "error: --quick.*--out.*results"),
        (["--resume", "--dataset", "mnist", "--data", "MNIST"], "error: .*mnist, 8 steps"),
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
    tables = published_tables()
    downlinks, accuracies = tables["downlink"], tables["accuracy"]
    models = list(problems.MODELS)
    assert (len(downlinks.rows), len(accuracies.rows)) == (48, 6)
    assert experiment.missing_downlinks(models, experiment.WHOLE, downlinks) == []
    assert experiment.missing_accuracies(models, accuracies) == []
    removed = [downlinks.rows.pop(0), accuracies.rows.pop(0)]
    wanted = experiment.missing_downlinks(models, experiment.WHOLE, downlinks)
    assert wanted == [downlink.order_of(removed[0])]
    assert experiment.missing_accuracies(models, accuracies) == [("cnn", "dense")]


def test_pictures_are_drawn_from_the_tables(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "results", tmp_path, dirs_exist_ok=True)
    for name, draw in (
        ("counterexample", pictures.draw_counterexample),
        ("downlink", pictures.draw_downlink),
        ("accuracy", pictures.draw_accuracy),
    ):
        picture = tmp_path / f"{name}.png"
        picture.unlink()
        draw(tmp_path)
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_downlink_row_is_read_as_it_was_written() -> None:
    (row, *_) = published_tables()["downlink"].rows
    assert [*map(str, downlink.Downlink.of(row).cells())] == [*row.values()]


def test_a_model_or_a_part_that_is_named_twice_runs_once() -> None:
    words = ["--models", "cnn", "mlp", "cnn", "--only", "accuracy", "downlink", "accuracy"]
    parsed = experiment.parse(words)
    assert (parsed.models, parsed.only) == (["cnn", "mlp"], ["accuracy", "downlink"])


def test_results_of_the_repository_are_not_overwritten_by_accident() -> None:
    assert experiment.parse([]).out == FOLDER / "results"
    assert experiment.parse(["--quick"]).out == Path("runs/bidirectional_topk-quick")
    assert experiment.parse(["--dataset", "mnist"]).out == Path("runs/bidirectional_topk")


# --- Tables that can be resumed -------------------------------------------------------------------


def test_a_resumed_table_keeps_its_rows_and_its_first_command(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    table = ResultTable(path, ("lr", "seed"), "a task", resume=True)
    assert table.rows == []
    table.add([0.1, 0], [0.1, 1])
    path.write_text(path.read_text().replace("# date: ", "# date: long before "))
    resumed = ResultTable(path, ("lr", "seed"), "a task", resume=True)
    resumed.add([0.2, 0])
    assert [row["lr"] for row in read_csv(path)] == ["0.1", "0.1", "0.2"]
    assert read_notes(path)["date"].startswith("long before")
    fresh = ResultTable(path, ("lr", "seed"), "another task", resume=False)
    assert fresh.rows == []
    assert [file.name for file in tmp_path.iterdir()] == ["table.csv"]


@pytest.mark.parametrize(
    ("header", "task", "message"),
    [
        (("lr", "seed"), "another task", "table.csv.*a task.*another task.*--out"),
        (("rate", "seed"), "a task", "table.csv.*lr, seed.*rate, seed"),
    ],
)
def test_a_table_of_other_settings_is_not_resumed(
    header: tuple[str, ...], task: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "table.csv"
    ResultTable(path, ("lr", "seed"), "a task", resume=False).add([0.1, 0])
    with pytest.raises(RecipeError, match=message):
        ResultTable(path, header, task, resume=True)


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
