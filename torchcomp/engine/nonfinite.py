"""NaN and infinities: detected in a step, and raised on every rank together."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torchcomp.checkpoints.checkpoint import listed
from torchcomp.engine.bucket import Bucket
from torchcomp.exchange import Exchange
from torchcomp.kernels.cast import finite_if_all
from torchcomp.specs.errors import NonFiniteError


def largest_magnitudes(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the largest magnitude in each tensor with any elements: a vector on `device`."""
    values = [each.coalesce().values() if each.is_sparse else each for each in tensors]
    filled = [each for each in values if each.numel()]
    if not filled:
        return torch.zeros(0, device=device)
    # Unlike a Euclidean norm, the largest magnitude cannot overflow.
    return torch.stack([each.to(device) for each in torch._foreach_norm(filled, math.inf)])


def all_finite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a scalar bool on `device`: whether every element of all tensors is finite."""
    return largest_magnitudes(tensors, device).isfinite().all()


class FiniteWatch:
    """Checks the buckets of one step before and after the exchange, without a host sync."""

    def __init__(self, exchange: Exchange, where: str = "on rank") -> None:
        self._exchange, self._where = exchange, where
        # The norms of this rank's values, by bucket. Only `error` reads them.
        self._local: list[tuple[tuple[str, ...], Sequence[Tensor]]] = []
        # For each mean, a scalar that is finite if it is; or on an accelerator, the mean.
        self._means: list[Tensor] = []

    def before(self, bucket: Bucket) -> None:
        """Record the norms of this rank's values, so that an error can name the parameters."""
        # One fused call for all parameters. A norm is non-finite if any element is.
        norms = torch._foreach_norm(list(bucket.parts().values()))
        self._local.append((bucket.names, norms))

    def after(self, bucket: Bucket) -> None:
        """Look at the mean of a bucket: whether it is finite."""
        mean = bucket.flat
        # All ranks have the same mean: if the end of the step communicates anyway, because frames
        # were received, each rank checks only its share.
        if self._exchange.must_conclude:
            rank, ranks, numel = self._exchange.rank, self._exchange.world_size, mean.numel()
            # At least one value: a message with an invalid code makes all of them NaN.
            begin = rank * numel // ranks
            mean = mean[begin : max(begin + 1, (rank + 1) * numel // ranks)]
        # On a CPU now, while the mean is in the cache. On an accelerator at the end of the step:
        # one launch for all means that are still there.
        at_end = bucket.lasts and not mean.is_cpu
        self._means.append(mean if at_end else finite_if_all(mean))

    def finite(self) -> Tensor | None:
        """Return whether the means that this rank watched are finite, None if it watched none."""
        means = self._means
        if means and means[0].is_cpu:
            return torch.stack(means).isfinite().all()
        return all_finite(means, means[0].device) if means else None

    def error(
        self, where: str, advice: str, traces: Iterable[tuple[str, Tensor]] = ()
    ) -> NonFiniteError:
        """Return the error that names ranks and parameters. All ranks call this and raise it."""
        norms = [each for bucket in self._local for each in zip(*bucket, strict=True)]
        # A residual shows the same as the norms, for methods that need no norms.
        own = [name for name, values in (*norms, *traces) if not values.isfinite().all()]
        exchange = self._exchange
        by_rank = sorted(exchange.gather_all((exchange.global_ranks[exchange.rank], own)))
        found = [f"{listed(names)} {self._where} {rank}" for rank, names in by_rank if names]
        # Finite values on every rank can still overflow when they are added.
        overflow = "the values of each rank are finite, but their sum, or its rounding, overflowed"
        cause = "; ".join(found) or overflow
        return NonFiniteError(f"NaN or infinity in {where}: {cause}. {advice}")
