"""MixUp: convex combinations of images and of their labels, reproducible from (seed, epoch, step).

Zhang, Cisse, Dauphin, Lopez-Paz, "mixup: beyond empirical risk minimization", ICLR 2018.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from recipes.image_data.order import MIXUP, TrainOrder


@dataclass(frozen=True)
class MixUp:
    """Mixes the two images of every pair of neighbours in the batch, whose order is random.

    The share of the other image is drawn from Beta(alpha, alpha) for each image, as in the paper's
    equation. A rank has whole pairs (an even number of images), and shares are drawn for the batch
    of all ranks, so an image is mixed alike whatever the number of ranks.
    """

    alpha: float
    classes: int
    order: TrainOrder

    def __call__(
        self, images: Tensor, labels: Tensor, epoch: int, step: int
    ) -> tuple[Tensor, Tensor]:
        """Mix images (N, ...) and turn labels (N) into probabilities (N, classes)."""
        if not self.alpha:
            return images, labels
        shares = self.shares(epoch, step).to(images)
        targets = one_hot(labels, self.classes).to(images.dtype)
        return _mixed(images, shares), _mixed(targets, shares)

    def shares(self, epoch: int, step: int) -> Tensor:
        """Return the share (N) of the other image in each of this rank's, at most one half."""
        random = np.random.default_rng((MIXUP, self.order.seed, epoch, step))
        drawn = random.beta(self.alpha, self.alpha, self.order.batch_size)
        return torch.from_numpy(np.minimum(drawn, 1 - drawn)[self.order.mine])


def _mixed(values: Tensor, shares: Tensor) -> Tensor:
    others = values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
    return values.lerp(others, shares.view(-1, *[1] * (values.ndim - 1)))
