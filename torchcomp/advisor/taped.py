"""Exchanges that note their collectives, and the work of this rank between them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchcomp.advisor.activities import Activity, Call, Work
from torchcomp.advisor.collectives import ALL_GATHER, ALL_REDUCE, ALL_REDUCE_BF16, ALL_TO_ALL
from torchcomp.advisor.compute import worked
from torchcomp.exchange import Exchange, InProcessExchange
from torchcomp.routes.wire import Frames

_COPIED_BYTES = 2**28
"""Up to this many bytes, each message of an all-gather has memory of its own."""


class Taped(Exchange):
    """Notes the collectives of the exchange that follows it in the order of base classes."""

    inside = False
    """Whether these are the ranks of a node."""

    _onto: list[Activity] | None = None
    _since = 0.0

    @contextmanager
    def recorded(self, onto: list[Activity]) -> Iterator[None]:
        """Append the activities of the block to `onto`: works, and the collectives between them."""
        self._onto, self._since = onto, worked(self.device)
        yield
        onto.append(Work(worked(self.device) - self._since))
        self._onto = None

    def _all_reduce(self, values: Tensor) -> None:
        narrow = values.dtype in (torch.bfloat16, torch.float16)
        with self._noted(ALL_REDUCE_BF16 if narrow else ALL_REDUCE, values.nbytes):
            super()._all_reduce(values)  # type: ignore[safe-super]

    def _all_gather(self, mine: Tensor) -> Tensor:
        with self._noted(ALL_GATHER, mine.nbytes):
            return super()._all_gather(mine)  # type: ignore[safe-super]

    def _all_to_all(
        self, outgoing: Tensor, sizes: Sequence[int], arriving: Sequence[int]
    ) -> Tensor:
        others = sum(sizes) - sizes[self.rank]
        with self._noted(ALL_TO_ALL, outgoing.element_size() * others):
            return super()._all_to_all(outgoing, sizes, arriving)  # type: ignore[safe-super]

    @contextmanager
    def _noted(self, kind: str, nbytes: int) -> Iterator[None]:
        if self._onto is not None:
            self._onto.append(Work(worked(self.device) - self._since))
            self._onto.append(Call(kind, nbytes, self.inside))
        yield
        self._since = worked(self.device)


class Mirror(Exchange):
    """The exchange of rank 0, which gets copies of its own messages instead of those of others."""

    def check(self, frames: Frames, received: Tensor, senders: Sequence[int]) -> None:
        super().check(frames, received, senders)
        # A copy of this rank's message can have another length than the message that it stands for.
        self._headers.clear()

    def gather_objects(self, value: Any, dst: int | None = None) -> list[Any]:
        return [value] * self.world_size

    def _all_reduce(self, values: Tensor) -> None:
        # The size of the values does not matter.
        pass

    def _all_gather(self, mine: Tensor) -> Tensor:
        # Many large messages share their memory, which one rank may not have for all of them.
        gathered = mine.expand(self.world_size, -1)
        return gathered.contiguous() if gathered.nbytes <= _COPIED_BYTES else gathered

    def _all_to_all(
        self, outgoing: Tensor, sizes: Sequence[int], arriving: Sequence[int]
    ) -> Tensor:
        mine = outgoing[: sizes[0]]
        return torch.cat([_resized(mine, size) for size in arriving])


class PretendedExchange(Taped, Mirror):
    """The exchange of rank 0 of `world_size` ranks that are not there.

    Args:
        world_size: number of ranks.
        device: device of the gradients.
        inside: whether these are the ranks of a node.
    """

    def __init__(self, world_size: int, device: torch.device, *, inside: bool = False) -> None:
        super().__init__(0, world_size, device)
        self.inside = inside


class ThreadExchange(Taped, InProcessExchange):
    """The exchange of a rank that is a thread of this process."""


def _resized(mine: Tensor, size: int) -> Tensor:
    """Return a message of `size` elements that is as much like `mine` as possible."""
    if len(mine) >= size:
        return mine[:size]
    return torch.cat([mine, mine.new_zeros(size - len(mine))])
