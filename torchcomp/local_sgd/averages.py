"""Averages: how a synchronisation makes the parameters of all ranks equal, and further state."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number

import torch
from torch import Tensor

from torchcomp.aggregators import Mean
from torchcomp.engine.averager import Averager
from torchcomp.engine.bucket import Bucket, BucketShape, Group
from torchcomp.engine.keys import Key
from torchcomp.engine.means import average_in_place, exact_mean
from torchcomp.engine.nonfinite import FiniteWatch, all_finite
from torchcomp.engine.prepared import Prepared
from torchcomp.engine.state import Kind, Slot
from torchcomp.exchange import Exchange, ProcessGroupExchange
from torchcomp.local_sgd.method import LocalMethod, Optimizers, Parameters
from torchcomp.specs.errors import SpecError

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
    """Raise NonFiniteError on every rank unless `finite`, a bool on the device, holds on all.

    The error names `where`, and each rank's `tensors` that are not finite.
    """
    # conclude() skips its collective if no message was received in this step.
    exchange.must_conclude = True
    if not exchange.conclude(finite, where, UNCHANGED):
        raise FiniteWatch(exchange).error(where, UNCHANGED, sorted(tensors.items()))


class Averages:
    """The exact mean of the parameters over the ranks, in float32 or wider, by `averager`."""

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
        """Wait until the named parameters (by default all) have their averages."""

    def stop(self) -> None:
        """End after an error: wait for averages, but not for a rank that never joins them."""

    def _slots(self, shape: BucketShape) -> tuple[Slot, ...]:
        return ()

    def _read(self, group: Group) -> Bucket:
        # In float32 or wider: a sum in a narrower dtype would be rounded once for each rank.
        return Bucket.read(self.averager.shape_of(group).wide(), self.averager.parameters)

    def _average(self, group: Group, lr: float) -> Bucket:
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
    residual (plus the server residual) is the sum of all mean pseudo-gradients, up to rounding in
    float32 or wider. Only an all-reduce in a narrower dtype, as in ``ef(cast("bf16"))``, rounds
    away up to 1e-3 of them, which no residual keeps.
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
        first = lambda name, out: out.copy_(self._read((name,)).flat)  # noqa: E731
        reference = Slot("reference", *kept, equal=True, init=first)
        momentum = Slot("outer_momentum", *kept, equal=True)
        return (reference,) if self._outer is None else (reference, momentum)

    def _open(self, group: Group) -> list[tuple[Tensor, Tensor]]:
        device = self.averager.parameters[group[0]].device
        slots = self._slots(self.averager.shape_of(group))
        return [self.averager.state.open(slot, device) for slot in slots]


# --- Further state: the optimizers' and BatchNorm's -----------------------------------------------


def state_to_average(parameters: Mapping[str, Tensor], optimizers: Optimizers) -> dict[str, Tensor]:
    """The tensors of the optimizers' state for `parameters` that ``moments="average"`` averages.

    All floating-point tensors except step counts, by name and key. SpecError names what cannot be
    averaged.
    """
    found = {}
    for index, optimizer in enumerate(optimizers):
        # Two optimizers can train the same parameter.
        suffix = f" (optimizer {index})" if index else ""
        for name, parameter in parameters.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor | Number | str | None):
                    raise SpecError(
                        f"moments='average' cannot average the optimizer's state '{name} {key}': "
                        f"it is a {type(value).__name__}, not a tensor or number. Use "
                        "moments='local' or 'reset'",
                        "moments",
                    )
                # Adam's bias correction needs the rank's own count of steps.
                if isinstance(value, Tensor) and value.is_floating_point() and key != "step":
                    found[f"{name}{suffix} {key}"] = value
    return found


def mean_state(exchange: Exchange, mine: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    """The mean over the ranks, in float32 or wider, of every tensor that at least one rank has.

    A rank has no optimizer state for a parameter that it has not used, or while a GradScaler skips
    every step: it adds zeros, and continues without. Raises NonFiniteError on every rank.
    """
    tensors, device = dict(mine), exchange.device
    layout = {name: (tensor.shape, tensor.dtype) for name, tensor in mine.items()}
    # Compare a checksum first: usually all ranks have the same tensors, and gathering the names of
    # all of them costs more than one small collective.
    if not exchange.same(zlib.crc32(repr(sorted(layout.items())).encode())):
        for theirs in exchange.gather_objects(layout):
            for name, (shape, dtype) in theirs.items():
                tensors.setdefault(name, torch.zeros(shape, dtype=dtype, device=device))
    # Sorted, because the order in which an optimizer creates state can differ between ranks.
    means = exact_mean(exchange, dict(sorted(tensors.items())))
    where = f"the averages of optimizer state or BatchNorm statistics after step {step}"
    require_finite(exchange, all_finite(means.values(), device), where, tensors)
    return means
