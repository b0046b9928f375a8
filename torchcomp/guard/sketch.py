"""Sketch: short vectors that can be added, and whose norms are about those of long ones.

Each element of a vector gets a random sign. The signed elements are written into rows of `width`
elements, and the rows are added. A sketch is linear: that of a mean over the ranks is the mean of
the ranks' sketches. The expected square of its norm is that of the vector. The relative standard
deviation is at most ``sqrt(2 * sum(s**2))``, where ``s`` are the columns' shares of the vector's
squared norm. If these are even, it is ``sqrt(2 / width)``.

Reference: Charikar, Chen, Farach-Colton, "Finding frequent items in data streams", ICALP 2002.
Here, the column of an element is its index modulo `width`: only signs are random.
"""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from torchcomp import host

# The sign of an element is the product of two: one of its row, and one that repeats after this many
# elements. Signs of rows alone would not do: the gradient of a linear layer has a low rank, and its
# columns would be added with the same signs. A prime, so that it fits no row of a weight.
_PERIOD = 4093


class Sketch:
    """Sketches the parts of a bucket.

    Args:
        names: of the parts.
        sizes: number of elements of each part.
        width: number of columns.
        seed: of the signs. Equal on ranks whose sketches are added.
        dtype: dtype of the sketches.
        device: of the bucket.
    """

    def __init__(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        width: int,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.sizes, self.width = list(sizes), width
        self._period = host.copy_to(_signs(f"{seed}", _PERIOD).to(dtype), device)
        self._rows = [
            host.copy_to(_signs(f"{seed} {name}", size // width).to(dtype), device)
            for name, size in zip(names, sizes, strict=True)
        ]

    def __call__(self, flat: Tensor) -> Tensor:
        """Return a row of `width` numbers for each part of `flat` (1-D, of the sketch's dtype)."""
        signed = torch.empty_like(flat)
        whole = flat.numel() // _PERIOD * _PERIOD
        for span in (slice(0, whole), slice(whole, None)):
            part = flat[span].view(-1, min(_PERIOD, flat[span].numel() or 1))
            torch.mul(part, self._period[: part.shape[1]], out=signed[span].view(part.shape))
        sketches = self.zeros()
        parts = torch.split(signed, self.sizes)
        for sketch, part, signs in zip(sketches, parts, self._rows, strict=True):
            end = signs.numel() * self.width
            if end:
                torch.mv(part[:end].view(-1, self.width).T, signs, out=sketch)
            if end < part.numel():
                sketch[: part.numel() - end].add_(part[end:])
        return sketches

    def zeros(self) -> Tensor:
        """Return the sketch of zeros."""
        return self._period.new_zeros(len(self.sizes), self.width)


def _signs(seed: str, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    return torch.randint(0, 2, (count,), generator=generator) * 2 - 1
