"""Watch: measures in the steps of an averager what the guard compares."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from torchcomp import host
from torchcomp.aggregators import Aggregator, Law, planned_traffic
from torchcomp.bucket import Bucket, BucketShape
from torchcomp.exchange import Exchange
from torchcomp.guard.report import Compared, Report, Sums
from torchcomp.guard.samples import Samples, filled, sample
from torchcomp.guard.sketch import Sketch
from torchcomp.guard.windows import Windows, windows
from torchcomp.profiling import label
from torchcomp.state import Kind, Slot, State

_WIDTHS = (251, 127, 61, 31, 17, 11)
_SHARE = 0.008  # of the method's bytes, for a comparison
_SCALARS = 10  # of `Sums`, all but those from sketches
_OLD = 0.98  # share of the sampled elements of a parameter
_LARGER = 1.5  # times the largest residual of the other parameters


@dataclass(frozen=True)
class Found:
    """What a comparison has added up over the ranks.

    Attributes:
        sums: by parameter name, of those with any elements.
        laws: the law of each parameter's method, by parameter name.
        gradients: squared norm of each rank's gradient, in rank order.
        messages: squared norm of what each rank has sent, decoded, in rank order.
        changed: number of sampled elements whose residual has changed between steps, by rank.
        starved: number of parameters that each rank hardly sends, although it should.
        width: number of columns of the sketches.
        age: number of steps after which a value that waits in the residual is old.
        residual_eps: relative rounding error of the dtype of the residual.
        mean_eps: that of the mean.
    """

    sums: dict[str, Sums]
    laws: dict[str, Law | None]
    gradients: tuple[float, ...]
    messages: tuple[float, ...]
    changed: tuple[float, ...]
    starved: tuple[float, ...]
    width: int
    age: int
    residual_eps: float
    mean_eps: float

    def report(self, step: int) -> Report:
        """Return the comparison in ratios, after `step` steps."""
        return Report(
            step,
            Compared.of(Sums.total(self.sums.values())),
            {name: Compared.of(sums) for name, sums in self.sums.items()},
            tuple(map(math.sqrt, self.gradients)),
            1 / math.sqrt(2 * self.width),
        )


class Watch:
    """Measures the steps of one averager.

    Args:
        every: number of steps from one comparison to the next.
        age: number of steps after which a value that waits in the residual is old.
        exchange: the ranks that average.
    """

    def __init__(self, every: int, age: int, exchange: Exchange) -> None:
        self.every, self._age, self.exchange = every, age, exchange
        self.samples = Samples()
        # Number of the comparison that this step makes, or None.
        self._comparing: int | None = None
        self._width = _WIDTHS[-1]
        self._eps = 0.0, 0.0  # of the residual's dtype and of the mean's
        self._gradient: Tensor | None = None  # this rank's values of the bucket in flight
        # The law and the slots of the bucket in flight.
        self._law: Law | None = None
        self._slots: Mapping[str, Slot] = {}
        # A row for each parameter of a bucket: two sketches, and the scalars of `Sums`.
        self._rows: list[tuple[BucketShape, Law | None, Tensor]] = []
        self._messages: list[Tensor] = []  # squared norms of this rank's messages

    def begin(
        self,
        step: int,
        method: Aggregator,
        shapes: Sequence[BucketShape],
        ratios: Mapping[str, float],
    ) -> None:
        """Begin a step.

        Args:
            step: number of steps before it.
            method: the method of this step.
            shapes: shapes of all its buckets.
            ratios: by parameter name, what the residual was multiplied by since the last step.
        """
        self._rows.clear()
        self._messages.clear()
        self._gradient, self._eps = None, (0.0, 0.0)
        self.samples.begin(ratios)
        number, left = divmod(step + 1, self.every)
        self._comparing = None if left else number
        if self._comparing is not None:
            self._width = _width(method, tuple(shapes), self.exchange.world_size, self.every)

    def before(self, bucket: Bucket, method: Aggregator) -> None:
        """Keep what the method is about to overwrite."""
        exchange = self.exchange
        self._law, self._slots = _parts(method, bucket.shape, exchange.world_size, exchange.rank)
        if _has_residual(self._law):
            self.samples.before(bucket)
        if self._comparing is not None and filled(bucket.shape)[0]:
            cut = windows(bucket.shape, self._comparing).cut(bucket.flat)
            self._gradient = cut.to(bucket.shape.wide().dtype)

    @label("guard")
    def after(self, bucket: Bucket, method: Aggregator, state: State) -> None:
        """Measure what the method has done with a bucket."""
        if not filled(bucket.shape)[0]:
            return
        law, slots = self._law, self._slots
        opened = {n: both for n, slot in slots.items() if (both := state.in_flight(slot))}
        if law is not None and _has_residual(law):
            before = {name: opened[name][0] for name in law.before if not slots[name].sharded}
            self.samples.follow(bucket, law, before, opened["error"][1])
        if self._gradient is not None and self._comparing is not None:
            gradient, self._gradient = self._gradient, None
            part = windows(bucket.shape, self._comparing)
            terms = set() if law is None else {name for name, _, _ in law.terms()}
            cut = {
                name: self._cut(part, bucket.shape, slots[name], both)
                for name, both in opened.items()
                if name in terms
            }
            rows = self._compare(bucket, part, gradient, law, slots, cut, method.per_tensor)
            self._rows.append((bucket.shape, law, rows))

    def _cut(
        self, part: Windows, shape: BucketShape, slot: Slot, both: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the windows of a slot before and after the step. A shard is a part of the mean."""
        ranks, rank = self.exchange.world_size, self.exchange.rank
        if not slot.sharded:
            before, after = (part.cut(values) for values in both)
        else:
            start = shape.shard(ranks, rank).start
            # On its owner alone.
            before, after = (part.place(values, start).mul_(ranks) for values in both)
        return before, after

    def _compare(
        self,
        bucket: Bucket,
        part: Windows,
        gradient: Tensor,
        law: Law | None,
        slots: Mapping[str, Slot],
        cut: Mapping[str, tuple[Tensor, Tensor]],
        per_tensor: bool,
    ) -> Tensor:
        """Return what is to be added up over the ranks. Overwrites `gradient`.

        Args:
            bucket: the mean that the step applies.
            part: the windows that are compared.
            gradient: those of this rank's gradient.
            law: of the method.
            slots: of the method, by name.
            cut: the windows of the slots' values before and after the step.
            per_tensor: whether the method compresses each parameter apart from the others.
        """
        shape, ranks, device = bucket.shape, self.exchange.world_size, bucket.flat.device
        means = part.cut(bucket.flat).to(gradient.dtype)
        factors = part.factors(device)
        names, _ = filled(shape)
        sketch = _sketch(names, part.sizes, self._width, self.exchange.shard, means.dtype, device)
        columns = self._columns(bucket, part, gradient, means, slots, cut, per_tensor)
        dense, left = sketch(gradient), sketch.zeros()
        kept = slots["error"].dtype if "error" in slots else shape.dtype
        both = (torch.finfo(kept).eps, torch.finfo(shape.dtype).eps)
        self._eps = max(self._eps[0], both[0]), max(self._eps[1], both[1])
        if law is not None:
            message = gradient.mul_(law.gradient)
            for name, when, factor in law.terms():
                if not slots[name].sharded:
                    message.sub_(cut[name][when], alpha=factor)
            self._messages.append((_norms(message, part.sizes).square() * factors).sum())
            rest = message.neg_().add_(means)
            for name, when, factor in law.terms():
                if slots[name].sharded:
                    rest.add_(cut[name][when], alpha=factor)
            left = sketch(rest)
        # Estimates of whole parameters.
        sketches = torch.cat([dense, left], 1).float() * factors.sqrt()[:, None]
        return torch.cat([sketches, columns], 1).div_(ranks)

    def _columns(
        self,
        bucket: Bucket,
        part: Windows,
        gradient: Tensor,
        means: Tensor,
        slots: Mapping[str, Slot],
        cut: Mapping[str, tuple[Tensor, Tensor]],
        per_tensor: bool,
    ) -> Tensor:
        """Return the scalars of `Sums` for each parameter."""
        ranks, device, sizes = self.exchange.world_size, means.device, list(part.sizes)
        at, owner = sample(bucket.shape, device)
        factors, nothing = part.factors(device), torch.zeros(len(sizes), device=device)
        residuals, old, samples, starved = nothing, nothing, nothing, nothing
        age, changed = self.samples.take(bucket.shape)
        for name, (_, after) in cut.items():
            if slots[name].kind is Kind.DEBT:
                # The square of a shard is averaged over the ranks, of which the others have none.
                share = ranks if slots[name].sharded else 1
                residuals = residuals + _norms(after, sizes).square() / share
        if age is not None:
            old = nothing.index_add(0, owner, (age >= self._age).float())
            # An element whose gradient is always zero has nothing to send.
            active = (bucket.flat.index_select(0, at) != 0).logical_or_(age > 0)
            samples = nothing.index_add(0, owner, active.float())
            largest = _norms(cut["error"][1], sizes, math.inf)
            starved = _starved(old, samples, largest, per_tensor).float()
        moved = nothing if changed is None else nothing.index_add(0, owner, changed.float())
        parts = [torch.split(values, sizes) for values in (gradient, means)]
        columns = [
            factors * torch.stack([torch.dot(*both) for both in zip(*parts, strict=True)]),
            factors * _norms(means, sizes).square(),
            factors * _norms(gradient, sizes).square(),
            factors * residuals,
            # Counted on each rank, and not averaged like the others.
            starved * ranks,
            moved * ranks,
            factors * torch.stack([each.count_nonzero() for each in parts[1]]),
            _numbers(part.whole, device),
            old,
            samples,
        ]
        return torch.stack([column.float() for column in columns], 1)

    def finish(self) -> Callable[[], Found] | None:
        """Add up over the ranks. All ranks call this at the end of a step.

        Returns:
            A function that waits for the sums, which are the same on all ranks. None if this step
            is not compared.
        """
        if not self._rows:
            return None
        rows, self._rows = self._rows, []
        width, ranks, device = self._width, self.exchange.world_size, self.exchange.device
        values = [each.to(device) for _, _, each in rows]
        own = torch.zeros(4, ranks, device=device)
        gradients, messages, changed, starved = own[:, self.exchange.rank].unbind()
        for each in values:
            gradients.add_(each[:, 2 * width + 2].sum(), alpha=ranks)
            starved.add_(each[:, 2 * width + 4].sum())
            changed.add_(each[:, 2 * width + 5].sum())
        for message in self._messages:
            messages.add_(message.to(device))
        numbers = torch.cat([*(each.flatten() for each in values), own.flatten()])
        self.exchange.sum_control(numbers)
        received = host.copy_from(numbers)
        counts, eps = [*(value.numel() for value in values), own.numel()], self._eps

        def read() -> Found:
            *parts, last = torch.split(received(), counts)
            sums: dict[str, Sums] = {}
            laws: dict[str, Law | None] = {}
            for (shape, law, _), part in zip(rows, parts, strict=True):
                names, _ = filled(shape)
                laws |= dict.fromkeys(names, law)
                exact = law is not None and not law.after
                found = _sums(part.view(len(names), -1), width, exact)
                sums |= zip(names, found, strict=True)
            norms, sent, wrong, few = (tuple(row) for row in last.view(4, ranks).tolist())
            return Found(sums, laws, norms, sent, wrong, few, width, self._age, *eps)

        return read


