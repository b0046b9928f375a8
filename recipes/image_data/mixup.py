"""MixUp: convex combinations of images and of their labels, reproducible from (seed, epoch, step).

Source: Zhang, Cisse, Dauphin, Lopez-Paz, "mixup: beyond empirical risk minimization", ICLR 2018.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from recipes.image_data.order import MIXUP, TrainOrder


@dataclass(frozen=True)
class MixUp:
    """Mixes each image of a batch with another image of the same rank.

    The other image's share is min(z, 1 - z), with z drawn from Beta(alpha, alpha); an alpha of 0
    disables MixUp.

    - ``shares="image"``: a share for each image, as in the paper's equation. Images 0 and 1, 2 and
      3, and so on are mixed with each other; the batch is in random order. A rank's batch must have
      an even number of images. The result does not depend on the number of ranks.
    - ``shares="micro-batch"``: a share for each micro-batch, whose images are mixed in a random
      permutation. An image can meet itself. The code of Gu et al., ICLR 2024 (arXiv 2310.14423),
      does this with the MixUp of MosaicML's Composer 0.15.1 (github.com/hmgxr128/QSR,
      ``xmodel.py``). The result depends on the size of a micro-batch, and so on the number of
      ranks: 16 ranks with 2 micro-batches each and 32 ranks with 1 give the same.
    """

    alpha: float
    classes: int
    order: TrainOrder
    shares: str = "image"
    micro_batches: int = 1

    def __call__(
        self, images: Tensor, labels: Tensor, epoch: int, step: int
    ) -> tuple[Tensor, Tensor]:
        """Return mixed images (N, ...) and probabilities (N, classes); labels have shape (N)."""
        if not self.alpha:
            return images, labels
        shares, others = self.draw(epoch, step)
        shares, others = shares.to(images), others.to(images.device)
        targets = one_hot(labels, self.classes).to(images.dtype)
        return _mix(images, shares, others), _mix(targets, shares, others)

    def draw(self, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        """Return, for each image of this rank, the other image's share and its index: (N), (N)."""
        # Every rank draws for the images of all ranks, and uses its slice.
        random = np.random.default_rng((MIXUP, self.order.seed, epoch, step))
        batch, own = self.order.batch_size, self.order.rank_slice
        if self.shares == "image":
            drawn, others = random.beta(self.alpha, self.alpha, batch), np.arange(batch) ^ 1
        else:
            count = self.order.world_size * self.micro_batches
            size = batch // count
            drawn = random.beta(self.alpha, self.alpha, count).repeat(size)
            others = random.permuted(np.arange(batch).reshape(count, size), axis=1).flatten()
        # Beta(alpha, alpha) is symmetric. The smaller part goes to the other image.
        smaller = np.minimum(drawn, 1 - drawn)
        return torch.from_numpy(smaller[own]), torch.from_numpy(others[own] - own.start)


def _mix(values: Tensor, shares: Tensor, others: Tensor) -> Tensor:
    return values.lerp(values[others], shares.view(-1, *[1] * (values.ndim - 1)))
