"""Multinomial logistic regression, f_i(x) = -mean log softmax(A_i x) at the labels + mu/2 |x|^2."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from recipes.errors import RecipeError
from recipes.two_direction.data_sets import Samples
from torchcomp.two_direction.base import Gradients

_ROUNDS = 100
_ITERATIONS = 200


class SoftmaxRegression:
    """The problem on equal shards, evaluated for all workers in one batch."""

    def __init__(self, shards: Sequence[Samples], mu: float) -> None:
        # (workers, samples of a worker, features)
        self.features = torch.from_numpy(np.stack([shard.features for shard in shards]))
        labels = torch.from_numpy(np.stack([shard.labels for shard in shards]))
        self.classes, self.mu = shards[0].classes, mu
        self.n, self.m, self.width = self.features.shape
        self.d = self.width * self.classes
        # Samples are the last axis, because torch's softmax is slow over a short last axis.
        chosen = torch.nn.functional.one_hot(labels, self.classes).double()
        self.chosen = chosen.transpose(1, 2).contiguous()

    def gradients(self, workers: range) -> Gradients:
        rows = slice(workers.start, workers.stop)
        features, chosen = self.features[rows], self.chosen[rows]

        def evaluate(x: Tensor) -> Tensor:
            residual = torch.softmax(self._scores(features, x), 1) - chosen
            slopes = torch.bmm(residual, features).transpose(1, 2) / self.m
            return slopes.reshape(len(features), self.d) + self.mu * x

        return evaluate

    def value(self, x: Tensor) -> float:
        scores = self._scores(self.features, x)
        losses = torch.logsumexp(scores, 1) - (scores * self.chosen).sum(1)
        return float(losses.mean() + self.mu / 2 * (x @ x))

    def _scores(self, features: Tensor, x: Tensor) -> Tensor:
        """Return the scores of all classes; (workers, classes, m)."""
        weights = x.view(self.width, self.classes).t().expand(len(features), -1, -1)
        return torch.bmm(weights, features.transpose(1, 2))


def minimise(f: SoftmaxRegression, certainty: float) -> float:
    """Return the infimum f* of f, found by L-BFGS.

    Without a regulariser, f can have no minimum: f* is then 0, if the classes can be separated.
    """
    gradients = f.gradients(range(f.n))
    x = torch.zeros(f.d, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS(
        [x],
        max_iter=_ITERATIONS,
        max_eval=_ITERATIONS * 5,
        history_size=30,
        # Without tolerances: the default ones stop far above the required error.
        tolerance_grad=0,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )
    for _ in range(_ROUNDS):
        solver.step(_closure(f, gradients, x))
        value, error = _least(f, gradients, x.detach())
        # A hundredth, because the next round costs little.
        if error <= certainty / 100:
            break
    if not error <= certainty:
        raise RecipeError(
            f"f* is only known to {error:.1e}, expected {certainty:g}: choose a larger --gap, or "
            f"a larger mu than {f.mu:g}"
        )
    return value


def _least(f: SoftmaxRegression, gradients: Gradients, x: Tensor) -> tuple[float, float]:
    """Return the infimum of f as far as x shows it, and a bound on its error."""
    value, slope = f.value(x), float(gradients(x).mean(0).norm())
    if f.mu > 0:
        # Strong convexity bounds the error.
        return value, slope**2 / (2 * f.mu)
    if value < math.log(2) / (f.n * f.m):
        # The loss of every sample is below log 2, so x classifies all of them correctly. Then
        # f(t x) tends to 0 for large t.
        return 0.0, 0.0
    return value, slope * float(x.norm())


def _closure(f: SoftmaxRegression, gradients: Gradients, x: Tensor) -> Callable[[], float]:
    def evaluate() -> float:
        x.grad = gradients(x.detach()).mean(0)
        return f.value(x.detach())

    return evaluate