def _sums(rows: Tensor, width: int, exact: bool) -> list[Sums]:
    """Return the sums of each parameter.

    Args:
        rows: a row for each parameter.
        width: number of columns of the sketches.
        exact: whether the law leaves the difference between the applied and the dense mean. Its
            sketch then gives the norm of the dense mean more precisely than that of the mean.
    """
    dense, left, scalars = torch.split(rows.double(), [width, width, _SCALARS], 1)
    dense, left = dense.square().sum(1), left.square().sum(1)
    if exact:
        dense = (left - scalars[:, 1] + 2 * scalars[:, 0]).clamp(min=0)
    squares = zip(dense.tolist(), left.tolist(), scalars.tolist(), strict=True)
    return [Sums(dense, left, *others) for dense, left, others in squares]


def _starved(old: Tensor, samples: Tensor, largest: Tensor, per_tensor: bool) -> Tensor:
    """Return whether this rank sends nearly nothing of each parameter of a bucket.

    Args:
        old: number of sampled elements of each parameter whose residual has waited long.
        samples: number of sampled elements that wait or were sent.
        largest: largest magnitude of its residual.
        per_tensor: whether the method compresses each parameter apart from the others.
    """
    starved = (old >= _OLD * samples).logical_and_(old > 0)
    if per_tensor:
        return starved
    # A method that selects the largest elements of several parameters sends nothing of one whose
    # elements are all small. If they are larger than those of the others, it should.
    others = largest.masked_fill(starved, 0).max()
    return starved.logical_and_(largest > _LARGER * others)


