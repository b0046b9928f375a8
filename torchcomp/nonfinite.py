"""NaN and infinities: found on all ranks at once, because what reaches one mean reaches all."""

from collections.abc import Iterable

import torch
from torch import Tensor

from torchcomp.bucket import Bucket
from torchcomp.checkpoint import listed
from torchcomp.errors import NonFiniteError
from torchcomp.exchange import Exchange
from torchcomp.kernels.cast import nan_unless_finite


class FiniteWatch:
    """Watches the buckets of one step, before and after the exchange, without a host sync.

    Where the ranks conclude a step together anyway, each searches its share of a mean.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._local: list[tuple[tuple[str, ...], Tensor]] = []
        self._means: list[Tensor] = []

    def before(self, bucket: Bucket) -> None:
        """Note the norms of this rank's values, to name the culprit should there be one."""
        norms = torch._foreach_norm(list(bucket.parts().values()))
        self._local.append((bucket.names, torch.stack(norms)))

    def after(self, bucket: Bucket) -> None:
        """Note whether the mean, or this rank's share of it, is finite."""
        flat = bucket.flat
        if self._exchange.concludes:
            rank, world_size = self._exchange.rank, self._exchange.world_size
            flat = flat[rank * flat.numel() // world_size : (rank + 1) * flat.numel() // world_size]
        self._means.append(nan_unless_finite(flat))

    def conclude(self, where: str, advice: str) -> bool:
        """Whether every mean of the step is finite; all ranks call it and get the same answer.

        If a message was not intact, all raise a WireError, with `where` and `advice`.
        """
        # If nothing was watched, there is no device to wait for.
        finite = torch.stack(self._means).isfinite().all() if self._means else torch.tensor(True)
        return self._exchange.conclude(finite, where, advice)

    def error(
        self, where: str, advice: str, traces: Iterable[tuple[str, Tensor]] = ()
    ) -> NonFiniteError:
        """The error that all ranks raise alike, with the ranks and parameters at fault.

        `traces` are by parameter what else is not finite if this rank is at fault.
        """
        own = [
            name
            for names, norms in self._local
            for name, finite in zip(names, norms.isfinite().tolist(), strict=True)
            if not finite
        ]
        own += [name for name, part in traces if not part.isfinite().all()]
        everyone = self._exchange.gather_objects(own)
        found = [f"{listed(names)} on rank {rank}" for rank, names in enumerate(everyone) if names]
        cause = "; ".join(found) or "no rank alone (their sum, or its rounding, overflowed)"
        return NonFiniteError(f"NaN or infinity in {where}: {cause}. {advice}")
