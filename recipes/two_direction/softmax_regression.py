"""Multinomial logistic regression, f_i(x) = -mean log softmax(A_i x) at the labels + mu/2 |x|^2."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from recipes.errors import RecipeError
from recipes.two_direction.data_sets import Samples
from torchcomp.algorithms.method import Gradients

# Largest error of the value that minimise() returns.
CERTAINTY = 1e-10


class Problem(Protocol):
    """The mean of n functions, one per worker."""

    d: int
    n: int
    mu: float

    def gradients(self, workers: range) -> Gradients:
        """Return the function that evaluates the gradients of these workers."""

    def value(self, x: Tensor) -> float:
        """Return f(x)."""


def problem(shards: Sequence[Samples], mu: float) -> "Problem":
    """Return the problem on these shards, in the form that suits their features.

    A shard can lack samples of some classes.

    Raises:
        RecipeError: if the shards differ in shape.
    """
    sizes = {len(shard) for shard in shards}
    if len(sizes) > 1:
        raise RecipeError(
            f"the shards have {sorted(sizes)} samples, expected equal shards, because f is the "
            "unweighted mean of the f_i"
        )
    kinds = {(shard.features.shape[1], shard.classes) for shard in shards}
    if len(kinds) > 1:
        raise RecipeError(f"the shards differ in (features, classes): {sorted(kinds)}")
    return (Sparse if sparse.issparse(shards[0].features) else Dense)(shards, mu)


class Dense:
    """The problem with dense features (n, m, f), evaluated for all workers in one batch."""

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
    """The problem with CSR features, whose gradients cost time per stored entry."""

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
        # Subtract the maximum, because exp overflows above 709.
        softmax = np.exp(scores - scores.max(1, keepdims=True))
        softmax /= softmax.sum(1, keepdims=True)
        return self.features[i].T @ (softmax - self.chosen[i]) / self.m

    def _loss(self, i: int, weights: Any) -> float:
        scores = self.features[i] @ weights
        top = scores.max(1, keepdims=True)
        total = np.log(np.exp(scores - top).sum(1)) + top[:, 0]
        return float(np.mean(total - (scores * self.chosen[i]).sum(1)))


def minimise(f: Problem) -> float:
    """Return f*, found by L-BFGS.

    Raises:
        RecipeError: if its error can exceed :data:`CERTAINTY`.
    """
    gradients = f.gradients(range(f.n))
    x = torch.zeros(f.d, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS(
        [x],
        max_iter=20_000,
        max_eval=100_000,
        history_size=30,
        # Without tolerances: the default ones stop far above the required error.
        tolerance_grad=0,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )
    solver.step(_closure(f, gradients, x))
    # Strong convexity bounds the error of f* by |grad f|^2 / (2 mu).
    slope = float(gradients(x.detach()).mean(0).norm())
    certainty = slope**2 / (2 * f.mu)
    if not certainty <= CERTAINTY:
        raise RecipeError(
            f"f* is only known to {certainty:.1e}, expected {CERTAINTY:g}: choose a larger mu than "
            f"{f.mu:g}"
        )
    return f.value(x.detach())


def _closure(f: Problem, gradients: Gradients, x: Tensor) -> Callable[[], float]:
    def evaluate() -> float:
        x.grad = gradients(x.detach()).mean(0)
        return f.value(x.detach())

    return evaluate
