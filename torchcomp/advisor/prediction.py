"""Plan: hours, bytes and price of a whole run, among ranks that one need not have."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchcomp.advisor.collectives import Times
from torchcomp.advisor.links import Link
from torchcomp.advisor.recording import (
    MOST_ELEMENTS,
    MOST_RANKS,
    Parameters,
    random_values,
    record,
    record_all_reduce,
    record_average,
)
from torchcomp.advisor.simulation import Compute, Recording, StepTime, simulate, simulate_alone
from torchcomp.advisor.units import duration, size, wrapped
from torchcomp.aggregators import Aggregator, planned_traffic
from torchcomp.engine.bucket import DEFAULT_CAPS, BucketShape, merge, partition
from torchcomp.exchange.traffic import three_digits
from torchcomp.local_sgd.schedules import Horizon, Schedule, synchronisations
from torchcomp.specs.checks import check_at_least_0, check_count, check_positive
from torchcomp.specs.component import Component
from torchcomp.specs.errors import SpecError
from torchcomp.specs.learning_rates import LRFunction
from torchcomp.specs.spec import parse, parse_aggregator

DDP, BF16 = "ddp", "bf16"
"""Plain DDP, and DDP with PyTorch's ``bf16_compress_hook``."""

USUAL = (
    DDP,
    BF16,
    'ef(quantize("int8"))',
    "powersgd(rank=2)",
    "ef(topk(0.01))",
    "dgc(topk(0.001))",
    'bidirectional(quantize("int4"), quantize("int4"))',
    'bidirectional(topk(0.01, values="int8"), topk(0.01, values="int8"))',
    "every(8)",
)
"""The methods that are compared if none is named: one of each kind."""

