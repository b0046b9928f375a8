"""Algorithm 2 of the QSR paper, written out: K copies of a model in one process, float64."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from tests.local_sgd.script import batch, initialised, loss_of, mlp

Weights = list[Tensor]
Update = Callable[[Weights, Weights, float], None]


def momentum_update() -> Update:
    """SGD with momentum 0.9 and weight decay 0.01, with a state of its own."""
    velocity: Weights = []

    def update(weights: Weights, gradients: Weights, rate: float) -> None:
        for place, (w, g) in enumerate(zip(weights, gradients, strict=True)):
            g = g + 0.01 * w
            if place == len(velocity):
                velocity.append(g.clone())
            else:
                velocity[place] = 0.9 * velocity[place] + g
            w -= rate * velocity[place]

    return update


def adamw_update() -> Update:
    """AdamW with betas (0.9, 0.99), eps 1e-8 and weight decay 0.05, with a state of its own."""
    moments: list[tuple[Tensor, Tensor]] = []
    count = 0

    def update(weights: Weights, gradients: Weights, rate: float) -> None:
        nonlocal count
        count += 1
        for place, (w, g) in enumerate(zip(weights, gradients, strict=True)):
            if place == len(moments):
                moments.append((torch.zeros_like(w), torch.zeros_like(w)))
            first, second = moments[place]
            first = 0.9 * first + 0.1 * g
            second = 0.99 * second + 0.01 * g * g
            moments[place] = first, second
            w *= 1 - rate * 0.05
            w -= rate * (first / (1 - 0.9**count)) / ((second / (1 - 0.99**count)).sqrt() + 1e-8)

    return update


def every(h: int) -> Callable[[int, float], int]:
    return lambda step, rate: h


def qsr(alpha: float, h_base: int, warmup: int) -> Callable[[int, float], int]:
    def rule(step: int, rate: float) -> int:
        return h_base if step < warmup else max(h_base, math.floor((alpha / rate) ** 2))

    return rule


class Worker:
    """One of the K copies, with its own optimizer state."""

    def __init__(self, rank: int, update: Update) -> None:
        self.rank = rank
        self.module = initialised(mlp())
        self.update = update

    @property
    def weights(self) -> Weights:
        return [parameter.data for parameter in self.module.parameters()]

    def step(self, step: int, rate: float) -> None:
        self.update(self.weights, self._gradients(step), rate)

    def _gradients(self, step: int) -> Weights:
        parameters: list[nn.Parameter] = list(self.module.parameters())
        return list(torch.autograd.grad(loss_of(self.module, *batch(self.rank, step)), parameters))


def local_opt(
    workers: int,
    total: int,
    *,
    update: Callable[[], Update],
    rule: Callable[[int, float], int],
    rate: Callable[[int], float],
    skipped: frozenset[tuple[int, int]] = frozenset(),
    synchronise: "Synchronise | None" = None,
) -> Iterator[tuple[list[Tensor], bool]]:
    """Each worker's weights after every step, and whether they have just been averaged.

    Args:
        workers: K.
        total: T.
        update: makes one worker's optimizer.
        rule: H of a round that begins after `step` steps at the given rate.
        rate: learning rate of a step.
        skipped: (rank, step) pairs at which a worker leaves its optimizer step out.
        synchronise: ends a round whose steps had the given mean rate; by default the average.
    """
    crew = [Worker(rank, update()) for rank in range(workers)]
    step = 0
    while step < total:
        start, end = step, step + min(rule(step, rate(step)), total - step)
        while step < end:
            for worker in crew:
                if (worker.rank, step) not in skipped:
                    worker.step(step, rate(step))
            step += 1
            if step == end:
                (synchronise or average)(crew, sum(map(rate, range(start, end))) / (end - start))
            yield [torch.cat([w.flatten() for w in worker.weights]) for worker in crew], step == end


Synchronise = Callable[[list[Worker], float], None]


def means(crew: list[Worker]) -> Weights:
    columns = zip(*(worker.weights for worker in crew), strict=True)
    return [torch.stack(copies).mean(0) for copies in columns]


def share(crew: list[Worker], weights: Weights) -> None:
    for worker in crew:
        for mine, w in zip(worker.weights, weights, strict=True):
            mine.copy_(w)


def average(crew: list[Worker], rate: float) -> None:
    share(crew, means(crew))


def slowmo(beta: float, alpha: float) -> Synchronise:
    """Lines 6 to 8 of SlowMo's Algorithm 1 (arXiv 1910.00643), with the average as line 6."""
    x = [p.detach().clone() for p in initialised(mlp()).parameters()]
    u = [torch.zeros_like(w) for w in x]

    def synchronise(crew: list[Worker], gamma: float) -> None:
        for place, mean in enumerate(means(crew)):
            u[place] = beta * u[place] + (x[place] - mean) / gamma
            x[place] = x[place] - alpha * gamma * u[place]
        share(crew, x)

    return synchronise


def diloco(lr: float, momentum: float) -> Synchronise:
    """Lines 12 and 14 of DiLoCo's Algorithm 1 (arXiv 2311.08105), with PyTorch's Nesterov SGD."""
    theta = [p.detach().clone() for p in initialised(mlp()).parameters()]
    outer = torch.optim.SGD(theta, lr=lr, momentum=momentum, nesterov=momentum > 0)

    def synchronise(crew: list[Worker], rate: float) -> None:
        for shared, mean in zip(theta, means(crew), strict=True):
            shared.grad = shared - mean
        outer.step()
        share(crew, theta)

    return synchronise


def ef_topk(workers: int, k: int) -> Synchronise:
    """Error feedback around the k largest entries of each tensor of a worker's change."""
    x = [p.detach().clone() for p in initialised(mlp()).parameters()]
    memories = [[torch.zeros_like(w) for w in x] for _ in range(workers)]

    def synchronise(crew: list[Worker], rate: float) -> None:
        for place in range(len(x)):
            total = torch.zeros_like(x[place])
            for worker, memory in zip(crew, memories, strict=True):
                wanted = worker.weights[place] - x[place] + memory[place]
                sent = top(wanted, k)
                memory[place] = wanted - sent
                total += sent
            x[place] = x[place] + total / len(crew)
        share(crew, x)

    return synchronise


def top(values: Tensor, k: int) -> Tensor:
    index = values.flatten().abs().topk(min(k, values.numel())).indices
    kept = torch.zeros_like(values).flatten()
    kept[index] = values.flatten()[index]
    return kept.view_as(values)
