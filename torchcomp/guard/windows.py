"""Windows: the part of each parameter that a comparison looks at.

Of a small parameter, that is all of it. Of a large one, it is a window of elements, another one in
each comparison, so that a comparison is cheap and several of them see everything.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from torchcomp import host
from torchcomp.bucket import BucketShape
from torchcomp.guard.samples import filled
from torchcomp.keys import tensor_id

MOST = 2**14
"""At most this many elements of a parameter are compared."""


@dataclass(frozen=True)
class Windows:
    """The windows of the parameters of a bucket that have any elements, one after another.

    Attributes:
        starts: first element of each window, within the bucket.
        sizes: number of elements of each window.
        whole: number of elements of each parameter.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        """Number of elements of all windows."""
        return sum(self.sizes)

    def cut(self, flat: Tensor) -> Tensor:
        """Return the windows of a bucket's values, as a copy."""
        return torch.cat(
            [flat.narrow(0, *each) for each in zip(self.starts, self.sizes, strict=True)]
        )

    def place(self, values: Tensor, start: int) -> Tensor:
        """Return the windows of values that a bucket has from `start` on, and zeros elsewhere."""
        stop, out = start + values.numel(), values.new_zeros(self.numel)
        places = accumulate(self.sizes, initial=0)
        for first, size, place in zip(self.starts, self.sizes, places, strict=False):
            low, high = max(first, start), min(first + size, stop)
            if low < high:
                out.narrow(0, place + low - first, high - low).copy_(
                    values[low - start : high - start]
                )
        return out

    def factors(self, device: torch.device) -> Tensor:
        """Return how many times as large as its window each parameter is."""
        return _factors(self.sizes, self.whole, device)


@lru_cache(maxsize=1024)
def windows(shape: BucketShape, number: int) -> Windows:
    """Return the windows of a bucket in a comparison.

    Args:
        shape: of the bucket.
        number: of the comparison, at most that of the steps.
    """
    names, whole = filled(shape)
    starts, sizes = [], []
    for name, size, begin in zip(names, whole, accumulate(whole, initial=0), strict=False):
        count = -(-size // MOST)
        # By name, so that the windows of equal layers are at different places.
        place = (number + tensor_id(name)) % count
        # The last window ends with the parameter.
        starts.append(begin + min(place * MOST, max(0, size - MOST)))
        sizes.append(min(size, MOST))
    return Windows(tuple(starts), tuple(sizes), whole)


@lru_cache(maxsize=1024)
def _factors(sizes: tuple[int, ...], whole: tuple[int, ...], device: torch.device) -> Tensor:
    return host.copy_to(torch.tensor(whole) / torch.tensor(sizes), device)
