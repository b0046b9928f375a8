"""Samples: a few elements of every parameter, followed from step to step.

They are not slots of the state: an error in a slot would be one in what checks it.
"""

from collections.abc import Collection, Mapping
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from torchcomp.aggregators import Law
from torchcomp.engine import host
from torchcomp.engine.bucket import BucketShape
from torchcomp.engine.keys import Key
from torchcomp.engine.state import Slot

MOST = 128
"""At most this many elements of a parameter are followed."""

_RUN = 4  # neighbours: reading one of them brings the others into the cache
_SAME = 0.01  # relative difference of two equal values: the residual can have 16 bits
Both = tuple[Tensor, Tensor]
"""The values of a slot before and after a step."""


class Samples:
    """Follows how long the residual of elements waits, and whether slots stay as a step left them.

    Steps are read one by one and evaluated several at a time: on an accelerator, each operation is
    a launch that delays the backward pass.

    Args:
        shape: of the bucket.
        law: says what the residual is after a step if nothing is sent.
        slots: those of the law, by name.
        shard: the elements that this rank owns.
        device: of the bucket.
    """

    def __init__(
        self,
        shape: BucketShape,
        law: Law,
        slots: Mapping[str, Slot],
        shard: slice,
        device: torch.device,
    ) -> None:
        self._names, self._device = filled(shape)[0], device
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
        # Steps that were read: the gradient, the mean, and the slots. Few elements would otherwise
        # keep thousands of steps.
        self._steps: list[tuple[Tensor, Tensor, dict[str, Both]]] = []
        self._most = min(100, max(10, 2**16 // len(at)))
        self._gradient = self._mean = torch.zeros(0, device=device)  # of the last step
        # Before the last step, and after it. The next one must find the latter.
        self._ages_before = self._ages = torch.zeros(len(at), dtype=torch.int32, device=device)
        self._found: dict[str, Tensor] = {}
        self._left: dict[str, Tensor] = {}
        self._changed: dict[str, Tensor] = {}

    def before(self, gradient: Tensor) -> None:
        """Read the gradient of a bucket that is about to be averaged."""
        if self._factors:
            self._gradient = gradient.index_select(0, self._at)

    def after(self, mean: Tensor, slots: Mapping[str, Both], ratios: Mapping[str, float]) -> None:
        """Read the mean that a step applies, and the slots.

        Args:
            mean: 1-D.
            slots: their values before and after it.
            ratios: by parameter name, what the residual was multiplied by since the last step.
        """
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
        """Expect that a step has found the residual multiplied by ratios."""
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
        """Evaluate the steps that were read."""
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
        """Return three numbers for each parameter, of its elements.

        How many wait for at least `age` steps; how many wait or were sent; in how many slots a step
        has found another value than the last one has left, since the last call.
        """
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
        """The last step is undone for these parameters: their state stays as it was before it."""
        chosen = [name in names for name in self._names]
        if any(chosen):
            self._evaluate()
            undone = host.copy_to(torch.tensor(chosen), self._device)
            self._ages = torch.where(undone[self._owner], self._ages_before, self._ages)
            for name, found in self._found.items():
                is_undone = undone[self._slots[name][1]]
                self._left[name] = torch.where(is_undone, found, self._left[name])


def _aged(ages: Tensor, waits: Tensor, sent: Tensor) -> Tensor:
    """Return how long elements have waited after some steps.

    `waits` and `sent` have a row for each: where a residual is left, and where it was sent.
    """
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
        if size > MOST:
            # By name alone, so that all ranks and all buckets follow the same elements.
            key = Key(0).of_tensor(name).shared()
            runs = torch.from_numpy(key.choice(size // _RUN, MOST // _RUN, replace=False))
            drawn = (runs.sort().values[:, None] * _RUN + torch.arange(_RUN)).flatten()
        at.append(drawn + start)
        owner.append(torch.full((len(drawn),), i))
    return torch.cat(at), torch.cat(owner)
