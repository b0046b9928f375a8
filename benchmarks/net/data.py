"""scikit-learn's handwritten digits: 1,437 training images and 360 test images."""

from dataclasses import dataclass

import torch
from torch import Tensor

CLASSES = 10
_TEST = 360


@dataclass(frozen=True)
class Images:
    """Images (N, 1, size, size) with mean 0 and standard deviation 1, and their labels."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.images[rows], self.labels[rows]


def digits(size: int) -> tuple[Images, Images]:
    """Training and test images, enlarged from 8 pixels to `size`. The split is always the same."""
    # The images are part of the package, so no download is needed.
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8)
    images = torch.nn.functional.interpolate(images, (size, size))
    images = (images - images.mean()) / images.std()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    every = Images(images[order], torch.from_numpy(labels).long()[order])
    train, test = torch.arange(_TEST, len(every)), torch.arange(_TEST)
    return Images(*every.take(train)), Images(*every.take(test))


def shard(data: Images, batch: int, rank: int, world: int, step: int, seed: int) -> Tensor:
    """The rows of this rank in a step. A rank trains on every `world`-th image only."""
    own = torch.arange(rank, len(data), world)
    epoch, batch_index = divmod(step, len(data) // world // batch)
    # Distinct factors give every seed, epoch and rank its own order.
    generator = torch.Generator().manual_seed(1_000_003 * seed + 1_009 * epoch + rank)
    order = torch.randperm(len(own), generator=generator)
    return own[order[batch_index * batch : (batch_index + 1) * batch]]
