"""The experiments of the bidirectional TopK thesis: real ranks, simulated workers, serial loops."""

import os
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
from recipes.bidirectional_topk import counterexample, downlink, problems, simulation, workers
from recipes.errors import RecipeError
from tests.recipes.forked_ranks import RECIPES
from tests.support.patience import PATIENCE
from tests.support.ranks import on_threads
from torchcomp.routes import threshold

FOLDER = RECIPES / "bidirectional_topk"

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SIMULATED = [
    'bidirectional(topk(0.02), topk(0.02), selection="exact")',
    'bidirectional(topk(0.02, scope="model"), topk(0.01, scope="model"), selection="exact")',
    'bidirectional(topk(0.1, values="int8"), topk(0.1), selection="shard")',
    'ef(topk(0.02), exchange="allgather")',
    'ef(topk(0.02), exchange="sharded")',
]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    # Sums of a batch are split among threads, and round by their number.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- The counterexample ---------------------------------------------------------------------------


def serial(method: str, lr: float, steps: int) -> list[float]:
    """The thesis's algorithms as it writes them, but the rate is outside the residual."""
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
    """The entry of largest magnitude; of several, the first."""
    kept = np.zeros_like(x)
    place = np.abs(x).argmax()
    kept[place] = x[place]
    return kept


