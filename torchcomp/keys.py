"""Key: where all randomness comes from.

A compressor never touches a global random generator. What it draws is a function of a key, so two
ranks that hold the same key draw the same numbers, and a resumed run draws what it would have.
"""

import zlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from torchcomp.checks import is_whole
from torchcomp.errors import SpecError


@dataclass(frozen=True)
class Key:
    """The address of one random draw."""

    seed: int  # the run's seed, equal on all ranks
    step: int = 0  # number of exchanges before this one
    tensor: int = 0  # identifies the vector within the step (see :func:`tensor_id`)
    rank: int = 0  # the drawing rank; ignored by draws that all ranks share

    def of_tensor(self, name: str) -> "Key":
        """The same key for another vector."""
        return Key(self.seed, self.step, tensor_id(name), self.rank)

    def shared(self) -> np.random.Generator:
        """A generator in the same state on every rank."""
        return _generator(self.seed, self.step, self.tensor)

    def private(self) -> np.random.Generator:
        """A generator whose draws are independent between ranks."""
        return _generator(self.seed, self.step, self.tensor, self.rank + 1)


@lru_cache(maxsize=4096)
def tensor_id(name: str) -> int:
    """A number for a parameter name, the same in every process (unlike Python's ``hash``)."""
    return zlib.crc32(name.encode())


def _generator(*entropy: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


def check_seed(seed: object) -> None:
    """Require a seed that can be hashed into keys."""
    if not is_whole(seed) or not 0 <= seed < 2**63:
        raise SpecError(f"seed must be a whole number from 0 to 2^63 - 1, not {seed!r}")
