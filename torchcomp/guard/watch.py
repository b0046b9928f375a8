"""Watch: measures in the steps of an averager what the guard compares."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from torchcomp import host
from torchcomp.aggregators import Aggregator, Law, planned_traffic
from torchcomp.averager import Averager
from torchcomp.bucket import Bucket, BucketShape
from torchcomp.errors import SpecError
from torchcomp.exchange import Exchange
from torchcomp.guard.report import Compared, Report, Sums
from torchcomp.guard.samples import MOST, Samples, filled, sample
from torchcomp.guard.sketch import Sketch
from torchcomp.guard.slots import Kept
from torchcomp.guard.windows import Windows, windows
from torchcomp.profiling import label
from torchcomp.state import Kind, Slot, State

_WIDTHS = (251, 127, 61, 31, 17, 11)
_SHARE = 0.008  # of the method's bytes, for a comparison
_SCALARS = 10  # of `Sums`, all but those from sketches
_STARVED, _CHANGED = 4, 5  # places among them
_OLD = 0.98  # share of the sampled elements of a parameter
# What should be sent in `age` steps of a parameter that is judged: a share of it, or if it is
# small, this many of the sampled elements.
_DUE, _SENDS = 0.2, 10
_LARGER = 1.5  # times the largest residual of the other parameters


@dataclass(frozen=True)
class Found:
    """What a comparison has added up over the ranks.

    Attributes:
        sums: by parameter name, of those with any elements.
        laws: the law of each parameter's method, by parameter name.
        gradients: squared norm of each rank's gradient, in rank order.
        messages: squared norm of what each rank has sent, decoded, in rank order.
        changed: number of sampled elements of slots that have changed between steps, by rank.
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


