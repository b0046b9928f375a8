"""Estimates of L, Lmax and mu for least squares and logistic regression, shard by shard.

The features of worker i are a matrix A_i of m rows; all shards have the same number of rows. Both
functions are f_i(x) = loss + l2/2 |x|^2, with the loss averaged over the rows.

For dense shards with at most :data:`EXACT` features, the eigenvalues are exact up to rounding.
Otherwise, the largest one comes from a power iteration, which approaches it from below. L and Lmax
are then lower estimates. If many eigenvalues are close to the largest, the estimate is too low by
about the width of that cluster (30 within 1e-4 of the largest: too low by 3e-5 of it). In that
case, choose a step size somewhat below 1/L.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcomp.checks import check_at_least_0
from torchcomp.errors import SpecError
from torchcomp.keys import Key

EXACT = 1000
"""Compute all eigenvalues of dense shards with at most this many features."""

_TOLERANCE = 1e-10
_MOST_PRODUCTS = 10_000


@dataclass(frozen=True)
class Smoothness:
    """The constants of f that the theory needs: L, Lmax (the largest of an f_i) and mu."""

    smoothness: float
    lmax: float
    mu: float


def least_squares(shards: Sequence[Tensor], l2: float = 0.0) -> Smoothness:
    """Return the constants of f_i(x) = 1/(2m) |A_i x - b_i|^2 + l2/2 |x|^2.

    Args:
        shards: A_i, each (m, features), dense, of floats.
        l2: weight of the regularisation, at least 0.

    Raises:
        SpecError: if the shards are not dense, finite matrices of one size, or l2 is negative.
    """
    _check(shards)
    check_at_least_0("l2", l2)
    if not all(map(_dense, shards)):
        raise SpecError("mu needs dense shards, for the smallest eigenvalue: pass their to_dense()")
    smallest = float(torch.linalg.eigvalsh(_gram(shards))[0])
    return _curvature(shards, 1.0, l2, max(smallest, 0.0))


def logistic_regression(
    shards: Sequence[Tensor], l2: float = 0.0, *, one_logit: bool = False
) -> Smoothness:
    """Return the constants of multinomial logistic regression, -mean log softmax + l2/2 |x|^2.

    The curvature of the softmax is at most 1/2, so L <= 1/2 lambda_max(A^T A / m) + l2; that of
    log(1 + exp(-label a'x)) is at most 1/4. The loss itself is not strongly convex.

    Args:
        shards: A_i, each (m, features), dense or sparse, of floats.
        l2: weight of the regularisation, at least 0.
        one_logit: whether the model of two classes has one logit a'x instead of a softmax.

    Raises:
        SpecError: if the shards are not finite matrices of one size, or l2 is negative.
    """
    _check(shards)
    check_at_least_0("l2", l2)
    return _curvature(shards, 0.25 if one_logit else 0.5, l2, 0.0)


def largest_eigenvalue(shards: Sequence[Tensor]) -> float:
    """Return the largest eigenvalue of the mean of A_i^T A_i / m, or a lower estimate of it."""
    _check(shards)
    if all(map(_dense, shards)) and shards[0].shape[1] <= EXACT:
        return float(torch.linalg.eigvalsh(_gram(shards))[-1])
    return _power_iteration(shards)


def _curvature(shards: Sequence[Tensor], factor: float, l2: float, loss_mu: float) -> Smoothness:
    lmax = max(largest_eigenvalue([shard]) for shard in shards)
    return Smoothness(factor * largest_eigenvalue(shards) + l2, factor * lmax + l2, loss_mu + l2)


def _gram(shards: Sequence[Tensor]) -> Tensor:
    """Return the mean of A_i^T A_i / m."""
    # In float64: small eigenvalues would be lost in the rounding of float32.
    rows, features = shards[0].shape
    total = shards[0].new_zeros((features, features), dtype=torch.float64)
    for shard in shards:
        wide = shard.double()
        total.addmm_(wide.t(), wide)
    return total / (rows * len(shards))


def _power_iteration(shards: Sequence[Tensor]) -> float:
    rows, features = shards[0].shape
    start = Key(0).of_tensor("power iteration").shared().standard_normal(features)
    v = torch.from_numpy(start).to(shards[0])
    value = 0.0
    for _ in range(_MOST_PRODUCTS):
        v = v / v.norm()
        products = [shard.t() @ (shard @ v) for shard in shards]
        v = torch.stack(products).sum(0) / (rows * len(shards))
        previous, value = value, float(v.norm())
        if abs(value - previous) <= _TOLERANCE * value:
            break
    return value


def _check(shards: Sequence[Tensor]) -> None:
    for i, shard in enumerate(shards):
        if not shard.is_floating_point() or shard.dim() != 2 or not shard.numel():
            raise SpecError(
                f"shards[{i}] must be a matrix (rows, features) of floats, with one row or more, "
                f"not {tuple(shard.shape)} of {shard.dtype}",
                "shards",
            )
        entries = shard if _dense(shard) else shard.to_sparse_coo().coalesce().values()
        if not bool(entries.square().sum().isfinite()):
            raise SpecError(f"shards[{i}] must contain features with finite squares", "shards")
    kinds = {(*shard.shape, shard.dtype) for shard in shards}
    if len(kinds) != 1:
        raise SpecError(
            "shards must be matrices of one size and dtype, because f is the unweighted mean of "
            f"the f_i, not {sorted(map(str, kinds)) or 'none at all'}",
            "shards",
        )


def _dense(shard: Tensor) -> bool:
    return shard.layout is torch.strided
