"""Training by many simulated workers. Each one takes its own ten images of every batch."""

import itertools
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from recipes.bidirectional_topk.problems import Problem
from recipes.bidirectional_topk.simulation import Workers
from recipes.image_data.in_memory import Split
from recipes.image_data.order import TrainOrder

BATCH = 10


def batches(problem: Problem, count: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield the indices of the images of every step, one row for each worker, without an end."""
    # One order for all workers, of which each step takes one share per worker.
    order = TrainOrder(len(problem.train.labels), BATCH * count, 0, 1, seed)
    for epoch in itertools.count():
        for chosen in torch.from_numpy(order.batches(epoch)):
            yield chosen.view(count, BATCH)


def train(
    problem: Problem,
    workers: Workers,
    model: nn.Module,
    *,
    lr: float,
    steps: int,
    seed: int,
) -> bool:
    """Take ``steps`` steps of plain SGD, and return whether every gradient stayed finite."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    chosen = batches(problem, len(workers.exchanges), seed)
    for shares in itertools.islice(chosen, steps):
        # The default argument binds this step's shares, not those of a later step.
        def loss_of(rank: int, shares: torch.Tensor = shares) -> torch.Tensor:
            mine = problem.train.take(shares[rank])
            return cross_entropy(model(mine.images), mine.labels)

        if not workers.backward(loss_of):
            return False
        optimizer.step()
    return True


@torch.no_grad()
def evaluate(model: nn.Module, split: Split) -> tuple[float, float]:
    """Return the accuracy, in per cent, and the mean loss."""
    scores = torch.cat([model(images) for images in split.images.split(1000)])
    correct = (scores.argmax(1) == split.labels).float().mean()
    return 100 * float(correct), float(cross_entropy(scores, split.labels))
