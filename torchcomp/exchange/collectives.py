"""Collectives of a set of ranks, with byte counters, on one level or two.

Every call is straight-line code and blocks the stream or thread that makes it. None is chained to a
future: a second collective of a callback can pair with the wrong collective of another rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from torchcomp.engine import host
from torchcomp.engine.profiling import OFF, span
from torchcomp.exchange.traffic import Load, Traffic, sum_bytes


class Collectives(ABC):
    """The collectives of an :class:`~torchcomp.Exchange`, which describes the arguments."""

    # Dtypes of which the backend's own mean has the bits of plain DDP.
    _averages: tuple[torch.dtype, ...] = ()

    rank: int
    world_size: int
    device: torch.device
    global_ranks: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    _levels: "tuple[Collectives, ...]"
    _load: Load

    @property
    def shard(self) -> int:
        """Which part of the values this rank averages: on two levels, its rank inside."""
        return next((level.rank for level in self._levels if level is not self), 0)

    # --- To be implemented by a subclass. These methods do not count bytes. ---

    @abstractmethod
    def _all_reduce(self, values: Tensor) -> None:
        """Replace `values` (1-D, contiguous) with their sum over the ranks."""

    def _all_reduce_mean(self, values: Tensor) -> None:
        """Replace `values` with their mean; only called for the dtypes in `_averages`."""
        raise NotImplementedError

    @abstractmethod
    def _all_gather(self, mine: Tensor) -> Tensor:
        """Return every rank's `mine` (1-D, same length on all ranks), concatenated."""

    @abstractmethod
    def _all_to_all(
        self, outgoing: Tensor, sizes: Sequence[int], arriving: Sequence[int]
    ) -> Tensor:
        """Send ``sizes[r]`` elements to each rank r; receive ``arriving[r]`` from each."""

    def _reduce_scatter(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Return this rank's part of the sum of `values` (1-D, equal parts) over the ranks."""
        sizes = [values.numel() // self.world_size] * self.world_size
        # Summed here, in rank order: gloo's reduce-scatter is an all-reduce inside, which moves
        # twice the bytes.
        parts = self._all_to_all(values, sizes, sizes).view(self.world_size, -1)
        return parts.sum(0, dtype=dtype)

    @abstractmethod
    def gather_objects(self, value: Any, dst: int | None = None) -> list[Any]:
        """Return every rank's `value`, in rank order; slow. On ranks other than `dst`, nothing."""

    # --- Collectives ---

    def all_reduce(self, values: Tensor, *, divide: bool = False) -> None:
        """Replace `values` (1-D, contiguous) with their sum over the ranks.

        With `divide`, with their mean, with the bits of plain DDP.
        """
        with span("all_reduce") if profiler._is_profiler_enabled else OFF:
            if divide and values.dtype in self._averages:
                self._all_reduce_mean(values)
            else:
                self._all_reduce(values.mul_(1.0 / self.world_size) if divide else values)
        self._load.summed += values.nbytes

    def reduce_scatter(self, values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return this rank's part of the sum, in `dtype`, of `values` (1-D, equal parts)."""
        moved = values.nbytes // self.world_size * (self.world_size - 1)
        self._load.sent += moved
        self._load.received += moved
        with span("reduce_scatter") if profiler._is_profiler_enabled else OFF:
            return self._reduce_scatter(values, dtype or values.dtype)

    def all_gather_rows(self, message: Tensor) -> Tensor:
        """Return every rank's `message` (1-D, same length on all ranks), a row for each rank."""
        moved = message.nbytes * (self.world_size - 1)
        self._load.sent += moved
        self._load.received += moved
        with span("all_gather") if profiler._is_profiler_enabled else OFF:
            return self._all_gather(message).view(self.world_size, -1)

    def all_gather_v(self, mine: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return every rank's `mine` (1-D, of ``sizes[rank]`` elements), concatenated."""
        # torch's all_gather_single needs equal lengths. An all-to-all takes uneven splits.
        copies = [mine.numel()] * self.world_size
        return self.all_to_all(mine.repeat(self.world_size), copies, sizes)

    def all_to_all(self, outgoing: Tensor, sizes: Sequence[int], arriving: Sequence[int]) -> Tensor:
        """Send ``sizes[r]`` elements of `outgoing` to each rank r; return those from all."""
        # A rank's part for itself does not cross its link, so it is not counted.
        itemsize, rank = outgoing.element_size(), self.rank
        self._load.sent += itemsize * (sum(sizes) - sizes[rank])
        self._load.received += itemsize * (sum(arriving) - arriving[rank])
        with span("all_to_all") if profiler._is_profiler_enabled else OFF:
            return self._all_to_all(outgoing, sizes, arriving)

    def all_reduce_max(self, numbers: Tensor) -> Tensor:
        """Return the elementwise maximum of all ranks' `numbers` (1-D); of those of both levels."""
        with span("all_reduce_max") if profiler._is_profiler_enabled else OFF:
            for level in self._levels:
                numbers = level.level_max(numbers)
        return numbers

    def level_max(self, numbers: Tensor) -> Tensor:
        """Do as :meth:`all_reduce_max`, for the ranks of this level."""
        self._load.control += numbers.nbytes * (self.world_size - 1)
        return self._all_gather(numbers).view(self.world_size, -1).amax(0)

    def same(self, number: int) -> bool:
        """Whether all ranks of this level have the same 63-bit number."""
        # One message finds the minimum as well as the maximum, as the maximum of the negatives.
        bounds = torch.tensor([number, -number], dtype=torch.int64, device=self.device)
        highest, lowest = self.level_max(bounds).tolist()
        return bool(highest == -lowest)

    def sum_control(self, numbers: Tensor) -> Callable[[], Tensor]:
        """Add up `numbers` (1-D, contiguous) over the ranks of all levels, in place.

        What is returned waits for the copy of the sums to the CPU.
        """
        with span("sum_control") if profiler._is_profiler_enabled else OFF:
            for level in reversed(self._levels):
                level._all_reduce(numbers)
                self._load.control += sum_bytes(numbers.nbytes, level.world_size)
            return host.copy_from(numbers)

    def gather_all(self, value: Any) -> list[Any]:
        """As :meth:`gather_objects` for the ranks of all levels, in an order that all have."""
        values = [value]
        for level in self._levels:
            values = [each for listed in level.gather_objects(values) for each in listed]
        return values

    # --- Connections and counters ---

    def close(self) -> None:
        """End the connections of both levels. The groups of the user remain."""
        for level in self._levels:
            level._close()

    # Most exchanges have no connections of their own.

    def leave(self, error: BaseException) -> None:  # noqa: B027
        """End the connections of this level after an error."""

    def _close(self) -> None:  # noqa: B027
        """End the connections of this level."""

    def count(self, load: Load) -> None:
        """Count bytes that another exchange of the same ranks moves for this one."""
        self._load.add(load)

    def take_traffic(self, dense_bytes: int) -> Traffic:
        """Return the bytes since the last call, with those of plain DDP; reset the counters."""
        # Without calls: this is in every step.
        load, self._levels[0]._load = self._levels[0]._load, Load()
        ranks = self._levels[0].world_size
        around = 2 * (ranks - 1) * load.summed // ranks  # a ring
        traffic = Traffic(around + load.sent, around + load.received, dense_bytes, load.control)
        for level in self._levels[1:]:
            inside, level._load = level._load.traffic(level.world_size), Load()
            traffic.inside += inside.sent
            traffic.control += inside.control
        return traffic
