"""Averages: how a synchronisation makes the parameters of all ranks equal."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcomp.aggregators import Mean
from torchcomp.engine.averager import Averager
from torchcomp.engine.bucket import Bucket, BucketShape, Group
from torchcomp.engine.keys import Key
from torchcomp.engine.means import average_in_place
from torchcomp.engine.nonfinite import FiniteWatch
from torchcomp.engine.prepared import Prepared
from torchcomp.engine.state import Kind, Slot
from torchcomp.exchange import Exchange, ProcessGroupExchange
from torchcomp.local_sgd.method import LocalMethod, Parameters

UNCHANGED = "No rank has averaged its parameters, and the residual is unchanged."

Due = Sequence[tuple[Group, float]]
"""Groups of parameters to average, each with the mean learning rate of its round."""


@dataclass(frozen=True)
class ExactMean(Mean):
    """The aggregator for ``compress="mean"``: the exact mean, which must be finite."""

    @property
    def transparent(self) -> bool:
        # Plain DDP passes a NaN gradient on, and the user can skip the step. A NaN in an averaged
        # parameter would stay for the rest of the run, so the averager has to check for it.
        return False

    def aggregate(self, g: Tensor, bucket: Prepared, key: Key) -> None:
        average_in_place(bucket.exchange, g)


def require_finite(
    exchange: Exchange, finite: Tensor, where: str, tensors: Mapping[str, Tensor]
) -> None:
    """Raise NonFiniteError on every rank, unless `finite`, a bool on the device, holds on all.

    Args:
        exchange: the ranks, which call this together.
        finite: whether this rank's values are finite.
        where: what was examined, for the error.
        tensors: by name; the error names those of each rank that are not finite.
    """
    # conclude() skips its collective if no message was received in this step.
    exchange.must_conclude = True
    if not exchange.conclude(finite, where, UNCHANGED):
        raise FiniteWatch(exchange).error(where, UNCHANGED, sorted(tensors.items()))


class Averages:
    """The exact mean of the parameters over the ranks, in float32 or wider.

    Attributes:
        averager: does the exchange, counts bytes and stores the parameters, including late ones.
    """

    def __init__(
        self,
        method: LocalMethod,
        exchange: ProcessGroupExchange,
        parameters: Parameters,
        groups: Sequence[Group],
    ) -> None:
        self._outer = method.outer
        self.averager = Averager(
            ExactMean() if method.aggregator.transparent else method.aggregator,
            exchange,
            parameters,
            groups,
            seed=method.seed,
            # fragments_of() merges within a fragment. A bucket must not span two fragments, which
            # synchronise at different steps.
            merged=False,
            what="a parameter" if method.plain else "a pseudo-gradient",
            unchanged=UNCHANGED,
            client_slots=self._slots,
        )

    def start(self, groups: Iterable[Group]) -> None:
        """Prepare for local steps on these parameters, right before the first one."""

    def synchronise(self, due: Due, step: int, dense_bytes: int) -> None:
        """Average the `due` groups over the ranks after `step` steps, and update the parameters.

        If this raises, it raises on every rank and no parameter has changed.
        """
        results = [self._average(group, lr) for group, lr in due]
        where = f"the synchronisation after step {step}"
        self.averager.finish(dense_bytes=dense_bytes, where=where)
        # Only now: finish() raises if any group failed on any rank, and then no rank may write.
        for bucket in results:
            bucket.write(self.averager.parameters)

    def wait(self, names: set[str] | None = None) -> None:
        """Wait until the named parameters (by default all) have their averages.

        Raises:
            RankFailureError: if another rank was lost, at this call and at each one after it.
        """

    def stop(self) -> None:
        """End after an error: wait for averages, but not for a rank that never joins them."""

    def _slots(self, shape: BucketShape) -> tuple[Slot, ...]:
        return ()

    def _read(self, group: Group) -> Bucket:
        """The parameters of a group, in float32 or wider."""
        # A sum of bfloat16 or float16 values would be rounded once for each rank.
        return Bucket.read(self.averager.shape_of(group).wide(), self.averager.parameters)

    def _average(self, group: Group, lr: float) -> Bucket:
        """The new values of a group's parameters."""
        bucket = self._read(group)
        self.averager.average(bucket)
        return bucket


class PseudoGradients(Averages):
    """The mean pseudo-gradient since the last synchronisation, by any aggregator.

    Let x be the parameters of the last synchronisation, which are the same on all ranks, and y this
    rank's parameters now. The pseudo-gradient is y - x.

    1. m <- the aggregator's estimate of the mean of y - x over the ranks
    2. x <- x + m, or the outer step from x along m, rounded to the dtype of the parameters
    3. y <- x

    m and x are the same on all ranks, bit for bit. Nothing is lost: the sum of all m plus the mean
    residual (plus the server residual) is the sum of all mean pseudo-gradients. This is exact up to
    rounding in float32 or wider. An all-reduce in a narrower dtype, as in ``ef(cast("bf16"))``, is
    the exception. It rounds away up to 1e-3 of the pseudo-gradients, which no residual keeps.
    """

    def start(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self._open(group)
        # Opening a slot stores its first value: x = the parameters before any local step. It also
        # begins a change, which no exchange will complete, so discard that.
        self.averager.state.rollback()

    def _average(self, group: Group, lr: float) -> Bucket:
        m, outer = self._read(group), self._outer
        (before, x), *momenta = self._open(group)
        # 1. m <- the estimated mean of y - x
        m.flat.sub_(before)
        self.averager.average(m)
        # 2. x <- x + m, or the outer step
        if outer is None:
            torch.add(before, m.flat, out=x)
        else:
            x.copy_(before)
            for momentum, u in momenta:
                outer.apply(x, m.flat, u.copy_(momentum), lr)
        # Round x to what the parameters can store. Otherwise the next y - x would contain this
        # rounding error as if local steps had made it. synchronise() then does 3., y <- x.
        x.copy_(x.to(self.averager.shape_of(group).dtype))
        return Bucket(m.shape, x)

    def _slots(self, shape: BucketShape) -> tuple[Slot, ...]:
        # ESTIMATE: neither is an unsent gradient.
        kept = (Kind.ESTIMATE, shape.names, shape.sizes, shape.wide().dtype)
        reference = Slot("reference", *kept, equal=True, init=self._first_reference)
        momentum = Slot("outer_momentum", *kept, equal=True)
        return (reference,) if self._outer is None else (reference, momentum)

    def _open(self, group: Group) -> list[tuple[Tensor, Tensor]]:
        device = self.averager.parameters[group[0]].device
        slots = self._slots(self.averager.shape_of(group))
        return [self.averager.state.open(slot, device) for slot in slots]

    def _first_reference(self, name: str, out: Tensor) -> None:
        out.copy_(self._read((name,)).flat)
