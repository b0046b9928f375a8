"""BucketWatch: measures in the steps of one bucket what the guard compares, see docs/guard.md."""

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, starmap

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcomp.aggregators import Aggregator, Law
from torchcomp.engine import host
from torchcomp.engine.averager import Averager
from torchcomp.engine.bucket import BucketShape
from torchcomp.engine.keys import Key, tensor_id
from torchcomp.engine.state import Kind, Slot
from torchcomp.guard.report import SAMPLED, Compared, HeldLaw
from torchcomp.specs.errors import SpecError

MOST = 2**14  # at most this many elements of a parameter are compared
SCALARS = len(Compared._fields) - 2  # numbers of `Compared`, but for those from sketches

_OLD = 0.98  # share of the sampled elements of a parameter
# What should be sent in `age` steps of a parameter that is judged: a share of it, or if it is
# small, this many of the sampled elements.
_DUE, _SENDS = 0.2, 10
_LARGER = 1.5  # times the largest residual of the other parameters
_RUN = 4  # neighbours: reading one of them brings the others into the cache
_SAME = 0.01  # relative difference of two equal values: the residual can have 16 bits
Both = tuple[Tensor, Tensor]
"""The values of a slot before and after a step."""


class BucketWatch:
    """Measures the steps of a bucket that has elements.

    A comparison reads small parameters, and of a large one a window, another one each time.
    """

    def __init__(
        self, averager: Averager, method: Aggregator, shape: BucketShape, like: Tensor, age: int
    ) -> None:
        device = like.device
        self._averager, self._exchange, self.method = averager, averager.exchange, method
        self._law, self._age, self._wide = method.law(shape), age, shape.wide().dtype
        self._shard = shape.shard(self._exchange.world_size, self._exchange.rank).span
        self._read_law(shape)
        self._names, self._whole = filled(shape)
        self._sizes = [min(size, MOST) for size in self._whole]
        self._signs = signs_of(self._names, tuple(self._sizes), self._exchange.shard, device)
        self.laws: list[HeldLaw] = []  # for each parameter, or for all of them; none without a law
        self.samples: Samples | None = None  # None without slots in the law
        if self._law is not None:
            kept = self._slots["error"].dtype if "error" in self._slots else shape.dtype
            eps = torch.finfo(kept).eps, torch.finfo(shape.dtype).eps
            held = [(name,) for name in self._names] if self._law.per_parameter else [self._names]
            self.laws = [HeldLaw(self._law, names, *eps) for names in held]
            if self._slots:
                self.samples = Samples(shape, self._law, self._slots, self._shard, like)
        # Share of the elements that a message has: of each parameter, or of all.
        chosen_from = self._whole if method.per_tensor else [shape.numel] * len(self._whole)
        due = [age * method.kept(size) / size for size in chosen_from]
        numbers = torch.tensor([self._whole, self._sizes, due])
        self._numel, windows, self._due = host.copy_to(numbers, device)
        self._factors = self._numel / windows  # how many times its window each parameter is
        self._spans: list[tuple[int, int]] = []  # the windows, if this step is compared
        self._gradient = self._norm = self._signs  # of this rank: in the windows; whole, squared

    def _read_law(self, shape: BucketShape) -> None:
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
        """Read a gradient (1-D) before it is overwritten; `number` is that of a comparison."""
        if self.samples is not None:
            self.samples.before(gradient)
        self._spans = [] if number is None else list(self._windows(number))
        if self._spans:
            self._gradient = self._cut(gradient)
            self._norm = torch.linalg.vector_norm(gradient, dtype=self._wide).square()

    def _windows(self, number: int) -> Iterator[tuple[int, int]]:
        starts = accumulate(self._whole, initial=0)
        for name, size, start in zip(self._names, self._whole, starts, strict=False):
            # By name, so that the windows of equal layers are at different places. The last one
            # ends with the parameter.
            place = (number + tensor_id(name)) % -(-size // MOST)
            first = start + min(place * MOST, max(0, size - MOST))
            yield first, first + min(size, MOST)

    def _cut(self, values: Tensor, start: int = 0) -> Tensor:
        """Return the windows of values that the bucket has from `start` on, or zeros."""
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
        """Measure the `mean` (1-D) that a step applies. Of a comparison, return what ranks add up.

        That is a row for each parameter: two sketches of `width` columns, and the scalars of
        `Compared`. And the squared norms of this rank's gradient and message.
        """
        state = self._averager.state
        opened = {name: state.in_flight(slot) for name, slot in self._slots.items()}
        slots = {name: both for name, both in opened.items() if both is not None}
        if self.samples is not None:
            self.samples.after(mean, slots, ratios)
        if not self._spans:
            return None
        means, ranks, gradient = self._cut(mean), self._exchange.world_size, self._gradient
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
        return torch.stack(torch._foreach_norm(torch.split(values, self._sizes))).square()

    def _starved(self, waiting: Tensor, active: Tensor, largest: Tensor) -> Tensor:
        """Return whether this rank sends nearly nothing of each parameter.

        Of each: samples that have waited long; those that wait or were sent; largest residual.
        """
        starved = (waiting >= _OLD * active).logical_and_(waiting > 0)
        # Where few are due, few of the sampled elements are young.
        many = self._due >= _DUE
        if self.method.per_tensor:
            # Of a small parameter, all elements are sampled.
            none_sent = (waiting >= active).logical_and_(self._due * active >= _SENDS)
            few = self._numel <= SAMPLED
            return starved.logical_and_(torch.where(few, none_sent, many))
        # A method that selects the largest elements of several parameters sends nothing of one
        # whose elements are all small. If they are larger than those of the others, it should.
        others = largest.masked_fill(starved, 0).max()
        starved.logical_and_(largest > _LARGER * others).logical_and_(active >= _SENDS)
        return starved.logical_and_(many.logical_or_(others > 0))

    def read(self, rows: Tensor, width: int) -> Iterator[tuple[str, Compared]]:
        rows = rows.view(len(self._names), -1).double()
        squares = [part.square().sum(1) for part in torch.split(rows[:, : 2 * width], width, 1)]
        numbers = torch.cat([torch.stack(squares, 1), rows[:, 2 * width :]], 1)
        for name, found in zip(self._names, starmap(Compared, numbers.tolist()), strict=True):
            if self._law is not None and not self._law.after:
                # The law leaves the difference of the two means, whose sketch is more precise.
                found = found._replace(dense=max(0.0, found.left - found.applied + 2 * found.dot))
            yield name, found


def sketch(values: Tensor, sizes: Sequence[int], width: int, signs: Tensor) -> Tensor:
    """Return a sketch, a row of `width` numbers, of each part of a vector.

    Each element gets a random sign, and is added to the column of its index modulo `width`. The
    expected squared norm is that of the part, with a relative standard deviation of at most
    ``sqrt(2 * sum(s**2))``, where ``s`` are the columns' shares of it. See Charikar, Chen,
    Farach-Colton, "Finding frequent items in data streams", ICALP 2002.
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


class Samples:
    """Follows how long the residual of elements waits, and whether slots stay as a step left them.

    Steps are read one by one and evaluated several at a time: each operation can be a launch.
    """

    def __init__(
        self, shape: BucketShape, law: Law, slots: dict[str, Slot], shard: slice, like: Tensor
    ) -> None:
        self._names, self._device = filled(shape)[0], (device := like.device)
        at, owner = _sample(shape)
        owned = (at >= shard.start) & (at < shard.stop)
        part = at[owned] - shard.start, owner[owned]
        self._at, self._owner, *own = (host.copy_to(each, device) for each in (at, owner, *part))
        # Elements of each slot, and their owners.
        self._slots = {
            name: own if slot.sharded else [self._at, self._owner] for name, slot in slots.items()
        }
        # Coefficients of this rank's slots and of the gradient ("") in the residual after a step.
        self._factors: dict[str, float] = {}
        if "error" in law.before and "error" in law.after and not slots["error"].sharded:
            terms = {name: -each for name, each in law.before.items() if not slots[name].sharded}
            terms[""] = law.gradient
            self._factors = {name: each / law.after["error"] for name, each in terms.items()}
        # Steps that were read: the gradient, the mean, and the slots.
        self._steps: list[tuple[Tensor, Tensor, dict[str, Both]]] = []
        self._most = min(100, max(10, 2**16 // len(at)))
        self._gradient = self._mean = torch.zeros(0, device=device)  # of the last step
        # Before the last step, and after it. The next one must find the latter.
        self._ages_before = self._ages = torch.zeros(len(at), dtype=torch.int32, device=device)
        self._found: dict[str, Tensor] = {}
        self._left, self._changed = dict[str, Tensor](), dict[str, Tensor]()

    def before(self, gradient: Tensor) -> None:
        if self._factors:
            self._gradient = gradient.index_select(0, self._at)

    def after(self, mean: Tensor, slots: Mapping[str, Both], ratios: Mapping[str, float]) -> None:
        """Read the mean that a step applies, and the slots before and after it."""
        read = {
            name: (before.index_select(0, at), after.index_select(0, at))
            for name, (at, _) in self._slots.items()
            for before, after in (slots[name],)
        }
        if not ratios.keys().isdisjoint(self._names):
            self._multiply(ratios, read)
        if self._factors:
            self._mean = mean.index_select(0, self._at)
        self._steps.append((self._gradient, self._mean, read))
        if len(self._steps) == self._most:
            self._evaluate()

    def _multiply(self, ratios: Mapping[str, float], read: Mapping[str, Both]) -> None:
        self._evaluate()
        left, self._left = self._left.get("error"), {}
        if self._factors and left is not None:
            found, numbers = read["error"][0], torch.finfo(left.dtype)
            factors = torch.tensor([ratios.get(name, 1.0) for name in self._names])
            expected = left * host.copy_to(factors, self._device)[self._owner]
            # It is not rounded like the residual, whose dtype has no smaller numbers than this.
            least = numbers.tiny * numbers.eps
            near = torch.isclose(found.to(expected.dtype), expected, rtol=_SAME, atol=least)
            self._left["error"] = torch.where(near, found, expected.to(found.dtype))

    def _evaluate(self) -> None:
        if not self._steps:
            return
        gradients, means, slots = zip(*self._steps, strict=True)
        self._steps, unsent = [], torch.zeros(())
        if self._factors:  # wide, because 16 bits would be too few for the sum
            wide = torch.promote_types(gradients[0].dtype, torch.float32)
            unsent = torch.stack(gradients).to(wide) * self._factors[""]
        for name in self._slots:
            found, left = map(torch.stack, zip(*(step[name] for step in slots), strict=True))
            last = self._left.get(name, found[0])
            differs = (found != torch.cat([last[None], left[:-1]])).any(0)
            self._changed[name] = self._changed.get(name, differs) | differs
            self._found[name], self._left[name] = found[-1], left[-1]
            if name in self._factors:
                unsent = torch.add(unsent, found, alpha=self._factors[name])
        if self._factors:
            left = torch.stack([step["error"][1] for step in slots])
            # Not exactly 1, because of rounding. Without a residual, 0 / 0 is not above.
            sent = ((left / unsent - 1).abs() > _SAME).logical_and_(torch.stack(means))
            # The last step apart from the others: it can be undone.
            self._ages_before = _aged(self._ages, left[:-1] != 0, sent[:-1])
            self._ages = _aged(self._ages_before, left[-1:] != 0, sent[-1:])

    def take(self, age: int) -> Tensor:
        """Return, by parameter, how many wait for `age` steps, wait or were sent, changed."""
        self._evaluate()
        counts = torch.zeros(3, len(self._names), device=self._device)
        if self._factors:
            counts[0].index_add_(0, self._owner, (self._ages >= age).float())
            # An element whose gradient is always zero has nothing to send.
            moves = (self._mean != 0).logical_or_(self._ages > 0)
            counts[1].index_add_(0, self._owner, moves.float())
        for name, differs in self._changed.items():
            counts[2].index_add_(0, self._slots[name][1], differs.float())
        self._changed = {}
        return counts

    def undo(self, names: Collection[str]) -> None:
        """Undo the last step for these parameters."""
        chosen = [name in names for name in self._names]
        if any(chosen):
            self._evaluate()
            undone = host.copy_to(torch.tensor(chosen), self._device)
            self._ages = torch.where(undone[self._owner], self._ages_before, self._ages)
            for name, found in self._found.items():
                is_undone = undone[self._slots[name][1]]
                self._left[name] = torch.where(is_undone, found, self._left[name])


def _aged(ages: Tensor, waits: Tensor, sent: Tensor) -> Tensor:
    steps = len(waits)
    if not steps:
        return ages
    numbers = torch.arange(1, steps + 1, dtype=ages.dtype, device=ages.device)[:, None]
    last = (numbers * sent).amax(0)
    since = (waits.logical_and_(numbers > last) * (steps + 1 - numbers)).amax(0)
    # Without a residual, it still waits if it has before: in the server residual of any rank.
    return torch.where((ages > 0).logical_and_(last == 0), ages + steps, since)


@lru_cache(maxsize=1024)
def filled(shape: BucketShape) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the names and sizes of the parameters with any elements."""
    found = [each for each in zip(shape.names, shape.sizes, strict=True) if each[1]]
    return tuple(name for name, _ in found), tuple(size for _, size in found)


@lru_cache(maxsize=1024)
def _sample(shape: BucketShape) -> tuple[Tensor, Tensor]:
    """Return the sampled elements of a bucket, and the position of each one's name in `filled`."""
    names, sizes = filled(shape)
    at, owner = [], []
    starts = accumulate(sizes, initial=0)
    for i, (name, size, start) in enumerate(zip(names, sizes, starts, strict=False)):
        drawn = torch.arange(size)
        if size > SAMPLED:
            # By name alone, so that all ranks and all buckets follow the same elements.
            key = Key(0).of_tensor(name).shared()
            runs = torch.from_numpy(key.choice(size // _RUN, SAMPLED // _RUN, replace=False))
            drawn = (runs.sort().values[:, None] * _RUN + torch.arange(_RUN)).flatten()
        at.append(drawn + start)
        owner.append(torch.full((len(drawn),), i))
    return torch.cat(at), torch.cat(owner)
