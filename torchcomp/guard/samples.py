"""Samples: a few elements of every parameter, followed from step to step."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from torchcomp import host
from torchcomp.aggregators import Law
from torchcomp.bucket import BucketShape
from torchcomp.keys import Key

MOST = 256
"""At most this many elements of a parameter are followed."""

_RUN = 8
"""They are runs of this many neighbours: reading one of them brings the others into the cache."""

_STEPS = 10
"""At most this many steps are evaluated at once."""

_SAME = 0.01
"""Two values are the same up to this relative difference. The residual can have 16 bits."""


class Samples:
    """Follows how long the residual of sampled elements waits, and whether it stays as it was.

    Steps are read one by one and evaluated several at a time: that takes less than half of the
    time. A step in which the residual is scaled or undone is evaluated at once.

    Args:
        shape: of the bucket.
        law: says what the residual would be if nothing was sent.
        device: of the bucket.
    """

    # These are no slots of the state: an error in a slot would be one in what checks it.
    def __init__(self, shape: BucketShape, law: Law, device: torch.device) -> None:
        self._at, self._owner = sample(shape, device)
        self._names, self._law = filled(shape)[0], law
        self._ages = torch.zeros(len(self._at), dtype=torch.int32, device=device)
        # A row for each step that was read: of the gradient, of the slots before the step, and of
        # the mean. The residual after the step is one row further: row 0 is from the last step.
        self._gradient, self._mean, self._left = _Rows(), _Rows(), _Rows()
        self._found: dict[str, _Rows] = {}
        self._begin = self._end = 0  # the rows that were read, but not evaluated
        # Whether the first of them is to be compared with the step before it.
        self._continues = False
        self._changed: Tensor | None = None

    def follow(self, law: Law) -> None:
        """Go on with another law of the same residual."""
        if law is not self._law:  # laws are cached
            self._evaluate()
            self._law, self._found = law, {}

    def before(self, gradient: Tensor) -> None:
        """Read the gradient of a bucket that is about to be averaged."""
        if self._end == _STEPS:
            self._start_again()
        self._gradient.read(self._end, gradient, self._at)

    def after(
        self, mean: Tensor, found: Mapping[str, Tensor], left: Tensor, ratios: Mapping[str, float]
    ) -> None:
        """Read what the step has done.

        Args:
            mean: what it applies.
            found: the values before the step of the slots that the residual is made of.
            left: the residual after it.
            ratios: by parameter name, what the residual was multiplied by since the last step.
        """
        now = self._end
        for name, values in found.items():
            if name not in self._found:
                self._found[name] = _Rows()
            self._found[name].read(now, values, self._at)
        self._left.read(now + 1, left, self._at)
        self._mean.read(now, mean, self._at)
        if ratios and not ratios.keys().isdisjoint(self._names):
            self._evaluate()
            self._check_scaled(ratios, now)
        self._end = now + 1
        if self._end == _STEPS:
            self._evaluate()

    def _start_again(self) -> None:
        """Go on in the first row."""
        self._left.move(self._end, 0)
        self._begin = self._end = 0

    def _evaluate(self) -> None:
        """Evaluate the steps that were read."""
        begin, end = self._begin, self._end
        if begin == end:
            return
        self._begin = end
        law, factor = self._law, 1 / self._law.after["error"]
        left = self._left.rows(begin + 1, end + 1)
        differ = self._found["error"].rows(begin, end) != self._left.rows(begin, end)
        if not self._continues:
            differ = differ[1:]
        self._continues = True
        self._note(differ.any(0))
        unsent = self._gradient.rows(begin, end).to(left.dtype, copy=True)
        unsent.mul_(law.gradient * factor)
        for name, rows in self._found.items():
            unsent.sub_(rows.rows(begin, end), alpha=law.before[name] * factor)
        # Not exactly 1, because of rounding. Without a residual, 0 / 0 is not above.
        sent = (left / unsent).sub_(1).abs_() > _SAME
        sent.logical_and_(self._mean.rows(begin, end))
        self._ages = _aged(self._ages, left != 0, sent)

    def _check_scaled(self, ratios: Mapping[str, float], now: int) -> None:
        """Compare the residual that a step has found with the one before, times its ratio."""
        if self._continues:
            both = self._found["error"], self._left
            found, before = (rows.rows(now, now + 1)[0] for rows in both)
            factors = torch.tensor([ratios.get(name, 1.0) for name in self._names])
            expected = before * host.copy_to(factors, found.device)[self._owner]
            # Not rounded like the residual, whose dtype has no smaller numbers than `least`.
            numbers = torch.finfo(found.dtype)
            least = numbers.tiny * numbers.eps
            limit = torch.maximum(found.abs(), expected.abs()).mul_(_SAME).add_(least)
            self._note((found - expected).abs() > limit)
        self._continues = False

    def _note(self, wrong: Tensor) -> None:
        """Note which residuals have changed between two steps."""
        self._changed = wrong if self._changed is None else self._changed.logical_or_(wrong)

    def take(self) -> tuple[Tensor, Tensor | None]:
        """Return the age of each element in steps, and whether its residual has changed.

        The second one is None if nothing is known of it. The next call begins anew with it.
        """
        self._evaluate()
        changed, self._changed = self._changed, None
        return self._ages, changed

    def undo(self, names: Iterable[str]) -> None:
        """The step in flight is undone for these parameters: their residual stays as it was."""
        undone = set(names)
        last = self._end - 1
        if last < 0 or undone.isdisjoint(self._names):
            return
        chosen = torch.tensor([name in undone for name in self._names])
        mask = host.copy_to(chosen, self._ages.device)[self._owner]
        self._end = max(self._begin, last)
        self._evaluate()
        ages, self._end = self._ages, last + 1
        self._evaluate()
        # They are lost if the last step was evaluated before: one step more then counts.
        self._ages = torch.where(mask, ages, self._ages)
        left = self._left.rows(last + 1, last + 2)[0]
        left.copy_(torch.where(mask, self._found["error"].rows(last, last + 1)[0], left))


class _Rows:
    """The sampled elements in several steps, in memory that is used again."""

    def __init__(self) -> None:
        self._table: Tensor | None = None

    def read(self, row: int, values: Tensor, at: Tensor) -> None:
        """Copy the elements `at` of `values` into a row."""
        table = self._table
        if table is None or table.dtype != values.dtype or table.device != values.device:
            table = self._table = values.new_zeros(_STEPS + 1, len(at))
        torch.index_select(values, 0, at, out=table[row])

    def rows(self, begin: int, end: int) -> Tensor:
        """Return some rows, as a view."""
        if self._table is None:
            raise RuntimeError("no step was read")
        return self._table[begin:end]

    def move(self, source: int, target: int) -> None:
        self.rows(target, target + 1).copy_(self.rows(source, source + 1))


def _aged(ages: Tensor, waits: Tensor, sent: Tensor) -> Tensor:
    """Return the ages after some steps.

    Args:
        ages: of each element, before them.
        waits: whether each element has a residual after each step. Without one, it still waits if
            it has before: in the server residual of any rank.
        sent: whether each step has sent it.
    """
    steps = len(waits)
    number = torch.arange(steps, dtype=ages.dtype, device=ages.device)[:, None]
    # How many steps there are up to the last one that has sent it, and which is the first one after
    # it in which it waits.
    last = (number + 1).mul(sent).amax(0)
    waits.logical_and_(number >= last)
    first = torch.where(waits, number, steps).amin(0)
    waited = (last == 0).logical_and_(ages > 0)
    return torch.where(waited, ages + steps, steps - first)


@lru_cache(maxsize=1024)
def filled(shape: BucketShape) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the names and sizes of the parameters with any elements."""
    found = [each for each in zip(shape.names, shape.sizes, strict=True) if each[1]]
    return tuple(name for name, _ in found), tuple(size for _, size in found)


@lru_cache(maxsize=1024)
def sample(shape: BucketShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the sampled elements of a bucket, and the position of each one's name in `filled`."""
    names, sizes = filled(shape)
    at, owner = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    starts = accumulate(sizes, initial=0)
    for i, (name, size, start) in enumerate(zip(names, sizes, starts, strict=False)):
        # By name alone, so that all ranks and all buckets follow the same elements.
        key = Key(0).of_tensor(name).shared()
        drawn = torch.arange(size)
        if size > MOST:
            runs = torch.from_numpy(key.choice(size // _RUN, MOST // _RUN, replace=False))
            drawn = (runs.sort().values[:, None] * _RUN + torch.arange(_RUN)).flatten()
        at.append(drawn + start)
        owner.append(torch.full((len(drawn),), i))
    return host.copy_to(torch.cat(at), device), host.copy_to(torch.cat(owner), device)
