"""BucketWatch: measures in the steps of one bucket what the guard compares.

Of a small parameter, that is all of it. Of a large one, it is a window of elements, another one in
each comparison, so that a comparison is cheap and several of them see everything.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, starmap

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcomp.aggregators import Aggregator
from torchcomp.engine import host
from torchcomp.engine.averager import Averager
from torchcomp.engine.bucket import BucketShape
from torchcomp.engine.keys import tensor_id
from torchcomp.engine.state import Kind
from torchcomp.guard import samples
from torchcomp.guard.report import Compared, HeldLaw
from torchcomp.guard.samples import Both, Samples, filled
from torchcomp.specs.errors import SpecError

MOST = 2**14
"""At most this many elements of a parameter are compared."""

SCALARS = len(Compared._fields) - 2
"""Numbers of `Compared`, but for those from sketches."""

_OLD = 0.98  # share of the sampled elements of a parameter
# What should be sent in `age` steps of a parameter that is judged: a share of it, or if it is
# small, this many of the sampled elements.
_DUE, _SENDS = 0.2, 10
_LARGER = 1.5  # times the largest residual of the other parameters


class BucketWatch:
    """Measures the steps of a bucket that has elements.

    Args:
        averager: averages it.
        method: with this method.
        shape: of the bucket.
        device: of the bucket.
        age: number of steps after which a value that waits in the residual is old.

    Attributes:
        laws: the law of the method for each parameter, or for all of them; none without a law.
        samples: followed in every step; None without slots in the law.

    Raises:
        SpecError: if a slot of the law has no value for each element of the bucket.
    """

    def __init__(
        self,
        averager: Averager,
        method: Aggregator,
        shape: BucketShape,
        device: torch.device,
        age: int,
    ) -> None:
        self._averager, self._exchange, self.method = averager, averager.exchange, method
        self._law, self._age, self._wide = method.law(shape), age, shape.wide().dtype
        self._shard = shape.shard(self._exchange.world_size, self._exchange.rank).span
        self._read_law(shape)
        self._names, self._whole = filled(shape)
        self._sizes = [min(size, MOST) for size in self._whole]
        self._signs = signs_of(self._names, tuple(self._sizes), self._exchange.shard, device)
        self.laws: list[HeldLaw] = []
        if self._law is not None:
            kept = self._slots["error"].dtype if "error" in self._slots else shape.dtype
            eps = torch.finfo(kept).eps, torch.finfo(shape.dtype).eps
            held = [(name,) for name in self._names] if self._law.per_parameter else [self._names]
            self.laws = [HeldLaw(self._law, names, *eps) for names in held]
        # Share of each parameter's elements that a message has; of a selection among several
        # parameters, the share of all.
        chosen_from = self._whole if method.per_tensor else [shape.numel] * len(self._whole)
        due = [age * method.kept(size) / size for size in chosen_from]
        numbers = torch.tensor([self._whole, self._sizes, due])
        self._numel, windows, self._due = host.copy_to(numbers, device)
        self._factors = self._numel / windows  # how many times its window each parameter is
        self.samples: Samples | None = None
        if self._law is not None and self._slots:
            self.samples = Samples(shape, self._law, self._slots, self._shard, device)
        self._spans: list[tuple[int, int]] = []  # the windows, if this step is compared
        self._gradient = self._norm = self._signs  # of this rank: in the windows; whole, squared

    def _read_law(self, shape: BucketShape) -> None:
        """Find the slots of the law."""
        law, ranks, rank = self._law, self._exchange.world_size, self._exchange.rank
        self._terms = [] if law is None else list(law.terms())
        names = dict.fromkeys(name for name, _, _ in self._terms)
        declared = self.method.slots(shape, ranks, rank)
        self._slots = {slot.name: slot for slot in declared if slot.name in names}
        for name in names:
            slot = self._slots.get(name)
            whole = slot and (slot.names, slot.sizes) == (shape.names, shape.sizes)
            if slot is None or not (whole or slot.sharded):
                raise SpecError(
                    f"guard: the law of {self.method} is about the slot {name!r}, which its "
                    "slots() do not declare with shape.names and shape.sizes: change one of them"
                )

    def before(self, gradient: Tensor, number: int | None) -> None:
        """Read the gradient of a bucket (1-D), which the method is about to overwrite.

        `number` is that of the comparison that this step makes; None if it makes none.
        """
        if self.samples is not None:
            self.samples.before(gradient)
        self._spans = [] if number is None else list(self._windows(number))
        if self._spans:
            self._gradient = self._cut(gradient)
            self._norm = torch.linalg.vector_norm(gradient, dtype=self._wide).square()

    def _windows(self, number: int) -> Iterator[tuple[int, int]]:
        """Iterate over the spans of the elements that a comparison looks at, by parameter."""
        starts = accumulate(self._whole, initial=0)
        for name, size, start in zip(self._names, self._whole, starts, strict=False):
            # By name, so that the windows of equal layers are at different places.
            place = (number + tensor_id(name)) % -(-size // MOST)
            # The last window ends with the parameter.
            first = start + min(place * MOST, max(0, size - MOST))
            yield first, first + min(size, MOST)

    def _cut(self, values: Tensor, start: int = 0) -> Tensor:
        """Return the windows of values that the bucket has from `start` on, and zeros elsewhere."""
        parts = []
        for first, last in self._spans:
            low, high = max(first, start), min(last, start + len(values))
            part = values[low - start : high - start] if low < high else values[:0]
            left = low - first if low < high else last - first
            parts.append(pad(part, (left, last - first - left - len(part))))
        return torch.cat(parts).to(self._wide)

    def after(
        self, mean: Tensor, ratios: Mapping[str, float], width: int
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Measure what the method has done.

        Args:
            mean: what the step applies, 1-D.
            ratios: by parameter name, what the residual was multiplied by since the last step.
            width: number of columns of the sketches.

        Returns:
            If this step is compared: what the ranks add up, with a row for each parameter: two
            sketches and the scalars of `Compared`. And the squared norms of this rank's gradient
            and message.
        """
        state = self._averager.state
        opened = {name: state.in_flight(slot) for name, slot in self._slots.items()}
        slots = {name: both for name, both in opened.items() if both is not None}
        if self.samples is not None:
            self.samples.after(mean, slots, ratios)
        return self._compare(self._cut(mean), slots, width) if self._spans else None

    def _compare(
        self, means: Tensor, slots: Mapping[str, Both], width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result of :meth:`after`, from the windows of the mean."""
        ranks, gradient = self._exchange.world_size, self._gradient
        residuals = largest = torch.zeros_like(self._numel)  # squared norms; magnitudes
        # What this rank has sent, and the mean with the parts of the slots that ranks own.
        message, server = means, means
        if self._law is not None:
            message, server = gradient * self._law.gradient, means.clone()
        for name, when, factor in self._terms:
            sharded = self._slots[name].sharded
            values = self._cut(slots[name][when], self._shard.start if sharded else 0)
            if sharded:
                server.add_(values, alpha=factor * ranks)  # on its owner alone
            else:
                message.sub_(values, alpha=factor)
            if when and self._slots[name].kind is Kind.DEBT:
                residuals = residuals + self._norms(values) * (ranks if sharded else 1)
            if when and name == "error":
                magnitudes = torch.split(values.abs(), self._sizes)
                largest = torch.stack(torch._foreach_max(magnitudes))
        parts = [torch.split(values, self._sizes) for values in (gradient, means)]
        norms = [
            torch.stack([torch.dot(*pair) for pair in zip(*parts, strict=True)]),
            self._norms(means),
            self._norms(gradient),
            residuals,
            torch.stack([each.count_nonzero() for each in parts[1]]).to(self._wide),
        ]
        counts = torch.zeros(3, len(self._names), device=means.device)
        if self.samples is not None:
            counts = self.samples.take(self._age)
        waiting, active, changed = counts
        starved = self._starved(waiting, active, largest).float()
        both = gradient, server - message
        sketches = [sketch(each, self._sizes, width, self._signs) for each in both]
        rows = [
            # Estimates of whole parameters.
            torch.cat(sketches, 1) * self._factors.sqrt()[:, None],
            torch.stack(norms, 1) * self._factors[:, None],
            # The last two are counted on each rank, and not averaged.
            torch.stack([self._numel, waiting, active, changed * ranks, starved * ranks], 1),
        ]
        sent = (self._norms(message) * self._factors).sum()
        return torch.cat([each.float() for each in rows], 1).div_(ranks), self._norm, sent

    def _norms(self, values: Tensor) -> Tensor:
        """Return the squared norm of each parameter's part."""
        return torch.stack(torch._foreach_norm(torch.split(values, self._sizes))).square()

    def _starved(self, waiting: Tensor, active: Tensor, largest: Tensor) -> Tensor:
        """Return whether this rank sends nearly nothing of each parameter.

        Of each: numbers of sampled elements whose residual has waited long, and that wait or were
        sent; largest magnitude of the residual.
        """
        starved = (waiting >= _OLD * active).logical_and_(waiting > 0)
        # Where few are due, few of the sampled elements are young.
        many = self._due >= _DUE
        if self.method.per_tensor:
            # Of a small parameter, all elements are sampled.
            none_sent = (waiting >= active).logical_and_(self._due * active >= _SENDS)
            few = self._numel <= samples.MOST
            return starved.logical_and_(torch.where(few, none_sent, many))
        # A method that selects the largest elements of several parameters sends nothing of one
        # whose elements are all small. If they are larger than those of the others, it should.
        others = largest.masked_fill(starved, 0).max()
        starved.logical_and_(largest > _LARGER * others).logical_and_(active >= _SENDS)
        return starved.logical_and_(many.logical_or_(others > 0))

    def read(self, rows: Tensor, width: int) -> Iterator[tuple[str, Compared]]:
        """Iterate over the sums over the ranks of what :meth:`after` has returned, by name."""
        rows = rows.view(len(self._names), -1).double()
        squares = [part.square().sum(1) for part in torch.split(rows[:, : 2 * width], width, 1)]
        numbers = torch.cat([torch.stack(squares, 1), rows[:, 2 * width :]], 1)
        for name, found in zip(self._names, starmap(Compared, numbers.tolist()), strict=True):
            if self._law is not None and not self._law.after:
                # The law leaves the difference between the applied and the dense mean. Its sketch
                # gives the norm of the dense mean more precisely than that of the mean.
                found = found._replace(dense=max(0.0, found.left - found.applied + 2 * found.dot))
            yield name, found


def sketch(values: Tensor, sizes: Sequence[int], width: int, signs: Tensor) -> Tensor:
    """Return a sketch, a row of `width` numbers, of each part of a vector.

    Each element gets a random sign. The signed elements are written into rows of `width` elements,
    and the rows are added. A sketch is linear: that of a mean over the ranks is the mean of the
    ranks' sketches. The expected square of its norm is that of the part. The relative standard
    deviation is at most ``sqrt(2 * sum(s**2))``, where ``s`` are the columns' shares of the part's
    squared norm. If these are even, it is ``sqrt(2 / width)``.

    Reference: Charikar, Chen, Farach-Colton, "Finding frequent items in data streams", ICALP 2002.
    Here, the column of an element is its index modulo `width`: only signs are random.
    """
    parts = torch.split(values * signs, list(sizes))
    rows = [pad(part, (0, -len(part) % width)).view(-1, width).sum(0) for part in parts]
    return torch.stack(rows)


@lru_cache(maxsize=1024)
def signs_of(names: Sequence[str], sizes: Sequence[int], seed: int, device: torch.device) -> Tensor:
    """Return random signs (1-D, int8). Ranks whose sketches are added pass the same `seed`."""
    signs = []
    for name, size in zip(names, sizes, strict=True):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        signs.append(torch.randint(0, 2, (size,), generator=generator, dtype=torch.int8))
    return host.copy_to(torch.cat(signs) * 2 - 1, device)
