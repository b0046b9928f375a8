"""Aggregator: replace a bucket with an estimate of its mean over the ranks, in place."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from torchcomp.checkpoints.pieces import pieces_of
from torchcomp.compressors import Compressor
from torchcomp.engine.bucket import BucketShape
from torchcomp.engine.keys import Key
from torchcomp.engine.prepared import Prepared
from torchcomp.engine.state import Kind, Slot, State
from torchcomp.exchange import Exchange
from torchcomp.exchange.traffic import Load, Traffic, sum_bytes
from torchcomp.specs.component import Choices, Component
from torchcomp.specs.errors import SpecError


@dataclass(frozen=True)
class Cost:
    """The communication of one bucket, per rank and step."""

    collective: str  # route of the messages: "allreduce", "allgather" or "sharded"
    message_bytes: int  # size of one rank's message for its bucket, without frame headers
    load: Load = field(default_factory=Load)  # bytes of its collectives, per step


@dataclass(frozen=True)
class Law:
    """What holds in every step of a method, for the mean over the ranks.

    The mean that the method applies, minus `gradient` times the gradient, plus all slots times
    their coefficients, is zero up to rounding. A sharded slot counts as a part of the mean.

    Attributes:
        gradient: coefficient of the gradient.
        before: coefficients of the slots' values before the step, by slot.
        after: coefficients of the slots' values after the step, by slot.
        error: what the law leaves at most besides rounding, relative to the gradients' norm (root
            mean square over the ranks).
        per_parameter: whether it holds for each parameter, and not only for a whole bucket.
        smallest: an all-reduce rounds elements to multiples of this.
    """

    gradient: float = 1.0
    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    error: float = 0.0
    per_parameter: bool = True
    smallest: float = 0.0

    def terms(self) -> Iterator[tuple[str, int, float]]:
        """Iterate over the slots: name, 0 before or 1 after the step, coefficient."""
        for when, terms in enumerate((self.before, self.after)):
            for name, factor in terms.items():
                yield name, when, factor


@dataclass(frozen=True)
class Aggregator(Component):
    """Turn every rank's bucket into an estimate of the mean bucket. All ranks get the same one.

    Aggregators are configuration. Tensors that must survive a step are in the slots that
    :meth:`slots` declares.
    """

    kind: ClassVar[str] = "aggregator"

    @property
    def stages(self) -> tuple[int, ...]:
        """The steps from which on :meth:`at` returns another method, ascending from 0."""
        return tuple(sorted({0}.union(*(part.stages for part in self._parts().values()))))

    def at(self, step: int) -> "Aggregator":
        """Return the method of exchange `step`, from 0: itself, unless a compressor changes."""
        parts = self._parts()
        now = {name: part.at(step) for name, part in parts.items()}
        return self if now == parts else replace(self, **now)

    def spans(self, exchanges: int) -> "list[tuple[Aggregator, int]]":
        """Return the methods of a run's exchanges, with the number of each."""
        starts = [start for start in self.stages if start < exchanges]
        return [(self.at(start), stop - start) for start, stop in pairwise([*starts, exchanges])]

    @property
    def settled(self) -> "Aggregator":
        """The method of the last stage, which most of a run uses."""
        return self.at(self.stages[-1])

    @property
    def rehearsed(self) -> "Aggregator":
        """The method to try on a few numbers before training."""
        return self.settled

    def _parts(self) -> "dict[str, Compressor | Aggregator]":
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        return {n: v for n, v in values.items() if isinstance(v, Compressor | Aggregator)}

    @property
    def depends_on_grouping(self) -> bool:
        """Whether the result depends on the division into buckets. True is always safe."""
        return True

    def kept(self, numel: int) -> int:
        """Return how many of `numel` elements a message has at least; all without a selection."""
        return min((part.kept(numel) for part in self._parts().values()), default=numel)

    @property
    def per_tensor(self) -> bool:
        """Whether what is sent of a parameter does not depend on the other parameters' values."""
        if not self.depends_on_grouping:
            return True
        parts = self._parts().values()
        alone = (
            p.elementwise or p.scope == "tensor" if isinstance(p, Compressor) else p.per_tensor
            for p in parts
        )
        return len(parts) > 0 and all(alone)

    @property
    def whole_model(self) -> bool:
        """Whether the method works on all gradients of the model as one bucket."""
        parts = self._parts().values()
        return any(
            p.scope == "model" if isinstance(p, Compressor) else p.whole_model for p in parts
        )

    @property
    def transparent(self) -> bool:
        """Whether the method does exactly what plain DDP does, also for NaN and infinities."""
        return False

    def residual_shows_nonfinite(self, dtype: torch.dtype) -> bool:
        """Whether the slot "error" is non-finite where this rank's gradient was, and only there."""
        return False

    def slots(self, shape: BucketShape, world_size: int, rank: int) -> tuple[Slot, ...]:
        """Declare the state of one bucket on one rank. The slot "error" is the residual."""
        return ()

    def law(self, shape: BucketShape) -> Law | None:
        """Return what holds in every step for a bucket of this shape; None if nothing does."""
        return None

    @abstractmethod
    def cost(self, shape: BucketShape, world_size: int, rank: int = 0, node: int = 1) -> Cost:
        """Return the communication of one bucket, per rank and step.

        Entries of a sharded selection from a whole bucket are taken as evenly spread. If `node`
        ranks share a network card, the load is that of the card of `rank`.
        """

    def prepared(
        self, shape: BucketShape, exchange: Exchange, state: State, device: torch.device
    ) -> Prepared:
        """Return a bucket, prepared for this method; the caller commits or rolls back `state`."""
        slots = {s.name: s for s in self.slots(shape, exchange.world_size, exchange.rank)}
        shows = self.residual_shows_nonfinite(shape.dtype)
        bucket = Prepared(shape, exchange, state, device, slots, shows)
        self.prepare(bucket)
        return bucket

    def prepare(self, bucket: Prepared) -> None:
        """Store what every step of a bucket needs, such as its route, in the bucket."""

    @abstractmethod
    def aggregate(self, g: Tensor, bucket: Prepared, key: Key) -> None:
        """Replace `g`, this rank's gradients, 1-D, with the estimate of their mean.

        `bucket` is as :meth:`prepared` returns it; `key` has seed, step and rank of the exchange.
        """


