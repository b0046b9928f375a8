"""Key: the source of all randomness. Equal keys draw equal numbers, on any rank, in any run."""

import zlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from torchcomp.specs.checks import is_whole, shown
from torchcomp.specs.errors import SpecError


@dataclass(frozen=True)
class Key:
    """The address of one random draw."""

    seed: int  # the run's seed, equal on all ranks
    step: int = 0  # index of the exchange
    tensor: int = 0  # identifies the vector within the step (see :func:`tensor_id`)
    rank: int = 0  # rank that draws; ignored by :meth:`shared`

    def of_tensor(self, name: str) -> "Key":
        """Return this key for the vector of this name."""
        return Key(self.seed, self.step, tensor_id(name), self.rank)

    def shared(self) -> np.random.Generator:
        """Return a generator that draws the same numbers on every rank."""
        return _generator(self.seed, self.step, self.tensor)

    def private(self) -> np.random.Generator:
        """Return a generator whose draws are independent between ranks."""
        # One number more than `shared`, so that no rank draws the shared numbers. Use rank + 1:
        # SeedSequence pads with zeros, so [seed, step, tensor, 0] equals [seed, step, tensor].
        return _generator(self.seed, self.step, self.tensor, self.rank + 1)


@lru_cache(maxsize=4096)
def tensor_id(name: str) -> int:
    """Return a number for a parameter name, the same in all processes."""
    return zlib.crc32(name.encode())


def _generator(*entropy: int) -> np.random.Generator:
    # docs/wire.md specifies these draws, because RandK sends no indices: do not change them.
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


def check_seed(seed: object) -> int:
    """Require a seed that keys can use. Return it as an int, which checkpoints can contain."""
    if not is_whole(seed) or not 0 <= seed < 2**63:
        raise SpecError(f"seed must be an integer from 0 to 2^63 - 1, not {shown(seed)}")
    return int(seed)
