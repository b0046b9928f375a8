"""The order of streams around real DDP and LocalSGD, under the checker of tests/support/streams."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import torchcomp
from tests.local_sgd.script import Script
from tests.support.cases import only
from tests.support.models import (
    METHODS,
    SMALL_BUCKETS,
    THROUGH_DDP,
    Branches,
    loss_of,
    mlp,
    rows,
    wrap,
)
from tests.support.outcomes import reloaded
from tests.support.ranks import with_fake_ranks
from tests.support.streams import Simulator, simulated
from torchcomp.ddp.executors import Executor, Job, StreamExecutor
from torchcomp.exchange.process_group import ProcessGroupExchange

TOPK = "ef(topk(0.1))"
OVERLAP = {"overlap": True}
REGISTER = {"scaler", "check", "nodes", "inside"}


class Run:
    """Training with simulated streams. The loop reads its loss, as many do, only at the end."""

    def __init__(self, spec: str = TOPK, module: nn.Module | None = None, **options: Any) -> None:
        own = {name: options.pop(name) for name in REGISTER & options.keys()}
        self.model = wrap(module or mlp(), **options)
        self.handle = torchcomp.register(self.model, spec, **own)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.scaler = own.get("scaler") or torch.amp.GradScaler("cpu", enabled=False)

    def step(self, step: int, *inputs: Any, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        self.backward(step, *inputs, factor=factor)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def backward(self, step: int, *inputs: Any, factor: float = 1.0) -> None:
        self.scaler.scale(loss_of(self.model(rows(step), *inputs)) * factor).backward()

    def train(self, *steps: int) -> "Run":
        for step in steps:
            self.step(step)
        return self


def faults_of(body: Callable[[], Any], executor: Any = StreamExecutor, ranks: int = 2) -> list[str]:
    """Run `body` as one of some ranks, and return what the checker found."""

    all_reduce = ProcessGroupExchange._all_reduce

    def echoed(self: ProcessGroupExchange, values: Tensor, *operation: Any) -> None:
        all_reduce(self, values, *operation)  # of a fake group: it changes nothing
        if not operation:
            values.mul_(self.world_size)

    def watched() -> Simulator:
        with (
            simulated(executor) as simulator,
            mock.patch.object(ProcessGroupExchange, "_all_reduce", echoed),
        ):
            body()
        return simulator

    simulator = with_fake_ranks(ranks, watched)
    # Otherwise nothing was tested.
    side = [n for stream, n in simulator.operations.items() if stream is not simulator.main]
    assert sum(side) > 10
    assert simulator.operations[simulator.main] > 50
    return list(simulator.faults)


# --- Trainings ------------------------------------------------------------------------------------

BIDIRECTIONAL = "bidirectional(topk(0.1), topk(0.1))"
RESUMED = TOPK, "powersgd(rank=1)", "dgc(topk(0.1))", BIDIRECTIONAL
LOCAL = OVERLAP, OVERLAP | {"moments": "average"}


def trained(spec: str, **options: Any) -> None:
    Run(spec, **options).train(0, 1, 2)


def loaded(run: Run) -> None:
    state = reloaded(run.handle.state_dict())
    run.handle.load_state_dict(state)
    del state  # as a script drops what it has loaded


def resumed(spec: str) -> None:
    state = reloaded(Run(spec).train(0, 1).handle.state_dict())
    run = Run(spec)
    run.handle.load_state_dict(state)
    del state
    run.train(2, 3)
    loaded(run)  # once more, in the middle of a run
    run.train(4, 5)


def scaler_overflow() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    run = Run(TOPK, scaler=scaler)
    run.train(0, 1, 2)
    run.step(3, factor=1e308)
    assert scaler.get_scale() < 2.0**11
    run.train(4, 5)


def unused_parameters() -> None:
    run = Run(TOPK, Branches().double(), find_unused_parameters=True)
    for step, used in enumerate([("left",), ("left", "right"), ("right",), ()]):
        run.step(step, used)


def accumulation() -> None:
    run = Run(TOPK)
    for step in range(3):
        run.optimizer.zero_grad()
        with run.model.no_sync():
            run.backward(2 * step)
        run.backward(2 * step + 1)
        run.optimizer.step()


def norms_in_another_thread(spec: str) -> None:
    """It reads them during a backward pass, and DDP has not waited for the side stream yet."""
    run, other = Run(spec, check="late"), torch.cuda.Stream()
    norms: list[dict[str, float]] = []

    def read(counts: bool) -> None:
        with torch.cuda.stream(other):
            norms.append(run.handle.residual_norms())

    run.handle.averager.on_finish(read)
    run.train(0, 1, 2)
    assert all(map(any, map(dict.values, norms)))


def averaged(local: dict[str, Any]) -> None:
    script = Script("every(2)", total_steps=8, local=local, bucket_cap_mb=0.0002)
    script.train(0, 8)
    script.sync.close()


def jointspar() -> None:
    """Norms are computed on the side stream, and read on the main stream."""
    model = wrap(mlp())
    sampled = torchcomp.JointSpar(model, budget=0.5)
    for step in range(6):
        model.zero_grad()
        loss_of(model(rows(step))).backward()
    sampled.close()


# The ranks are fake, and echo what this one sends. Here, it sends each owner another number.
ECHOED = [s for s in METHODS if not ('scope="tensor"' in s and '"exact"' in s)]


@pytest.mark.parametrize("spec", only(ECHOED, now=THROUGH_DDP))
def test_steps_of_every_method(spec: str) -> None:
    assert not faults_of(partial(trained, spec))


@pytest.mark.parametrize("spec", [TOPK, "powersgd(rank=1)", BIDIRECTIONAL])
def test_steps_that_are_checked_late(spec: str) -> None:
    """No wait of the host orders the streams at the end of a step."""

    def body() -> None:
        run = Run(spec, check="late").train(0, 1, 2)
        loaded(run)
        run.train(4, 5)
        run.handle.swap("mean")
        run.train(6, 7)

    assert not faults_of(body)


# With pieces, an echoed count of entries is not that of a shard.
IN_PIECES = [s for s in ECHOED if '"exact"' not in s]


@pytest.mark.parametrize("spec", only(IN_PIECES, now=("mean", TOPK, "powersgd(rank=1)")))
def test_two_levels(spec: str) -> None:
    def body() -> None:
        run = Run(spec, nodes=2, bucket_cap_mb=SMALL_BUCKETS).train(0, 1, 2)
        loaded(run)
        run.train(3)
        run.handle.swap(BIDIRECTIONAL)
        run.train(4, 5)
        run.handle.close()

    assert not faults_of(body, ranks=4)


TRAININGS: dict[str, Callable[[], Any]] = {
    **{
        f"{options}": partial(trained, TOPK, **options)
        for options in (
            {"gradient_as_bucket_view": True},
            {"static_graph": True},
            {"bucket_cap_mb": None},
        )
    },
    **{f"resume {spec}": partial(resumed, spec) for spec in RESUMED},
    **{f"norms {spec}": partial(norms_in_another_thread, spec) for spec in (TOPK, BIDIRECTIONAL)},
    **{f"local steps {local}": partial(averaged, local) for local in LOCAL},
    "scaler": scaler_overflow,
    "unused parameters": unused_parameters,
    "accumulation": accumulation,
    "jointspar": jointspar,
}


@pytest.mark.parametrize("case", TRAININGS)
def test_a_training(case: str) -> None:
    assert not faults_of(TRAININGS[case])


@pytest.mark.parametrize("options", [{"inside": "bf16"}, {"check": "late"}], ids=str)
def test_options_of_two_levels(options: dict[str, Any]) -> None:
    nodes = partial(trained, TOPK, nodes=2, bucket_cap_mb=SMALL_BUCKETS, **options)
    assert not faults_of(nodes, ranks=4)


# --- Negative controls: what the checker must find ------------------------------------------------


class WithoutWaiting(StreamExecutor):
    """Reads gradients that the main stream is still computing."""

    def submit(self, job: Job, *, always: bool = False) -> None:
        with torch.cuda.stream(self._stream):
            self._run(job, always)


class CompletesTooEarly(StreamExecutor):
    """Completes the futures on the main stream, which has not waited for the side stream."""

    def submit(self, job: Job, *, always: bool = False) -> None:
        main = torch.cuda.current_stream()
        set_result = torch.futures.Future.set_result

        def early(future: Any, result: Any) -> None:
            with torch.cuda.stream(main):
                set_result(future, result)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.futures.Future, "set_result", early)
            super().submit(job, always=always)


class FreesTooEarly(StreamExecutor):
    """Reads a tensor of the main stream on the side stream, and drops it at once."""

    def submit(self, job: Job, *, always: bool = False) -> None:
        super().submit(torch.ones(1000).sum)
        super().submit(job, always=always)


class ReadsTooEarly(StreamExecutor):
    """Shows the main stream what the side stream is writing."""

    def submit(self, job: Job, *, always: bool = False) -> None:
        shown: list[Tensor] = []
        super().submit(lambda: shown.append(torch.ones(3)))
        super().submit(job, always=always)
        shown[0].sum()


@pytest.mark.parametrize(
    ("executor", "kinds"),
    [
        (WithoutWaiting, {"race"}),
        # DDP then also frees what the side stream still reads.
        (CompletesTooEarly, {"race", "reuse"}),
        (FreesTooEarly, {"reuse"}),
        (ReadsTooEarly, {"race"}),
    ],
)
def test_the_checker_finds(executor: type[Executor], kinds: set[str]) -> None:
    # A method without a wait at the end of the step, which would order all streams.
    faults = faults_of(lambda: Run("mean").train(0, 1), executor)
    assert {fault.partition(":")[0] for fault in faults} == kinds