def _norms(flat: Tensor, sizes: Sequence[int], order: float = 2) -> Tensor:
    return torch.stack(torch._foreach_norm(list(torch.split(flat, list(sizes))), order))


def _has_residual(law: Law | None) -> bool:
    """Whether the law says what the residual is, so that its elements can be followed."""
    return law is not None and "error" in law.after and "error" in law.before


# Cached, because each step asks.
@lru_cache(maxsize=1024)
def _parts(
    method: Aggregator, shape: BucketShape, world_size: int, rank: int
) -> tuple[Law | None, Mapping[str, Slot]]:
    """Return the law and the slots of a method."""
    slots = method.slots(shape, world_size, rank)
    return method.law(shape), {slot.name: slot for slot in slots}


@lru_cache(maxsize=1024)
def _numbers(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    return host.copy_to(torch.tensor(sizes), device)


@lru_cache(maxsize=256)
def _width(method: Aggregator, shapes: tuple[BucketShape, ...], world_size: int, every: int) -> int:
    """Return the largest width of the sketches that fits into their share of the bytes."""
    parameters = sum(len(filled(shape)[0]) for shape in shapes)
    sent = planned_traffic(method, shapes, world_size).sent
    # Numbers per parameter. Two sketches of float32, and an all-reduce sends nearly twice its size.
    affordable = _SHARE * sent * every / (max(1, parameters) * 4 * 2)
    fitting = (width for width in _WIDTHS if 2 * width + _SCALARS <= affordable)
    return next(fitting, _WIDTHS[-1])


@lru_cache(maxsize=1024)
def _sketch(
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    width: int,
    shard: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Sketch:
    return Sketch(names, sizes, width, shard, dtype, device)
