"""Loss and accuracy over all ranks, and the averaged model that is evaluated and saved."""

import copy
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import torchcomp
from recipes.image_data.batches import Batches
from recipes.optimizers import autocast
from recipes.random_state import random_state, set_random_state
from recipes.settings import Settings


@dataclass
class Meter:
    """Running sums of loss, correct predictions and images, in this order."""

    sums: Tensor

    @classmethod
    def zeros(cls, device: torch.device) -> "Meter":
        # float64, because float32 stops counting single images at 16.8 million.
        return cls(torch.zeros(3, dtype=torch.float64, device=device))

    def add(self, loss: Tensor, scores: Tensor, targets: Tensor) -> None:
        """Add one batch, whose mean loss is ``loss``."""
        labels = targets if targets.ndim == 1 else targets.argmax(1)
        correct = (scores.argmax(1) == labels).sum()
        count = torch.tensor(float(len(labels)), device=self.sums.device)
        # The sums stay on the device. `.item()` would wait for the GPU at every step.
        self.sums += torch.stack([loss.detach().double() * count, correct.double(), count.double()])

    def all_reduce(self) -> tuple[float, float]:
        """Return mean loss and accuracy over the images of all ranks."""
        total = self.sums.clone()
        dist.all_reduce(total)
        loss, correct, count = total.tolist()
        return loss / count, correct / count


class Evaluator:
    """Evaluates the average of the ranks' models, in a copy: :attr:`averaged`.

    Inside a round of local steps, the weights differ between ranks. Batch normalisation's running
    statistics always do.
    """

    def __init__(
        self,
        settings: Settings,
        batches: Batches,
        module: nn.Module,
        *,
        memory_format: torch.memory_format,
        device: torch.device,
        world_size: int,
    ) -> None:
        self.averaged = copy.deepcopy(module)
        self._settings, self._batches, self._format = settings, batches, memory_format
        self._device, self._world_size = device, world_size

    def evaluate(self, module: nn.Module, next_epoch: int) -> tuple[float, float]:
        """Average the models and return the loss and accuracy on the whole test set."""
        self._average(module, next_epoch)
        return self._test()

    def _average(self, module: nn.Module, next_epoch: int) -> None:
        average_models(module, self.averaged, self._world_size)
        if not self._reestimates_batchnorm():
            return
        # Dropout draws from the global generators. Training must continue as if it had not.
        before = random_state()
        with autocast(self._settings, self._device):
            images = self._training_images(next_epoch)
            torchcomp.reestimate_batchnorm(self.averaged, images, self._settings.bn_images)
        set_random_state(before)

    def _reestimates_batchnorm(self) -> bool:
        # The mean of running statistics of different weights fits none of them, nor the average.
        # With gradients averaged in every step the weights are equal, and the mean is enough.
        if self._settings.sync == "none" or not self._settings.bn_images:
            return False
        return any(isinstance(layer, _BatchNorm) for layer in self.averaged.modules())

    def _training_images(self, epoch: int) -> Iterator[Tensor]:
        for later in itertools.count(epoch):
            for images, _ in self._batches.train(later, 0):
                yield from images.clone(memory_format=self._format).chunk(self._settings.accumulate)

    @torch.no_grad()
    def _test(self) -> tuple[float, float]:
        self.averaged.eval()
        meter = Meter.zeros(self._device)
        for images, labels in self._batches.test():
            with autocast(self._settings, self._device):
                scores = self.averaged(images.clone(memory_format=self._format))
            # Without label smoothing, and in float32, so that runs can be compared.
            meter.add(nn.functional.cross_entropy(scores.float(), labels), scores, labels)
        return meter.all_reduce()


@torch.no_grad()
def average_models(module: nn.Module, averaged: nn.Module, world_size: int) -> None:
    """Write the mean over all ranks of the parameters and buffers of ``module`` to ``averaged``."""
    # Integer buffers, such as BatchNorm's num_batches_tracked, have no mean: they are copied.
    averaged.load_state_dict(module.state_dict())
    values = [value for value in averaged.state_dict().values() if value.is_floating_point()]
    flat = torch.cat([value.reshape(-1) for value in values])
    dist.all_reduce(flat)
    flat /= world_size
    for value, mean in zip(values, flat.split([v.numel() for v in values]), strict=True):
        value.copy_(mean.view(value.shape))


def sha256_of(tensors: dict[str, Tensor]) -> str:
    """Return a hash of all names and of every bit of all tensors."""
    result = hashlib.sha256()
    for name, value in tensors.items():
        result.update(name.encode())
        # NumPy has no bfloat16, so the tensor is read as bytes.
        result.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return result.hexdigest()


def parameters_are_equal(module: nn.Module, world_size: int) -> bool:
    """Return whether all ranks have the same parameters, bit for bit."""
    own = sha256_of({name: value.detach() for name, value in module.named_parameters()})
    hashes: list[str | None] = [None] * world_size
    dist.all_gather_object(hashes, own)
    return len(set(hashes)) == 1