@pytest.mark.thorough
def test_the_ranks_do_what_the_thesis_writes() -> None:
    steps = 20
    jobs = [(method, 0.01) for method in counterexample.METHODS]
    for run in counterexample.on_ranks(jobs, steps):
        expected = serial(run.method, 0.01, steps)
        # F is summed in another order here, and nothing else may differ.
        np.testing.assert_allclose(run.values, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("method", list(counterexample.METHODS))
def test_the_weights_are_the_serial_ones_bit_for_bit(method: str) -> None:
    def body() -> Tensor:
        model = DistributedDataParallel(counterexample.Point())
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
    """In torch, because its SGD step is a fused multiply-add of a kind that NumPy has not."""
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


def test_a_number_that_is_not_the_thesis_s_is_told() -> None:
    values = [700.0] * counterexample.STEPS
    values[300], values[500] = 698.906, 697.687
    run = counterexample.Run("unidirectional", 0.01, tuple(values))
    (told,) = counterexample.differences([run])
    assert told.startswith("unidirectional, mean F over [400, 1000): 69")
    assert told.endswith("printed 701.309")


@pytest.mark.slow
def test_the_whole_counterexample_is_the_thesis_s() -> None:
    script = [sys.executable, "-m", "recipes.bidirectional_topk.counterexample", "--no-scan"]
    run = subprocess.run(script, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "every number is the thesis's" in run.stdout


# --- The simulation -------------------------------------------------------------------------------


def small_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        # The last layer fills a group of its own, so that there are two.
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
def test_simulated_workers_train_as_real_ranks_do(spec: str) -> None:
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


def test_the_log_holds_all_that_is_received() -> None:
    model, data = small_model(), batches(4, 2)
    simulated = simulation.Workers(model, SIMULATED[0], 4)
    for step in data:
        simulated.backward(partial(loss_of, model, step))
    for exchange, averager in zip(simulated.exchanges, simulated.averagers, strict=True):
        assert sum(received.nbytes for received in exchange.log) == averager.stats.bytes_received


def loss_of(model: nn.Module, step: list[tuple[Tensor, Tensor]], rank: int) -> Tensor:
    images, labels = step[rank]
    return cross_entropy(model(images), labels)


def test_the_threshold_is_found_by_histograms_too() -> None:
    """Where candidates are many, other collectives are used: their simulation is tested, too."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(0, 2**31 - 1, (40_000,), generator=generator, dtype=torch.int32)
    parts = whole.split(10_000)

    def work(exchange: torchcomp.InProcessExchange) -> threshold.Answer:
        question = threshold.Question(parts[exchange.rank], (10_000,) * 4, 500)
        return threshold.find_largest(exchange, [question])[0]

    for answer in torchcomp.run_in_process(4, work):
        assert answer.threshold == int(whole.sort(descending=True).values[499])
        assert sum(answer.counts) == 500


def test_a_threshold_far_above_the_last_one_is_found() -> None:
    """The last bin of the window round the last threshold has no end: here everything is in it."""
    x = torch.linspace(100.0, 1000.0, 4000)
    bits = threshold.order_bits(x)
    guess = int(threshold.order_bits(torch.ones(1)))

    def work(exchange: torchcomp.InProcessExchange) -> threshold.Answer:
        question = threshold.Question(bits[exchange.rank :: 4], (1000,) * 4, 5, guess)
        return threshold.find_largest(exchange, [question])[0]

    for answer in torchcomp.run_in_process(4, work):
        assert answer.threshold == int(bits[-5])
        assert sum(answer.counts) == 5


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
    with pytest.raises(AssertionError, match="workers 0 and 2 differ at step 1"):
        simulated.backward(partial(loss_of, model, step))


@pytest.mark.parametrize("spec", ["mean", SIMULATED[0]])
def test_a_run_that_diverges_is_told(spec: str) -> None:
    model, (step,) = small_model(), batches(3, 1)
    simulated = simulation.Workers(model, spec, 3)
    assert simulated.backward(partial(loss_of, model, step))
    step[1][0][0, 0] = torch.nan
    assert not simulated.backward(partial(loss_of, model, step))


def test_supports_are_what_each_worker_selected() -> None:
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
def test_the_quick_run_writes_tables_and_pictures(tmp_path: Path) -> None:
    script = [
        sys.executable,
        "-m",
        "recipes.bidirectional_topk.workers",
        "--quick",
        "--models",
        "mlp",
    ]
    run = subprocess.run(
        [*script, "--out", str(tmp_path)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert run.returncode == 0, run.stderr
    table = (tmp_path / "downlink.csv").read_text().splitlines()
    assert table[0].startswith("# command: python ")
    assert str(tmp_path) not in "".join(line for line in table if not line.startswith("# command"))
    header, *rows = [line.split(",") for line in table if not line.startswith("#")]
    union, count = header.index("union"), header.index("workers")
    assert [int(row[count]) for row in rows] == [2, 4, 8] * 4
    for row in rows:
        assert 1 < float(row[union]) <= int(row[count])
    scores = (tmp_path / "accuracy.csv").read_text().splitlines()
    assert [line.split(",")[2] for line in scores[4:]] == list(workers.METHODS)
    for picture in ("downlink.png", "accuracy.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("dataset", ["mnist", "fashion-mnist", "cifar10"])
@pytest.mark.parametrize("given", ["nothing", "a folder that is not there", "an empty folder"])
def test_data_that_is_not_there_is_told(dataset: str, given: str, tmp_path: Path) -> None:
    folder = {"nothing": None, "an empty folder": tmp_path}.get(given, tmp_path / "absent")
    told = {"nothing": "--data is not given", "an empty folder": str(tmp_path)}
    expected = told.get(given, "which does not exist")
    with pytest.raises(RecipeError, match=expected):
        problems.open_problem(dataset, "mlp", folder)


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        (workers, ["--dataset", "mnist", "--data", "."], "error: --data .: torchvision finds no"),
        (workers, ["--data", "/nowhere"], "error: --data /nowhere: --dataset digits is embedded"),
        (workers, ["--out", __file__], f"error: --out {__file__} must be a folder"),
        (workers, ["--processes", "0"], "error: --processes must be a whole number of at least 1"),
        (counterexample, ["--out", __file__], f"error: --out {__file__} must be a folder"),
    ],
)
def test_bad_input_ends_in_one_line_before_anything_starts(
    script: Any, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert str(ended.value).startswith(message)
    assert "\n" not in str(ended.value)


def test_a_model_that_is_named_twice_is_measured_once() -> None:
    assert workers.parse(["--models", "cnn", "mlp", "cnn"]).models == ["cnn", "mlp"]


def test_results_of_the_repository_are_not_overwritten_by_accident() -> None:
    assert workers.parse([]).out == FOLDER / "results"
    for words in (["--quick"], ["--dataset", "mnist"]):
        assert workers.parse(words).out == Path("runs/bidirectional_topk")


def test_mnist_is_read_from_a_folder(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, count in (("train", 60), ("t10k", 20)):
        pixels = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        write_idx(raw / f"{name}-images-idx3-ubyte", pixels)
        write_idx(raw / f"{name}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8) % 10)
    problem = problems.open_problem("mnist", "cnn", tmp_path)
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
