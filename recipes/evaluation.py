"""What all ranks find out together: loss, accuracy and average of a model, and if they agree."""

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass
class Meter:
    """Sums over the images of an epoch: loss, correct answers, images."""

    sums: Tensor

    def add(self, loss: Tensor, scores: Tensor, targets: Tensor) -> None:
        """Add one batch, given its mean loss; the sums stay on their device.

        Of targets that are probabilities, the likeliest class is the correct answer.
        """
        labels = targets if targets.ndim == 1 else targets.argmax(1)
        correct = (scores.argmax(1) == labels).sum()
        count = torch.tensor(float(len(labels)), device=self.sums.device)
        self.sums += torch.stack([loss.detach().double() * count, correct.double(), count.double()])

    def over_ranks(self) -> tuple[float, float]:
        """Return mean loss and accuracy over the images of all ranks."""
        total = self.sums.clone()
        dist.all_reduce(total)
        loss, correct, count = total.tolist()
        return loss / count, correct / count


@torch.no_grad()
def average_into(twin: nn.Module, module: nn.Module, ranks: int) -> None:
    """Set ``twin`` to the average over ranks of ``module``, weights and buffers alike.

    In the middle of a round of local steps every rank has weights of its own, and batch statistics
    are each rank's own in any case; averaging them into a copy asks about one model, the one that
    a synchronisation now would give, and leaves the run as it is.
    """
    twin.load_state_dict(module.state_dict())
    averaged = [value for value in twin.state_dict().values() if value.is_floating_point()]
    flat = torch.cat([value.reshape(-1) for value in averaged])
    dist.all_reduce(flat)
    flat /= ranks
    for value, mean in zip(averaged, flat.split([v.numel() for v in averaged]), strict=True):
        value.copy_(mean.view(value.shape))


def digest(weights: dict[str, Tensor]) -> str:
    """Return a hash of every name and every bit."""
    result = hashlib.sha256()
    for name, value in weights.items():
        result.update(name.encode())
        result.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return result.hexdigest()


def replicas_agree(module: nn.Module, ranks: int) -> bool:
    """Whether all ranks hold the same parameters, bit for bit."""
    mine = digest({name: value.detach() for name, value in module.named_parameters()})
    everyones: list[str | None] = [None] * ranks
    dist.all_gather_object(everyones, mine)
    return len(set(everyones)) == 1
