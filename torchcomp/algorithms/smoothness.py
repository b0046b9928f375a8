"""Estimates of L, Lmax and mu for least squares and logistic regression, shard by shard.

The features of worker i are a matrix A_i of m rows; all shards have the same number of rows. Both
functions are f_i(x) = loss + l2/2 |x|^2, with the loss averaged over the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcomp.checks import check_at_least_0
from torchcomp.errors import SpecError
from torchcomp.keys import Key

_TOLERANCE = 1e-10
_MOST_PRODUCTS = 10_000


@dataclass(frozen=True)
class Smoothness:
    """What theory asks of f.

    Attributes:
        smoothness: L, of f.
        lmax: Lmax, the largest smoothness of an f_i.
        mu: strong convexity of f.
    """

    smoothness: float
    lmax: float
    mu: float


def least_squares(shards: Sequence[Tensor], l2: float = 0.0) -> Smoothness:
    """Of f_i(x) = 1/(2m) |A_i x - b_i|^2 + l2/2 |x|^2.

    Args:
        shards: A_i, each (m, features), dense.
        l2: weight of the regularisation, at least 0.

    Raises:
        SpecError: if the shards are not of one size, or l2 is negative.
    """
    _check(shards, l2)
    grams = torch.stack([shard.t() @ shard / len(shard) for shard in shards])
    smallest = float(torch.linalg.eigvalsh(grams.mean(0))[0])
    return _curvature(shards, 1.0, l2, max(smallest, 0.0))


def logistic_regression(
    shards: Sequence[Tensor], l2: float = 0.0, *, one_logit: bool = False
) -> Smoothness:
    """Of multinomial logistic regression, f_i(x) = -mean log softmax + l2/2 |x|^2.

    The curvature of the softmax is at most 1/2, so L <= 1/2 lambda_max(A^T A / m) + l2; that of
    log(1 + exp(-label a'x)) is at most 1/4. The loss itself is not strongly convex.

    Args:
        shards: A_i, each (m, features), dense or sparse.
        l2: weight of the regularisation, at least 0.
        one_logit: there are two classes, told apart by one logit a'x instead of a softmax.

    Raises:
        SpecError: if the shards are not of one size, or l2 is negative.
    """
    _check(shards, l2)
    return _curvature(shards, 0.25 if one_logit else 0.5, l2, 0.0)


def _curvature(shards: Sequence[Tensor], factor: float, l2: float, loss_mu: float) -> Smoothness:
    lmax = max(largest_eigenvalue([shard]) for shard in shards)
    whole = largest_eigenvalue(shards)
    return Smoothness(factor * whole + l2, factor * lmax + l2, loss_mu + l2)


def largest_eigenvalue(shards: Sequence[Tensor]) -> float:
    """The largest eigenvalue of the mean of A_i^T A_i / m, by power iteration, from below.

    Args:
        shards: A_i, each (m, features), dense or sparse.
    """
    rows, features = shards[0].shape
    start = Key(0).of_tensor("power iteration").shared().standard_normal(features)
    v = torch.from_numpy(start).to(shards[0].dtype)
    value = 0.0
    for _ in range(_MOST_PRODUCTS):
        v = v / v.norm()
        products = [shard.t() @ (shard @ v) for shard in shards]
        v = torch.stack(products).sum(0) / (rows * len(shards))
        previous, value = value, float(v.norm())
        if abs(value - previous) <= _TOLERANCE * value:
            break
    return value


def _check(shards: Sequence[Tensor], l2: float) -> None:
    sizes = [tuple(shard.shape) for shard in shards]
    if not sizes or len(set(sizes)) > 1:
        raise SpecError(
            f"shards must be matrices of one size, because f is the plain mean of the f_i, not "
            f"{sizes}",
            "shards",
        )
    check_at_least_0("l2", l2)