@dataclass(frozen=True)
class _Plan:
    """What is looked up for a bucket once, and not in every step.

    Attributes:
        method: averages the bucket.
        exchange: the ranks that average.
        law: of the method.
        slots: of the method, by name.
        samples: followed in every step; None without a residual.
        found: names of the slots that the residual is made of, on this rank.
        terms: names of the slots in the law.
        per_tensor: whether the method compresses each parameter apart from the others.
        due: share of each parameter's elements that a message has; of a selection among several
            parameters, the share of all.
    """

    method: Aggregator
    exchange: Exchange
    law: Law | None
    slots: Mapping[str, Slot]
    samples: Samples | None
    found: tuple[str, ...]
    terms: tuple[str, ...]
    per_tensor: bool
    due: Tensor

    @property
    def others(self) -> list[str]:
        """Names of the slots in the law besides the residual."""
        return [name for name in self.terms if name != "error"]

    def opened(self, state: State, names: Iterable[str]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the values before and after the step of the slots that it has opened."""
        pairs = ((name, state.in_flight(self.slots[name])) for name in names)
        return {name: both for name, both in pairs if both is not None}


class Watch:
    """Measures the steps of one averager.

    Args:
        averager: the averager.
        every: number of steps from one comparison to the next.
        age: number of steps after which a value that waits in the residual is old.
    """

    def __init__(self, averager: Averager, every: int, age: int) -> None:
        self._averager, self.every, self._age = averager, every, age
        self._plans: dict[BucketShape, _Plan] = {}
        self._kept = Kept()
        self._ratios: Mapping[str, float] = {}
        # Number of the comparison that this step makes, or None.
        self._comparing: int | None = None
        self._precedes = False  # whether the next step is compared
        self._width = _WIDTHS[-1]
        self._eps = 0.0, 0.0  # of the residual's dtype and of the mean's
        self._gradient: Tensor | None = None  # this rank's values of the bucket in flight
        self._norms: list[Tensor] = []  # of this rank's gradients, squared
        # A row for each parameter of a bucket: two sketches, and the scalars of `Sums`.
        self._rows: list[tuple[BucketShape, Law | None, Tensor]] = []
        self._messages: list[Tensor] = []  # squared norms of this rank's messages

    @property
    def exchange(self) -> Exchange:
        """The ranks that average."""
        return self._averager.exchange

    def begin(self, ratios: Mapping[str, float]) -> None:
        """Begin a step.

        Args:
            ratios: by parameter name, what the residual was multiplied by since the last step.
        """
        self._rows.clear()
        self._messages.clear()
        self._norms.clear()
        self._gradient, self._eps, self._ratios = None, (0.0, 0.0), ratios
        step = self._averager.step
        number, left = divmod(step + 1, self.every)
        self._comparing = None if left else number
        self._precedes = (step + 2) % self.every == 0
        if self._comparing is not None:
            averager, ranks = self._averager, self.exchange.world_size
            shapes = tuple(map(averager.shape_of, averager.buckets))
            self._width = _width(averager.aggregator.at(step), shapes, ranks, self.every)

    def check(self, method: Aggregator, shape: BucketShape) -> None:
        """Raise SpecError if a slot of the method's law has no value for each element of a bucket.

        Args:
            method: one that never changes its compressor.
            shape: of the bucket.
        """
        law = method.law(shape)
        declared = method.slots(shape, self.exchange.world_size, self.exchange.rank)
        slots = {slot.name: slot for slot in declared}
        for name, _, _ in () if law is None else law.terms():
            slot = slots.get(name)
            if slot is None:
                wrong = "its slots() do not declare it"
            elif slot.sharded or (slot.names, slot.sizes) == (shape.names, shape.sizes):
                continue
            else:
                wrong = "its slots() declare it with other sizes than those of the bucket"
            raise SpecError(
                f"guard: the law of {method} is about the slot {name!r}, but {wrong}. Declare it "
                "with shape.names and shape.sizes, or change law()"
            )

    def forget(self) -> None:
        """Begin anew, because the next step does not continue the last one."""
        self._plans = {}  # another thread can read the old ones
        self._kept.forget()

    def undo(self, names: Iterable[str]) -> None:
        """The step in flight is undone for these parameters: their state stays as it was."""
        for plan in self._plans.values():
            if plan.samples is not None:
                plan.samples.undo(names)
        self._kept.forget(names)

    def _plan_of(self, method: Aggregator, bucket: Bucket) -> _Plan:
        shape, device = bucket.shape, bucket.flat.device
        known = self._plans.get(shape)
        if known is not None and known.method is method and known.exchange is self.exchange:
            return known
        ranks, rank = self.exchange.world_size, self.exchange.rank
        law, samples = method.law(shape), None
        slots = {slot.name: slot for slot in method.slots(shape, ranks, rank)}
        names, sizes = filled(shape)
        terms = {} if law is None else dict.fromkeys(name for name, _, _ in law.terms())
        found = _read_before(law, slots)
        if law is not None and names and found:
            dtypes = {name: slots[name].dtype for name in found}
            # The ages go on with another method of the same residual.
            samples = None if known is None else known.samples
            if samples is None or samples.dtypes != dtypes:
                samples = Samples(shape, law, dtypes, device)
            samples.follow(law)
        chosen_from = sizes if method.per_tensor else [shape.numel] * len(sizes)
        due = torch.tensor([method.kept(size) / size for size in chosen_from])
        plan = self._plans[shape] = _Plan(
            method,
            self.exchange,
            law,
            slots,
            samples,
            found,
            tuple(terms),
            method.per_tensor,
            host.copy_to(due, device),
        )
        return plan

    def before(self, bucket: Bucket, method: Aggregator) -> None:
        """Keep what the method is about to overwrite."""
        plan = self._plan_of(method, bucket)
        if plan.samples is not None:
            plan.samples.before(bucket.flat)
        if self._comparing is not None and filled(bucket.shape)[0]:
            wide = bucket.shape.wide().dtype
            self._norms.append(torch.linalg.vector_norm(bucket.flat, dtype=wide).square())
            self._gradient = windows(bucket.shape, self._comparing).cut(bucket.flat).to(wide)

    @label("guard")
    def after(self, bucket: Bucket, method: Aggregator) -> None:
        """Measure what the method has done with a bucket."""
        plan = self._plan_of(method, bucket)
        law, slots, state = plan.law, plan.slots, self._averager.state
        if plan.samples is not None:
            opened = plan.opened(state, plan.found)
            if "error" in opened:
                found = {name: before for name, (before, _) in opened.items()}
                plan.samples.after(bucket.flat, found, opened["error"][1], self._ratios)
        if self._gradient is not None and self._comparing is not None:
            gradient, self._gradient = self._gradient, None
            part = windows(bucket.shape, self._comparing)
            opened = plan.opened(state, plan.terms)
            cut = {
                name: self._cut(part, bucket.shape, slots[name], both)
                for name, both in opened.items()
            }
            rows = self._compare(bucket, part, gradient, plan, cut)
            moved = self._moved(bucket.shape, plan, opened)
            if moved is not None:
                rows[:, 2 * self._width + _CHANGED].add_(moved)
            self._rows.append((bucket.shape, law, rows))
        if self._precedes:
            for name, (_, after) in plan.opened(state, plan.others).items():
                self._kept.keep(bucket.shape, name, after)

    def _moved(
        self, shape: BucketShape, plan: _Plan, opened: Mapping[str, tuple[Tensor, Tensor]]
    ) -> Tensor | None:
        """Return how many elements of the slots besides the residual have changed, by parameter."""
        if not self._ratios.keys().isdisjoint(shape.names):
            self._kept.forget(shape.names)
        total: Tensor | None = None
        ranks, rank = self.exchange.world_size, self.exchange.rank
        for name in plan.others:
            if name in opened:
                start = shape.shard(ranks, rank).start if plan.slots[name].sharded else 0
                changed = self._kept.changed(shape, name, opened[name][0], start)
                if changed is not None:
                    total = changed if total is None else total + changed
        return total

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
        plan: _Plan,
        cut: Mapping[str, tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Return what is to be added up over the ranks. Overwrites `gradient`.

        Args:
            bucket: the mean that the step applies.
            part: the windows that are compared.
            gradient: those of this rank's gradient.
            plan: of the bucket.
            cut: the windows of the slots' values before and after the step.
        """
        law, slots = plan.law, plan.slots
        shape, ranks, device = bucket.shape, self.exchange.world_size, bucket.flat.device
        means = part.cut(bucket.flat).to(gradient.dtype)
        factors = part.factors(device)
        names, _ = filled(shape)
        sketch = _sketch(names, part.sizes, self._width, self.exchange.shard, means.dtype, device)
        columns = self._columns(bucket, part, gradient, means, plan, cut)
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
        plan: _Plan,
        cut: Mapping[str, tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Return the scalars of `Sums` for each parameter."""
        slots = plan.slots
        ranks, device, sizes = self.exchange.world_size, means.device, list(part.sizes)
        at, owner = sample(bucket.shape, device)
        factors, nothing = part.factors(device), torch.zeros(len(sizes), device=device)
        residuals, old, samples, starved = nothing, nothing, nothing, nothing
        age, changed = (None, None) if plan.samples is None else plan.samples.take()
        for name, (_, after) in cut.items():
            if slots[name].kind is Kind.DEBT:
                # The square of a shard is averaged over the ranks, of which the others have none.
                share = ranks if slots[name].sharded else 1
                residuals = residuals + _norms(after, sizes).square() / share
        if age is not None and "error" in cut:
            old = nothing.index_add(0, owner, (age >= self._age).float())
            # An element whose gradient is always zero has nothing to send.
            active = (bucket.flat.index_select(0, at) != 0).logical_or_(age > 0)
            samples = nothing.index_add(0, owner, active.float())
            residual = list(torch.split(cut["error"][1].abs(), sizes))
            largest = torch.stack(torch._foreach_max(residual))
            due, whole = plan.due * self._age, _numbers(part.whole, device)
            starved = _starved(old, samples, largest, whole, due, plan.per_tensor).float()
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

    def finish(self) -> tuple[Tensor, Callable[[Tensor], Found]] | None:
        """End a step.

        Returns:
            Numbers to add up over the ranks (1-D), and what reads their sums on the CPU. None if
            this step is not compared.
        """
        if not self._rows:
            return None
        rows, self._rows = self._rows, []
        width, ranks, device = self._width, self.exchange.world_size, self.exchange.device
        values = [each.to(device) for _, _, each in rows]
        own = torch.zeros(4, ranks, device=device)
        gradients, messages, changed, starved = own[:, self.exchange.rank].unbind()
        for each in values:
            starved.add_(each[:, 2 * width + _STARVED].sum())
            changed.add_(each[:, 2 * width + _CHANGED].sum())
        for norm in self._norms:
            gradients.add_(norm.to(device))
        for message in self._messages:
            messages.add_(message.to(device))
        numbers = torch.cat([*(each.flatten() for each in values), own.flatten()])
        counts, eps = [*(value.numel() for value in values), own.numel()], self._eps

        def read(received: Tensor) -> Found:
            *parts, last = torch.split(received, counts)
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

        return numbers, read


def _read_before(law: Law | None, slots: Mapping[str, Slot]) -> tuple[str, ...]:
    """Return the names of the slots that a rank's residual is made of; none without a residual."""
    if law is None or "error" not in law.before or "error" not in law.after:
        return ()
    own = tuple(name for name in law.before if not slots[name].sharded)
    return own if "error" in own else ()


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


def _starved(
    old: Tensor, samples: Tensor, largest: Tensor, whole: Tensor, due: Tensor, per_tensor: bool
) -> Tensor:
    """Return whether this rank sends nearly nothing of each parameter of a bucket.

    Args:
        old: number of sampled elements of each parameter whose residual has waited long.
        samples: number of sampled elements that wait or were sent.
        largest: largest magnitude of its residual.
        whole: number of elements of each parameter.
        due: share of its elements that should have been sent meanwhile, if all were different.
        per_tensor: whether the method compresses each parameter apart from the others.
    """
    starved = (old >= _OLD * samples).logical_and_(old > 0)
    # Where few are due, few of the sampled elements are young.
    many = due >= _DUE
    if per_tensor:
        # Of a small parameter, all elements are sampled.
        none_sent = (old >= samples).logical_and_(due * samples >= _SENDS)
        return starved.logical_and_(torch.where(whole <= MOST, none_sent, many))
    # A method that selects the largest elements of several parameters sends nothing of one whose
    # elements are all small. If they are larger than those of the others, it should.
    others = largest.masked_fill(starved, 0).max()
    starved.logical_and_(largest > _LARGER * others).logical_and_(samples >= _SENDS)
    return starved.logical_and_(many.logical_or_(others > 0))


def _norms(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    return torch.stack(torch._foreach_norm(list(torch.split(flat, list(sizes)))))


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
