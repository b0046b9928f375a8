"""Training: hours, bytes and price of a whole run, among ranks that one need not have."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from torchcomp.aggregators import Aggregator, planned_traffic, planned_two_levels
from torchcomp.bucket import DEFAULT_CAPS, BucketShape, merge, partition
from torchcomp.checks import check_at_least_0, check_count, check_positive
from torchcomp.component import Component
from torchcomp.errors import SpecError
from torchcomp.learning_rates import LRFunction
from torchcomp.local_sgd.schedules import Horizon, Schedule, synchronisations
from torchcomp.spec import parse, parse_aggregator
from torchcomp.step_model.activities import Recording
from torchcomp.step_model.compute import Compute
from torchcomp.step_model.links import Link
from torchcomp.step_model.recording import (
    MOST_RANKS,
    random_like,
    record,
    record_all_reduce,
    record_average,
)
from torchcomp.step_model.simulation import StepTime, simulate, simulate_alone
from torchcomp.step_model.units import duration, span, volume

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

MOST_ELEMENTS = 300_000_000
"""Largest model whose exchange is recorded: a recording takes 20 to 40 bytes per element."""

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

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of a table."""
        use = f"{self.step.utilisation:.0%} of it computes"
        sent = f"{volume(self.gigabytes)} sent by all nodes over their cards"
        return [
            ("predicted step", f"{duration(self.step.seconds)}, {use}"),
            ("whole run", f"{span(self.hours)}, {sent}"),
        ]

    def price(self, per_gigabyte: float) -> float:
        """Return the price of the traffic between nodes."""
        check_at_least_0("per_gigabyte", per_gigabyte)
        return self.gigabytes * per_gigabyte


