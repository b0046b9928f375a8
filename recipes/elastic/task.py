"""The task: a small network learns the answers of another one, from samples that are drawn anew.

The batch of a step depends on the seed and on the step alone, so a run with any number of ranks
sees the same samples. Everything is float64, so that nothing but rounding hides a lost gradient.
"""

import math

import torch
from torch import Tensor, nn

from recipes.image_data.order import keyed_seed

_INPUTS, _HIDDEN, _CLASSES = 32, 128, 10
_STUDENT, _TEACHER, _BATCH = range(3)
"""What is drawn, as a part of the seed."""


def student(seed: int) -> nn.Module:
    """Return the network that is trained."""
    return _network(keyed_seed(_STUDENT, seed))


class Samples:
    """The samples of all steps.

    Args:
        seed: of the teacher and the samples.
        count: samples per step, of all ranks together.
    """

    def __init__(self, seed: int, count: int) -> None:
        self._seed, self._count = seed, count
        self._teacher = _network(keyed_seed(_TEACHER, seed)).requires_grad_(False)

    def share(self, step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        """Return a rank's inputs and targets of a step."""
        generator = torch.Generator().manual_seed(keyed_seed(_BATCH, self._seed, step))
        shape = (self._count, _INPUTS)
        inputs = torch.randn(shape, generator=generator, dtype=torch.float64)[rank::world_size]
        return inputs, self._teacher(inputs).argmax(1)


def lr_factor(step: int, steps: int) -> float:
    """Return the learning rate of a step relative to the first one: half a cosine."""
    return (1 + math.cos(math.pi * step / steps)) / 2


def _network(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Linear(_INPUTS, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, _CLASSES)
        return nn.Sequential(*layers).double()
