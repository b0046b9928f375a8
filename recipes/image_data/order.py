"""Which images a rank sees at which step: pure functions of seed, epoch, step and rank.

One permutation of the training set an epoch. Step s of the epoch takes entries s*B to (s+1)*B of
it, B being the batch over all ranks; every rank takes its own slice of those, and what is left at
the end of the epoch is dropped. So a step sees the same images whatever the number of ranks.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from recipes.errors import RecipeError

Indices = npt.NDArray[np.int64]

# The first word of every key, so that no two uses of a seed share random numbers.
ORDER, AUGMENT, CROP, NOISE, RANDAUGMENT, MIXUP = 1, 2, 3, 4, 5, 6


def keyed_seed(*key: int) -> int:
    """Return a seed of 63 bits that depends on every number in ``key``."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))


@dataclass(frozen=True)
class TrainOrder:
    """The order of the training set for one rank."""

    samples: int
    batch_size: int
    rank: int
    ranks: int
    seed: int

    def __post_init__(self) -> None:
        if self.ranks > self.samples:
            raise RecipeError(
                f"{self.ranks} ranks are more than the {self.samples} training images: every "
                "rank needs at least one per step"
            )
        if self.batch_size % self.ranks:
            raise RecipeError(
                f"--batch-size {self.batch_size} cannot be divided by {self.ranks} ranks: it "
                "counts the images of all ranks, and every rank takes as many"
            )
        if self.batch_size > self.samples:
            raise RecipeError(
                f"--batch-size {self.batch_size} exceeds the {self.samples} training images: an "
                "epoch would have no step"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Number of whole batches in an epoch."""
        return self.samples // self.batch_size

    @property
    def mine(self) -> slice:
        """This rank's part of every batch."""
        share = self.batch_size // self.ranks
        return slice(self.rank * share, (self.rank + 1) * share)

    def batches(self, epoch: int, first_step: int = 0) -> Indices:
        """Return this rank's images, a row per step, from ``first_step`` to the epoch's end."""
        rng = np.random.default_rng((ORDER, self.seed, epoch))
        whole = rng.permutation(self.samples)[: self.steps_per_epoch * self.batch_size]
        rows: Indices = whole.reshape(self.steps_per_epoch, self.batch_size)[first_step:, self.mine]
        return rows


def test_shard(samples: int, rank: int, ranks: int) -> Indices:
    """Return the test images of one rank; the shards are disjoint and leave none out."""
    if ranks > samples:
        raise RecipeError(f"{ranks} ranks are more than the {samples} test images")
    return np.arange(rank, samples, ranks)
