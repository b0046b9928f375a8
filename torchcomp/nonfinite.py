"""NaN and infinities: found on all ranks at once, because what reaches one mean reaches all."""

import torch
from torch import Tensor

from torchcomp.aggregators.transfer import nan_unless_finite
from torchcomp.bucket import Bucket
from torchcomp.errors import NonFiniteError
from torchcomp.exchange import Exchange


class FiniteWatch:
    """Watches the buckets of one step, before and after the exchange, without a host sync."""

    def __init__(self) -> None:
        self._local: list[tuple[tuple[str, ...], Tensor]] = []
        self._means: list[Tensor] = []

    def before(self, bucket: Bucket) -> None:
        """Note the norms of this rank's values, to name the culprit should there be one."""
        norms = torch._foreach_norm(list(bucket.parts().values()))
        self._local.append((bucket.names, torch.stack(norms)))

    def after(self, bucket: Bucket) -> None:
        """Note whether the mean is finite; it is the same on all ranks."""
        self._means.append(nan_unless_finite(bucket.flat))

    def all_finite(self) -> bool:
        """Whether every mean of the step is finite; the same answer on all ranks."""
        return not self._means or bool(torch.stack(self._means).isfinite().all())

    def culprits(self) -> list[str]:
        """Parameters whose values on this rank are not finite."""
        return [
            name
            for names, norms in self._local
            for name, finite in zip(names, norms.isfinite().tolist(), strict=True)
            if not finite
        ]

    def error(self, exchange: Exchange, where: str, advice: str) -> NonFiniteError:
        """The error that all ranks raise alike, with the ranks and parameters at fault.

        Args:
            exchange: to learn what the other ranks found; all ranks call this together.
            where: what was not finite, and when.
            advice: what the step left behind, and what to do.
        """
        everyone = exchange.gather_objects(self.culprits())
        found = [_describe(rank, names) for rank, names in enumerate(everyone) if names]
        cause = "; ".join(found) or "no rank alone (their sum, or its rounding, overflowed)"
        return NonFiniteError(f"NaN or infinity in {where}: {cause}. {advice}")


def _describe(rank: int, names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{shown}{more} on rank {rank}"