_CHUNK = 2**18


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        world_size: number of ranks.
        total_steps: optimizer steps.
        step_seconds: seconds of a step of one rank without any exchange.
        warmup_steps: steps of warm-up, for a schedule.
        lr: for a schedule that reads it, learning rate as a function of the steps before.
        speedup: how many times as fast the ranks encode and decode as this machine.
    """

    world_size: int
    total_steps: int
    step_seconds: float
    warmup_steps: int = 0
    lr: LRFunction | None = None
    speedup: float = 1.0

    def __post_init__(self) -> None:
        check_count("world_size", self.world_size, most=MOST_RANKS)
        check_count("total_steps", self.total_steps)
        check_positive("step_seconds", self.step_seconds)
        check_count("warmup_steps", self.warmup_steps, 0, self.total_steps - 1)
        check_positive("speedup", self.speedup)


@dataclass(frozen=True)
class Training:
    """What a run takes with one method.

    Attributes:
        method: "ddp", "bf16", or the spec.
        step: predicted time of a step; with a schedule, the mean over the run.
        total_steps: optimizer steps.
        bytes_per_step: bytes that all nodes together send over their cards, on average.
        local: whether the ranks train alone between two averages.
    """

    method: str
    step: StepTime
    total_steps: int
    bytes_per_step: float
    local: bool = False

    @property
    def hours(self) -> float:
        """Hours of the whole run."""
        return self.step.seconds * self.total_steps / 3600

    @property
    def gigabytes(self) -> float:
        """Gigabytes (10^9 bytes) that all nodes send over their cards in the whole run."""
        return self.bytes_per_step * self.total_steps / 1e9

    def price(self, per_gigabyte: float) -> float:
        """Return the price of the traffic between nodes."""
        check_at_least_0("per_gigabyte", per_gigabyte)
        return self.gigabytes * per_gigabyte


def plan(
    spec: str | Component,
    run: Run,
    link: Link,
    *,
    numel: int | None = None,
    model: nn.Module | None = None,
    dtype: torch.dtype = torch.float32,
    compress: str | Component = "mean",
) -> Training:
    """Predict the hours and the bytes of a run with one method on a network.

    The work of the method is measured here, on random gradients, which takes seconds. The network
    is computed from its numbers.

    Args:
        spec: "ddp", "bf16" (DDP with PyTorch's ``bf16_compress_hook``), a gradient method or a
            schedule.
        run: the training run.
        link: the network.
        numel: number of parameters; pass either `numel` or `model`.
        model: a module or a DDP model.
        dtype: of the gradients, with `numel`.
        compress: for a schedule, the method that averages, as in :class:`torchcomp.LocalSGD`.

    Raises:
        SpecError: if the spec cannot be built, or if an argument is invalid.
        ScheduleError: if the schedule cannot use the learning rate.
    """
    return Prediction(spec, values_of(model, numel, dtype), run, compress=compress).on(link)


def values_of(
    model: nn.Module | None = None, numel: int | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return random parameters to record with, from a model (also on "meta") or a size."""
    if (model is None) == (numel is None):
        raise SpecError("a prediction needs either numel or model: pass one of them")
    if model is not None:
        module = model.module if isinstance(model, DistributedDataParallel) else model
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        return random_values(trained, "cpu")
    check_count("numel", numel, least=0)
    count = int(numel or 0)
    # In pieces, as the parameters of a model are: DDP exchanges its buckets one by one.
    starts = range(0, count, _CHUNK)[: MOST_ELEMENTS // _CHUNK + 2]
    sizes = {f"part {start}": min(_CHUNK, count - start) for start in starts}
    pieces = {name: torch.empty(n, dtype=dtype, device="meta") for name, n in sizes.items()}
    return random_values(pieces, "cpu")


class Prediction:
    """Predicts a run with one method, on any network.

    Recording the method takes about four steps of it on this machine; a prediction takes
    milliseconds. The arguments are those of :func:`plan`, with parameters of :func:`values_of`.
    """

    def __init__(
        self,
        spec: str | Component,
        parameters: Parameters,
        run: Run,
        *,
        compress: str | Component = "mean",
    ) -> None:
        average = parse_aggregator(compress)
        self._parameters, self._run = parameters, run
        self._built = built = spec if spec in (DDP, BF16) else parse(spec)
        self.method = str(built)
        self.local = isinstance(built, Schedule)
        if isinstance(built, Schedule):
            horizon = Horizon(run.total_steps, run.warmup_steps)
            exchanged, exchanges = average, len(synchronisations(built, run.lr, horizon))
        else:
            dense = {DDP: "mean", BF16: 'cast("bf16")'}
            exchanged = parse_aggregator(dense.get(self.method, built))
            exchanges = run.total_steps
        # Share of the steps that exchange, and the stages of the method (such as a warm-up), each
        # with its share of the exchanges.
        self._share = exchanges / run.total_steps
        self._stages = [(each, n / exchanges) for each, n in exchanged.spans(exchanges)]
        self._groups = partition(parameters.items(), DEFAULT_CAPS)
        self._shapes = [BucketShape.of(group, parameters) for group in self._groups]
        self._compute = Compute.by_elements(self._shapes, run.step_seconds)

    def on(self, link: Link) -> Training:
        """Predict the run on a link, whose nodes the ranks must fill."""
        step = self.step(link.among(self._run.world_size))
        sent = sum(part * self._bytes(stage, link) for stage, part in self._stages)
        return Training(self.method, step, self._run.total_steps, self._share * sent, self.local)

    def step(self, times: Times, *, cores: float = 1.0) -> StepTime:
        """Predict the mean step of the run; see :func:`.simulate` for the arguments."""
        alone, seconds = self._run.step_seconds / min(1.0, cores), 0.0
        machine = {"cores": cores, "speedup": self._run.speedup}
        for recording, part in self._recordings:
            if self.local:
                exchange = simulate_alone(recording, times, **machine)
                seconds += part * (alone + self._share * exchange)
            else:
                simulated = simulate(recording, self._compute, times, **machine)
                seconds += part * simulated.seconds
        return StepTime(seconds, alone)

    @cached_property
    def _recordings(self) -> list[tuple[Recording, float]]:
        return [(self._recorded(stage), part) for stage, part in self._stages]

    def _recorded(self, method: Aggregator) -> Recording:
        ranks, parameters, groups = self._run.world_size, self._parameters, self._groups
        # One rank decodes the messages of all of them, which takes long for many.
        steps = 4 if ranks <= 16 else 2
        if self.local:
            return record_average(parameters, ranks, spec=method, groups=groups, steps=steps)
        if self._built in (DDP, BF16):
            dtype = torch.bfloat16 if self._built == BF16 else None
            return record_all_reduce(parameters, buckets=groups, dtype=dtype)
        return record(method, parameters, ranks, buckets=groups, groups=groups, steps=steps)

    def _bytes(self, method: Aggregator, link: Link) -> float:
        ranks, nodes = self._run.world_size, link.nodes(self._run.world_size)
        shapes = self._shapes
        if method.whole_model:
            merged = merge(self._groups, self._parameters)
            shapes = [BucketShape.of(group, self._parameters) for group in merged]
        if self.local:
            shapes = [shape.wide() for shape in shapes]
        return nodes * planned_traffic(method, shapes, ranks, node=ranks // nodes).sent


# --- The table of `torchcomp plan` ----------------------------------------------------------------

_WORTH = 1.02  # a method is worth its change if it is this many times as fast as the bf16 hook
_BASELINES = {DDP: "plain DDP", BF16: "DDP with the bf16 hook"}


def table(
    trainings: Sequence[Training],
    run: Run,
    link: Link,
    *,
    price_per_gb: float | None = None,
    currency: str = "USD",
) -> str:
    """Return a table of at most 80 columns, the fastest method first."""
    alone = duration(run.step_seconds * run.total_steps, three_digits)
    step = duration(run.step_seconds, three_digits)
    heads = [
        f"{run.world_size:,} ranks, {link}",
        f"{run.total_steps:,} steps of {step} without any exchange: {alone}",
    ]
    columns = ["step", "use", "time", "sent"] + ["price"] * (price_per_gb is not None)
    lines = [_line(columns, "method")]
    for training in sorted(trainings, key=lambda each: each.step.seconds):
        times = [training.step.seconds, 3600 * training.hours]
        step, whole = (duration(each, three_digits) for each in times)
        sent = size(1e9 * training.gigabytes, three_digits)
        cells = [step, f"{training.step.utilisation:.0%}", whole, sent]
        if price_per_gb is not None:
            cells.append(f"{training.price(price_per_gb):,.0f} {currency}")
        lines.append(_line(cells, training.method))
    faster = "" if run.speedup == 1 else f" and divided by {run.speedup:g}"
    notes = [
        *verdict(trainings),
        "use: share of a step in which the ranks compute. sent: by all nodes, over their cards.",
        f"Encoding was measured on this machine{faster}. The network is computed from its "
        "numbers, and docs/prediction.md compares such predictions with measured times.",
    ]
    heads, notes = ([textwrap.fill(each, 80) for each in texts] for texts in (heads, notes))
    return "\n".join([*heads, "", *lines, "", *notes])


def verdict(trainings: Sequence[Training]) -> list[str]:
    """Return sentences about the fastest method and schedule, compared with the bf16 hook."""
    seconds = {each.method: each.step.seconds for each in trainings}
    others = [each for each in trainings if each.method not in _BASELINES]
    if BF16 not in seconds or not others:
        return []
    known = min(_BASELINES.keys() & seconds.keys(), key=seconds.__getitem__)
    sentences = []
    for local, caveat in ((False, ""), (True, ", but trains in another way")):
        some = [each.method for each in others if each.local == local]
        best = min(some, key=seconds.__getitem__, default=known)
        factor = seconds[known] / seconds[best]
        if factor >= _WORTH:
            faster = f"{three_digits(factor)}x as fast as {_BASELINES[known]}"
            sentences.append(f"{best} is {faster}{caveat}.")
        elif not local:
            sentences.append(f"No method is faster than {_BASELINES[known]}: keep it.")
    return sentences


def _line(cells: Sequence[str], method: str) -> str:
    widths = (9, 6, 9, 9, 14)
    head = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False)) + "  "
    return wrapped(head, method)
