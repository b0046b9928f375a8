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
    """Mixes images 0 and 1 of a batch, images 2 and 3, and so on. The batch is in random order.

    The share of the other image is drawn from Beta(alpha, alpha) separately for each image, as in
    the paper's equation. A rank's batch must have an even number of images. Every rank draws the
    shares of all ranks' images, so the result does not depend on the number of ranks.

    Attributes:
        alpha: of the Beta distribution; 0 disables MixUp.
        classes: number of classes.
        order: which images this rank gets.
    """

    alpha: float
    classes: int
    order: TrainOrder

    def __call__(
        self, images: Tensor, labels: Tensor, epoch: int, step: int
    ) -> tuple[Tensor, Tensor]:
        """Return mixed images (N, ...) and probabilities (N, classes); labels have shape (N)."""
        if not self.alpha:
            return images, labels
        shares = self.shares(epoch, step).to(images)
        targets = one_hot(labels, self.classes).to(images.dtype)
        return _mix(images, shares), _mix(targets, shares)

    def shares(self, epoch: int, step: int) -> Tensor:
        """Return the other image's share, at most 0.5, for each image of this rank (N)."""
        random = np.random.default_rng((MIXUP, self.order.seed, epoch, step))
        drawn = random.beta(self.alpha, self.alpha, self.order.batch_size)
        # Beta(alpha, alpha) is symmetric. The smaller part goes to the other image.
        return torch.from_numpy(np.minimum(drawn, 1 - drawn)[self.order.rank_slice])


def _mix(values: Tensor, shares: Tensor) -> Tensor:
    # The members of each pair (0, 1), (2, 3), ... swapped.
    others = values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
    return values.lerp(others, shares.view(-1, *[1] * (values.ndim - 1)))