# --- Methods with a residual: the part of the gradient that was not sent --------------------------

_DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
ResidualDtype = Annotated[str | None, Choices(_DTYPES)]


class Residual(Aggregator):
    """An aggregator with a residual, and an option for its dtype.

    Attributes:
        memory_dtype: dtype of the residual. The default is fp32, or the gradient's dtype if that is
            wider. A 16-bit residual loses only its own rounding error.
    """

    # Not a dataclass field here: subclasses declare it after their own options, so it comes last.
    memory_dtype: ResidualDtype

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, part in self._parts().items():
            if isinstance(part, Compressor):
                check_contractive(self, option)

    def sum_dtype(self, gradient: torch.dtype) -> torch.dtype:
        """The dtype of the residual, and of sums over the ranks, for gradients of a dtype."""
        if self.memory_dtype is None:
            return torch.promote_types(gradient, torch.float32)
        return _DTYPES[self.memory_dtype]

    def error_slot(self, shape: BucketShape) -> Slot:
        """The slot of this rank's residual, its unsent gradient."""
        return Slot("error", Kind.DEBT, shape.names, shape.sizes, self.sum_dtype(shape.dtype))

    def slots(self, shape: BucketShape, world_size: int, rank: int) -> tuple[Slot, ...]:
        return (self.error_slot(shape),)

    def law(self, shape: BucketShape) -> Law:
        # Nothing is lost: what is not applied is in the residual.
        return Law(before={"error": -1.0}, after={"error": 1.0})

    def residual_shows_nonfinite(self, dtype: torch.dtype) -> bool:
        # A selecting compressor leaves NaN and infinities in place when it subtracts its message.
        # A wider residual gets those of other ranks too, when the mean is rounded to the gradients.
        if torch.promote_types(dtype, self.sum_dtype(dtype)) != dtype:
            return False
        first = next(iter(self._parts().values()), None)  # what a rank sends, or None
        return isinstance(first, Compressor) and first.selects


def check_contractive(owner: Component, field: str) -> None:
    """Raise SpecError unless the option `field` of `owner` is a contractive compressor."""
    compressor = getattr(owner, field)
    # Whether a compressor has an alpha does not depend on the length, so test length 1.
    if compressor.alpha(1) is None:
        advice = f"leave out its scaling, or use mean({compressor})"
        problem = f"needs a contractive compressor, and {compressor} is not: its error can grow"
        raise SpecError(f"{owner.name} {problem}. Therefore {advice}", field)


# --- The bytes of a step --------------------------------------------------------------------------


def planned_traffic(
    method: Aggregator, shapes: Sequence[BucketShape], world_size: int, rank: int = 0, node: int = 1
) -> Traffic:
    """Return the bytes of a step in the last stage, through the network card of a node."""
    if node == world_size:
        return Traffic()  # nothing passes the card of the only node
    settled, load = method.settled, Load()
    for shape in shapes:
        load.add(settled.cost(shape, world_size, rank, node).load)
    return load.traffic(world_size, _dense(shapes, world_size, node))


def planned_two_levels(
    method: Aggregator, shapes: Sequence[BucketShape], world_size: int, node: int, rank: int = 0
) -> Traffic:
    """As :func:`planned_traffic` of one rank, of whole buckets, with ``nodes=node``."""
    pieces = pieces_of(shapes, node)
    between = planned_traffic(method, pieces, world_size // node, rank // node)
    # A reduce-scatter and an all-gather move a piece to each other rank of the node.
    inside = 2 * (node - 1) * sum(piece.nbytes for piece in pieces)
    return replace(between, dense=_dense(shapes, world_size, node) // node, inside=inside)


def _dense(shapes: Sequence[BucketShape], world_size: int, node: int) -> int:
    # A ring of all ranks leaves each node once: the card carries what one rank sends.
    nbytes = sum(shape.nbytes for shape in shapes)
    return sum_bytes(nbytes, world_size) if node < world_size else 0
