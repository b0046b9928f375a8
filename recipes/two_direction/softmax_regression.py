"""Multinomial logistic regression, f_i(x) = -mean log softmax(A_i x) at the labels + mu/2 |x|^2."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from recipes.two_direction.data_sets import RecipeError, Samples
from torchcomp.algorithms.method import Gradients

# How far above its minimum minimise() may stop.
CERTAINTY = 1e-10


class Problem(Protocol):
    """The mean of n functions, of which each worker knows one."""

    d: int
    n: int
    mu: float

    def gradients(self, workers: range) -> Gradients:
        """Return the function that evaluates the gradients of these workers."""

    def value(self, x: Tensor) -> float:
        """Return f(x)."""


def problem(shards: Sequence[Samples], mu: float) -> "Problem":
    """Return the problem on these shards, in the form that suits their features.

    A class that a worker has no sample of is no fault: its f_i is what it is.

    Raises:
        RecipeError: if the shards are not of one shape.
    """
    sizes = {len(shard) for shard in shards}
    if len(sizes) > 1:
        raise RecipeError(
            f"the shards have {sorted(sizes)} samples: they must be equal, because f is the plain "
            "mean of the f_i"
        )
    kinds = {(shard.features.shape[1], shard.classes) for shard in shards}
    if len(kinds) > 1:
        raise RecipeError(f"the shards differ in (features, classes): {sorted(kinds)}")
    return (Sparse if sparse.issparse(shards[0].features) else Dense)(shards, mu)


class Dense:
    """Features as one array (n, m, f): all workers at once."""

    def __init__(self, shards: Sequence[Samples], mu: float) -> None:
        self.features = torch.from_numpy(np.stack([shard.features for shard in shards]))
        labels = torch.from_numpy(np.stack([shard.labels for shard in shards]))
        self.classes, self.mu = shards[0].classes, mu
        self.n, self.m, self.width = self.features.shape
        self.d = self.width * self.classes
        self.chosen = torch.nn.functional.one_hot(labels, self.classes).double()

    def gradients(self, workers: range) -> Gradients:
        rows = slice(workers.start, workers.stop)
        features, chosen = self.features[rows], self.chosen[rows]

        def evaluate(x: Tensor) -> Tensor:
            weights = x.view(self.width, self.classes).expand(len(features), -1, -1)
            residual = torch.softmax(torch.bmm(features, weights), -1) - chosen
            slopes = features.transpose(1, 2) @ residual / self.m
            return slopes.reshape(len(features), self.d) + self.mu * x

        return evaluate

    def value(self, x: Tensor) -> float:
        scores = self.features @ x.view(self.width, self.classes)
        losses = torch.logsumexp(scores, -1) - (scores * self.chosen).sum(-1)
        return float(losses.mean() + self.mu / 2 * (x @ x))


class Sparse:
    """Features as CSR matrices: a gradient costs as much as there are entries."""

    def __init__(self, shards: Sequence[Samples], mu: float) -> None:
        self.features = [shard.features for shard in shards]
        self.classes, self.mu = shards[0].classes, mu
        self.n = len(shards)
        self.m, self.width = self.features[0].shape
        self.d = self.width * self.classes
        self.chosen = [np.eye(self.classes)[shard.labels] for shard in shards]

    def gradients(self, workers: range) -> Gradients:
        def evaluate(x: Tensor) -> Tensor:
            weights = x.numpy().reshape(self.width, self.classes)
            rows = [self._slope(i, weights).reshape(-1) for i in workers]
            return torch.from_numpy(np.stack(rows)) + self.mu * x

        return evaluate

    def value(self, x: Tensor) -> float:
        weights = x.numpy().reshape(self.width, self.classes)
        loss = np.mean([self._loss(i, weights) for i in range(self.n)])
        return float(loss + self.mu / 2 * float(x @ x))

    def _slope(self, i: int, weights: Any) -> Any:
        scores = self.features[i] @ weights
        shares = np.exp(scores - scores.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        return self.features[i].T @ (shares - self.chosen[i]) / self.m

    def _loss(self, i: int, weights: Any) -> float:
        scores = self.features[i] @ weights
        top = scores.max(1, keepdims=True)
        total = np.log(np.exp(scores - top).sum(1)) + top[:, 0]
        return float(np.mean(total - (scores * self.chosen[i]).sum(1)))


def minimise(given: Problem) -> float:
    """Return the least value, by L-BFGS; strong convexity bounds its error by |grad|^2 / (2 mu)."""
    gradients = given.gradients(range(given.n))
    x = torch.zeros(given.d, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS(
        [x],
        max_iter=20_000,
        max_eval=100_000,
        history_size=30,
        tolerance_grad=0,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )
    solver.step(_closure(given, gradients, x))
    slope = float(gradients(x.detach()).mean(0).norm())
    certainty = slope**2 / (2 * given.mu)
    if not certainty <= CERTAINTY:
        raise RecipeError(f"f* is only known to {certainty:.1e}: mu = {given.mu:g} is too small")
    return given.value(x.detach())


def _closure(given: Problem, gradients: Gradients, x: Tensor) -> Callable[[], float]:
    def evaluate() -> float:
        x.grad = gradients(x.detach()).mean(0)
        return given.value(x.detach())

    return evaluate
