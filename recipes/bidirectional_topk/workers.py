"""The compared methods, and many workers that train by one of them, written out for one process.

100 workers take a step in 50 ms. A test compares them with one :class:`torchcomp.Averager` each.
All residuals are rows of one matrix, and nothing is encoded or sent.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from torchcomp.compressors import TopK
from torchcomp.compressors.base import Vectors

# Workers whose gradients are computed together. More would not fit into the cache.
_TOGETHER = 25


@dataclass(frozen=True)
class Method:
    up: bool  # whether each worker sends the K largest entries of its gradient plus its residual
    down: bool  # whether the server sends the K largest entries of the mean plus its residual

    def spec(self, ratio: float, selection: str = "exact") -> str:
        """Return the method as torchcomp's spec string, for K = ``ratio`` times d."""
        topk = f'topk({ratio:g}, scope="model")'
        if self.down:
            return (
                f'bidirectional({topk if self.up else "identity"}, {topk}, selection="{selection}")'
            )
        # Both routes of error feedback give the same result. The all-gather is faster to simulate.
        return f'ef({topk}, exchange="allgather")' if self.up else "mean"


METHODS = {
    "dense": Method(up=False, down=False),
    "unidirectional": Method(up=True, down=False),
    "bidirectional": Method(up=True, down=True),
    "downlink only": Method(up=False, down=True),
}


class SerialWorkers:
    """``count`` workers and a server that train one model with plain SGD."""

    def __init__(self, model: nn.Module, method: Method, count: int, ratio: float) -> None:
        self.model, self.method, self.count = model, method, count
        self.weights = parameters_to_vector(model.parameters()).detach()
        vector_to_parameters(self.weights, model.parameters())  # which are then views of it
        d = self.weights.numel()
        self._topk = TopK(ratio)
        self.k = self._topk.kept(d)
        self.union = 0  # entries that at least one worker sent in the last step
        self.residuals = torch.zeros(count if method.up else 0, d)
        self.server_residual = torch.zeros(d)
        # A step writes the new residuals here, because the selection also reads the old ones.
        self._after = torch.empty_like(self.residuals)
        self._server_after = torch.empty(d)
        # The selection is faster if it knows the threshold of the same worker's last step.
        self._vectors = [Vectors.of(self._topk, d) for _ in range(count + 1)]
        self._gradients_of = _gradients_of_each(model)

    def step(self, images: Tensor, labels: Tensor, lr: float) -> bool:
        """Take a step on images (N, batch, C, H, W) and labels (N, batch), if it is finite."""
        update = self._uplink(images, labels) if self.method.up else self._mean(images, labels)
        if self.method.down:
            update = self._downlink(update)
        if not bool(update.isfinite().all()):
            return False
        self.weights.add_(update, alpha=-lr)
        return True

    def _uplink(self, images: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros_like(self.weights)
        sent = torch.zeros_like(self.weights, dtype=torch.bool)
        for first in range(0, self.count, _TOGETHER):
            some = slice(first, first + _TOGETHER)
            for rank, gradient in enumerate(self._gradients_of(images[some], labels[some]), first):
                after = self._after[rank]
                chosen = self._topk.select_sum(
                    gradient, self.residuals[rank], after, self._vectors[rank]
                )
                total[chosen] += after[chosen] / self.count
                after[chosen] = 0.0
                sent[chosen] = True
        self.residuals, self._after = self._after, self.residuals
        self.union = int(sent.sum())
        return total

    def _mean(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean gradient, which is that of all images: the batches are of equal size."""
        return self._gradients_of(images.flatten(0, 1)[None], labels.flatten()[None])[0]

    def _downlink(self, mean: Tensor) -> Tensor:
        after = self._server_after
        chosen = self._topk.select_sum(mean, self.server_residual, after, self._vectors[-1])
        message = torch.zeros_like(after)
        message[chosen] = after[chosen]
        after[chosen] = 0.0
        self.server_residual, self._server_after = after, self.server_residual
        return message


def _gradients_of_each(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function from the batches of some workers to their gradients, one in each row."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        scores: Tensor = torch.func.functional_call(model, parameters, (images,))
        return cross_entropy(scores, labels)

    of_each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def gradients(images: Tensor, labels: Tensor) -> Tensor:
        found: dict[str, Tensor] = of_each(parameters, images, labels)
        return torch.cat([found[name].flatten(1) for name in parameters], 1)

    return gradients
