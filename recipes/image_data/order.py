"""Which images a rank gets at which step: a pure function of seed, epoch, step and rank.

Each epoch has one permutation of the training set. Step s takes its entries s*B to (s+1)*B, where
B is the batch size over all ranks, and each rank takes its slice of them. The images of a step do
not depend on the number of ranks. Images that do not fill a batch are dropped.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from recipes.errors import RecipeError

Indices = npt.NDArray[np.int64]

# The first part of every key, so that no two uses of a seed get the same random numbers.
ORDER, AUGMENT, CROP, NOISE, RANDAUGMENT, MIXUP, SPLIT = 1, 2, 3, 4, 5, 6, 7


def keyed_seed(*key: int) -> int:
    """Return a 63-bit seed that depends on every number in ``key``."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))


@dataclass(frozen=True)
class TrainOrder:
    """The order of the training images for one rank; ``batch_size`` is that of all ranks."""

    samples: int
    batch_size: int
    rank: int
    world_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.world_size > self.samples:
            raise RecipeError(
                f"{self.world_size} ranks are too many for {self.samples} training images: every "
                "rank needs at least one per step"
            )
        # With unequal slices, the mean over the ranks would not be the mean over the images.
        if self.batch_size % self.world_size:
            raise RecipeError(
                f"--batch-size {self.batch_size} must be a multiple of {self.world_size} ranks: it "
                "counts the images of all ranks"
            )
        if self.batch_size > self.samples:
            raise RecipeError(
                f"--batch-size must be at most the {self.samples} training images, found "
                f"{self.batch_size}"
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // self.batch_size

    @property
    def rank_slice(self) -> slice:
        per_rank = self.batch_size // self.world_size
        return slice(self.rank * per_rank, (self.rank + 1) * per_rank)

    def batches(self, epoch: int, first_step: int = 0) -> Indices:
        """Return the indices of this rank's images, one row per step from ``first_step`` on."""
        # NumPy seeds a generator from several numbers, so epochs need no state between them.
        rng = np.random.default_rng((ORDER, self.seed, epoch))
        whole = rng.permutation(self.samples)[: self.steps_per_epoch * self.batch_size]
        rows: Indices = whole.reshape(self.steps_per_epoch, self.batch_size)[
            first_step:, self.rank_slice
        ]
        return rows


def test_shard(samples: int, rank: int, world_size: int) -> Indices:
    """Return the indices of one rank's test images. Each test image is in exactly one shard."""
    if world_size > samples:
        raise RecipeError(
            f"{world_size} ranks are too many for {samples} test images: every rank needs at "
            "least one"
        )
    # Shards can differ by one image. The sums of Meter.all_reduce() take that into account.
    return np.arange(rank, samples, world_size)