def values_of(
    model: nn.Module | None = None,
    numel: int | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Return random parameters to record with, from a model (also on "meta") or a size.

    Args:
        model: the model.
        numel: number of elements, in place of a model.
        device: of the result.
        dtype: of the elements, with `numel`.

    Raises:
        SpecError: if the model is too large, or not exactly one of the two is passed.
    """
    if model is not None:
        if numel is not None:
            raise SpecError("a prediction needs either numel or model, not both")
        return random_values({n: p for n, p in model.named_parameters() if p.requires_grad}, device)
    check_count("numel", numel, least=0)
    count = int(numel or 0)
    # In pieces, as the parameters of a model are: DDP exchanges its buckets one by one.
    starts = range(0, count, _CHUNK)
    return random_values(
        {
            f"part {start}": torch.empty(min(_CHUNK, count - start), dtype=dtype, device="meta")
            for start in starts[: MOST_ELEMENTS // _CHUNK + 2]
        },
        device,
    )


def random_values(
    parameters: Mapping[str, Tensor], device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """Return random numbers with the shapes and dtypes of parameters (also on "meta"), by name.

    Raises:
        SpecError: if these are too many, or none.
    """
    total = sum(parameter.numel() for parameter in parameters.values())
    if not 0 < total <= MOST_ELEMENTS:
        raise SpecError(
            "the exchange of a model is recorded on this machine, which takes up to 40 bytes per "
            f"element: a model must have from 1 to {MOST_ELEMENTS:,} elements"
        )
    return random_like(parameters, device)


class Prediction:
    """Predicts a run with one method, on any link.

    Recording the method takes about four steps of it on this machine; a prediction takes
    milliseconds.

    Args:
        spec: "ddp", "bf16", a gradient method or a schedule.
        parameters: of the model, by name; see :func:`values_of`.
        run: the training run.
        nodes: number of ranks of a node, for a method that exchanges in two levels.
        compress: the method that averages, for a schedule.

    Raises:
        SpecError: if the spec cannot be built, or has one level only.
        ScheduleError: if the schedule cannot use the learning rate.
    """

    def __init__(
        self,
        spec: str | Component,
        parameters: Mapping[str, Tensor],
        run: Run,
        *,
        nodes: int = 1,
        compress: str | Component = "mean",
    ) -> None:
        self._average = parse_aggregator(compress)
        self._parameters, self._run, self._nodes = parameters, run, nodes
        self._built = spec if spec in (DDP, BF16) else parse(spec)
        self.method = str(self._built)
        if nodes > 1 and not isinstance(self._built, Aggregator):
            raise SpecError(f"{self.method} has one level only: leave nodes={nodes} out")
        self._groups = partition(parameters.items(), DEFAULT_CAPS)
        self._shapes = [BucketShape.of(group, parameters) for group in self._groups]
        self._compute = Compute.by_elements(self._shapes, run.step_seconds)

    @property
    def _exchanged(self) -> Aggregator:
        """The method that exchanges: of gradients, or that averages weights."""
        if isinstance(self._built, Schedule):
            return self._average
        if isinstance(self._built, Aggregator):
            return self._built
        return parse_aggregator("mean" if self._built == DDP else 'cast("bf16")')

    @cached_property
    def _spans(self) -> list[tuple[Aggregator, float]]:
        """The stages of the method, such as a warm-up, with the share of each in the exchanges."""
        spans = self._exchanged.spans(self._syncs)
        return [(method, steps / self._syncs) for method, steps in spans]

    @cached_property
    def _recordings(self) -> list[tuple[Recording, float]]:
        """The exchange of each stage, with its share."""
        made = ((self._recorded(method), share) for method, share in self._spans)
        return [(recording.scaled(self._run.speedup), share) for recording, share in made]

    def _recorded(self, method: Aggregator) -> Recording:
        ranks = self._run.world_size
        # One rank decodes the messages of all of them, which takes long for many.
        steps = 4 if ranks <= 16 else 2
        parameters, groups = self._parameters, self._groups
        if isinstance(self._built, Schedule):
            return record_average(parameters, ranks, spec=method, groups=groups, steps=steps)
        if isinstance(self._built, Aggregator):
            return record(
                method,
                parameters,
                ranks,
                buckets=groups,
                groups=groups,
                nodes=self._nodes,
                steps=steps,
            )
        dtype = torch.bfloat16 if self._built == BF16 else None
        return record_all_reduce(parameters, buckets=groups, dtype=dtype)

    @cached_property
    def _syncs(self) -> int:
        """The synchronisations of the run, for a schedule."""
        run = self._run
        if not isinstance(self._built, Schedule):
            return run.total_steps
        if self._built.reads_lr and run.lr is None:
            raise SpecError(
                f"'{self.method}' depends on the learning rate: pass lr, a function of the step"
            )
        horizon = Horizon(run.total_steps, run.warmup_steps)
        return len(synchronisations(self._built, run.lr, horizon))

    def on(self, link: Link) -> Training:
        """Predict the run on a link.

        Raises:
            SpecError: if the ranks do not fill the nodes of the link.
        """
        run = self._run
        share = self._syncs / run.total_steps
        return Training(
            self.method,
            self._step(link, share),
            run.total_steps,
            share * self._bytes(link),
            isinstance(self._built, Schedule),
        )

    def _step(self, link: Link, share: float) -> StepTime:
        """Return the mean step of the run, of which this share exchanges something."""
        if self._nodes > 1:
            self._require_nodes(link)
        alone = self._run.step_seconds
        seconds = sum(part * self._seconds(each, link, share) for each, part in self._recordings)
        return StepTime(seconds, alone)

    def _seconds(self, recording: Recording, link: Link, share: float) -> float:
        """Return the seconds of a step with one stage of the method."""
        run, ranks = self._run, self._run.world_size
        if isinstance(self._built, Schedule):
            return run.step_seconds + share * simulate_alone(recording, link.flat(ranks))
        if self._nodes == 1:
            return simulate(recording, self._compute, link.flat(ranks)).seconds
        return simulate(recording, self._compute, link.between(ranks), link.inside(ranks)).seconds

    def _require_nodes(self, link: Link) -> None:
        if self._nodes != link.ranks_per_node:
            raise SpecError(
                f"nodes={self._nodes} does not match the link, which has {link.ranks_per_node} "
                "ranks per node"
            )

    def _bytes(self, link: Link) -> float:
        """Return the bytes of an exchange over the cards of all nodes, on average over the run."""
        return sum(part * self._bytes_of(method, link) for method, part in self._spans)

    def _bytes_of(self, method: Aggregator, link: Link) -> float:
        ranks, nodes = self._run.world_size, link.nodes(self._run.world_size)
        node = ranks // nodes
        shapes = self._shapes
        if method.whole_model:
            merged = merge(self._groups, self._parameters)
            shapes = [BucketShape.of(group, self._parameters) for group in merged]
        if isinstance(self._built, Schedule):
            shapes = [shape.wide() for shape in shapes]
        if nodes == 1:
            return 0.0
        if self._nodes > 1:
            return ranks * planned_two_levels(method, shapes, ranks, node).sent
        return nodes * planned_traffic(method, shapes, ranks, node=node).sent
