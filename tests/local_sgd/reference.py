"""Local steps as in torchcomp.reference, on K copies of the model of these tests."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from tests.local_sgd.script import batch, loss_of, mlp
from tests.support.models import seeded
from torchcomp import reference
from torchcomp.reference import Length, Synchronise, Weights, means_of, share, top

Update = Callable[[Weights, Weights, float], None]


class Momentum:
    """SGD with momentum 0.9 and weight decay 0.01; a class, because tests copy workers."""

    def __init__(self) -> None:
        self.velocity: Weights = []

    def __call__(self, weights: Weights, gradients: Weights, lr: float) -> None:
        for index, (w, g) in enumerate(zip(weights, gradients, strict=True)):
            g = g + 0.01 * w
            if index == len(self.velocity):
                # torch.optim.SGD starts the momentum buffer at the first gradient, not at 0.
                self.velocity.append(g.clone())
            else:
                self.velocity[index] = 0.9 * self.velocity[index] + g
            w -= lr * self.velocity[index]


class Worker:
    """One of the K copies, with its own optimizer state."""

    def __init__(self, rank: int, update: Update) -> None:
        self.rank = rank
        self.module = seeded(mlp())
        self.update = update

    @property
    def weights(self) -> Weights:
        return [parameter.data for parameter in self.module.parameters()]

    def step(self, step: int, lr: float) -> None:
        self.update(self.weights, self._gradients(step), lr)

    def _gradients(self, step: int) -> Weights:
        parameters: list[nn.Parameter] = list(self.module.parameters())
        return list(torch.autograd.grad(loss_of(self.module, *batch(self.rank, step)), parameters))


def local_opt(
    workers: int,
    total: int,
    *,
    update: Callable[[], Update],
    rule: Length,
    lr: Callable[[int], float],
    skipped: frozenset[tuple[int, int]] = frozenset(),
    synchronise: Synchronise | None = None,
) -> Iterator[tuple[list[Tensor], bool]]:
    """Each worker's weights after every step, and whether they have just been averaged.

    `update` makes one worker's optimizer. `synchronise` ends a round; the default is the average.
    """
    crew = [Worker(rank, update()) for rank in range(workers)]
    ends = synchronise or reference.average
    for weights, averaged in reference.local_sgd(crew, total, rule, lr, ends, skipped):
        yield [torch.cat([w.flatten() for w in own]) for own in weights], averaged


def slowmo(beta: float, alpha: float) -> Synchronise:
    """Lines 6 to 8 of SlowMo's Algorithm 1 (arXiv 1910.00643), with the average as line 6."""
    x = [p.detach().clone() for p in seeded(mlp()).parameters()]
    u = [torch.zeros_like(w) for w in x]

    def synchronise(crew: list[Worker], gamma: float) -> None:
        for index, mean in enumerate(means_of(crew)):
            # Lines 7 and 8; x - mean is minus the mean pseudo-gradient.
            u[index] = beta * u[index] + (x[index] - mean) / gamma
            x[index] = x[index] - alpha * gamma * u[index]
        share(crew, x)

    return synchronise


def diloco(lr: float, momentum: float) -> Synchronise:
    """Lines 12 and 14 of DiLoCo's Algorithm 1 (arXiv 2311.08105), with PyTorch's Nesterov SGD."""
    theta = [p.detach().clone() for p in seeded(mlp()).parameters()]
    outer = torch.optim.SGD(theta, lr=lr, momentum=momentum, nesterov=momentum > 0)

    def synchronise(crew: list[Worker], local_lr: float) -> None:
        for shared, mean in zip(theta, means_of(crew), strict=True):
            shared.grad = shared - mean  # line 12
        outer.step()  # line 14
        share(crew, theta)

    return synchronise


def ef_topk(workers: int, k: int) -> Synchronise:
    """Error feedback with the k largest entries of each tensor of a worker's pseudo-gradient."""
    x = [p.detach().clone() for p in seeded(mlp()).parameters()]
    residuals = [[torch.zeros_like(w) for w in x] for _ in range(workers)]

    def synchronise(crew: list[Worker], local_lr: float) -> None:
        for index in range(len(x)):
            total = torch.zeros_like(x[index])
            for worker, residual in zip(crew, residuals, strict=True):
                wanted = worker.weights[index] - x[index] + residual[index]
                sent = top(wanted, k)
                residual[index] = wanted - sent
                total += sent
            x[index] = x[index] + total / len(crew)
        share(crew, x)

    return synchronise
