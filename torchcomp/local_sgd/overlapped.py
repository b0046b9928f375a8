"""OverlappedAverage: the mean of the parameters arrives while the next step is on its way.

What is overlapped: everything from the optimizer's turn on that reads no parameter (loading and
augmenting the next batch), and the forward pass of the layers in front of those whose mean has not
arrived. It is exact, because every layer waits for its own parameters before it computes.
"""

import torch
from torch import Tensor

from torchcomp.bucket import Bucket, Group
from torchcomp.exchange import Exchange
from torchcomp.local_sgd.averaging import UNCHANGED, PlainAverage
from torchcomp.local_sgd.background import Arrival, Background
from torchcomp.local_sgd.weights import Weights
from torchcomp.nonfinite import FiniteWatch


class OverlappedAverage(PlainAverage):
    """The mean of the parameters in float32 or wider, in the background. See :class:`Averaging`.

    Args:
        weights: the parameters.
        groups: which of them travel together; the last ones go first, as a forward pass asks for
            them.
        exchange: the ranks, for what they must know before they go on.
        background: where the means are made.
    """

    def __init__(
        self,
        weights: Weights,
        groups: tuple[Group, ...],
        exchange: Exchange,
        background: Background,
    ) -> None:
        super().__init__(weights, groups, exchange)
        self._background = background
        self._late: set[Group] = set()
        self._sent: list[Arrival] = []
        self._arriving: list[Arrival] = []

    def add(self, group: Group) -> None:
        # No layer waits for it, because its module may be new.
        self._late.add(group)
        super().add(group)

    def exchange(self, step: int) -> None:
        buckets = [self._weights.read(group) for group in reversed(self._groups)]
        self._require_finite(buckets, f"{self._what} after step {step}")
        self._sent = [Arrival(bucket) for bucket in buckets]
        for arrival in self._sent:
            self._background.submit(arrival)

    def commit(self, rate: float) -> None:
        self._arriving, self._sent = self._sent, []
        self.finish({name for group in self._late for name in group})

    def rollback(self) -> None:
        for arrival in self._sent:
            arrival.wait()
        self._background.exchange.take_traffic(0)
        self._sent = []

    def finish(self, names: set[str] | None = None) -> None:
        """Give parameters their means as soon as these are there.

        Args:
            names: of the parameters that are needed, with which come those of the same buckets; all
                by default.
        """
        if not self._arriving:
            return
        left = []
        for arrival in self._arriving:
            if names is None or not names.isdisjoint(arrival.bucket.names):
                arrival.wait()
                self._weights.write(arrival.bucket)
            else:
                left.append(arrival)
        self._arriving = left

    def _require_finite(self, buckets: list[Bucket], where: str) -> None:
        """Learn before anything is under way whether some rank's values, or their sum, overflow."""
        watch = FiniteWatch(self._exchange)
        for bucket in buckets:
            watch.before(bucket)
        bad = any(bool(_too_large(b.flat, self._exchange.world_size)) for b in buckets)
        flag = torch.tensor([bad], dtype=torch.uint8, device=self._exchange.device)
        if self._exchange.any_rank(flag).any():
            raise watch.error(where, UNCHANGED)


def _too_large(values: Tensor, world_size: int) -> Tensor:
    """Whether something is not finite, or so large that a sum over the ranks may not be."""
    limit = torch.finfo(values.dtype).max / world_size
    if not values.numel():
        return torch.zeros((), dtype=torch.bool, device=values.device)
    lowest, highest = torch.aminmax(values)
    return ~((lowest >= -limit) & (highest <= limit))
