"""Reference of Algorithm 2 of the QSR paper: K copies of a model in one process, in float64."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from tests.local_sgd.script import batch, loss_of, mlp
from tests.support.models import seeded

Weights = list[Tensor]
Update = Callable[[Weights, Weights, float], None]


class Momentum:
    """SGD with momentum 0.9 and weight decay 0.01.

    A class, because tests copy workers: a deep copy of a function would share its velocity.
    """

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


def adamw_update() -> Update:
    """AdamW with betas (0.9, 0.99), eps 1e-8 and weight decay 0.05."""
    moments: list[tuple[Tensor, Tensor]] = []
    count = 0

    def update(weights: Weights, gradients: Weights, lr: float) -> None:
        nonlocal count
        count += 1
        for index, (w, g) in enumerate(zip(weights, gradients, strict=True)):
            if index == len(moments):
                moments.append((torch.zeros_like(w), torch.zeros_like(w)))
            first, second = moments[index]
            first = 0.9 * first + 0.1 * g
            second = 0.99 * second + 0.01 * g * g
            moments[index] = first, second
            w *= 1 - lr * 0.05
            w -= lr * (first / (1 - 0.9**count)) / ((second / (1 - 0.99**count)).sqrt() + 1e-8)

    return update


def every(h: int) -> Callable[[int, float], int]:
    return lambda step, lr: h


def qsr(alpha: float, h_base: int, warmup: int) -> Callable[[int, float], int]:
    def rule(step: int, lr: float) -> int:
        return h_base if step < warmup else max(h_base, math.floor((alpha / lr) ** 2))

    return rule


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
    rule: Callable[[int, float], int],
    lr: Callable[[int], float],
    skipped: frozenset[tuple[int, int]] = frozenset(),
    synchronise: "Synchronise | None" = None,
) -> Iterator[tuple[list[Tensor], bool]]:
    """Each worker's weights after every step, and whether they have just been averaged.

    Args:
        workers: K.
        total: T.
        update: makes one worker's optimizer.
        rule: H of a round, from the number of steps before it and its first learning rate.
        lr: learning rate of a step, from the number of steps before it.
        skipped: (rank, step) pairs at which a worker skips its optimizer step.
        synchronise: ends a round, from the workers and the mean learning rate of its steps. The
            default is :func:`average`.
    """
    crew = [Worker(rank, update()) for rank in range(workers)]
    step = 0
    while step < total:
        start, end = step, step + min(rule(step, lr(step)), total - step)
        while step < end:
            for worker in crew:
                if (worker.rank, step) not in skipped:
                    worker.step(step, lr(step))
            step += 1
            if step == end:
                (synchronise or average)(crew, sum(map(lr, range(start, end))) / (end - start))
            yield [torch.cat([w.flatten() for w in worker.weights]) for worker in crew], step == end


Synchronise = Callable[[list[Worker], float], None]


def means(crew: list[Worker]) -> Weights:
    columns = zip(*(worker.weights for worker in crew), strict=True)
    return [torch.stack(copies).mean(0) for copies in columns]


def share(crew: list[Worker], weights: Weights) -> None:
    for worker in crew:
        for mine, w in zip(worker.weights, weights, strict=True):
            mine.copy_(w)


def average(crew: list[Worker], lr: float) -> None:
    share(crew, means(crew))


def slowmo(beta: float, alpha: float) -> Synchronise:
    """Lines 6 to 8 of SlowMo's Algorithm 1 (arXiv 1910.00643), with the average as line 6."""
    x = [p.detach().clone() for p in seeded(mlp()).parameters()]
    u = [torch.zeros_like(w) for w in x]

    def synchronise(crew: list[Worker], gamma: float) -> None:
        for index, mean in enumerate(means(crew)):
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
        for shared, mean in zip(theta, means(crew), strict=True):
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


def top(values: Tensor, k: int) -> Tensor:
    """`values` with everything but the k largest magnitudes set to 0."""
    index = values.flatten().abs().topk(min(k, values.numel())).indices
    kept = torch.zeros_like(values).flatten()
    kept[index] = values.flatten()[index]
    return kept.view_as(values)
