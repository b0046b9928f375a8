"""Exchange: the collectives of a set of ranks, on one level or two, and the checks of a step.

Every collective is straight-line code and blocks the stream or thread that calls it. None is
chained to a future: a second collective of a callback can pair with another one of another rank.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler

from torchcomp.engine import host
from torchcomp.engine.profiling import OFF, span
from torchcomp.exchange.traffic import Load, Traffic, sum_bytes
from torchcomp.routes.wire import Frames
from torchcomp.specs.errors import RankMismatchError, WireError

_KEPT = 2**25  # frames of more bytes, about a bucket of DDP, are not kept for their headers
_COMPLEMENTS = bytes(255 - byte for byte in range(256))
Built = TypeVar("Built")
Asked = tuple[list[int], list[int]]  # numbers of this rank, and a list for the maxima of all ranks


class Origin(NamedTuple):
    """What frames this rank received, and from whom."""

    frames: Frames
    rows: int
    senders: Sequence[int]
    ranks: Sequence[int]  # the name of each sender in errors

    def names(self) -> list[int]:
        sizes = self.frames.sizes * self.rows
        senders = (self.senders[i * len(self.senders) // len(sizes)] for i in range(len(sizes)))
        return [self.ranks[each] for each, size in zip(senders, sizes, strict=True) if size]


class Conclusion(NamedTuple):
    """The result of the checks of a step on all ranks."""

    flags: Tensor | None  # whether a frame was not intact, a value not finite; and the numbers
    wait: Callable[[], bool]  # returns whether all values were finite


class Exchange(ABC):
    """Collectives among `world_size` ranks. All ranks make the same calls in the same order.

    Args:
        rank: rank of this process among them.
        world_size: number of ranks.
        device: device of small control messages ("cuda" for NCCL).
        global_ranks: the rank of each in the whole job, for errors. By default, from 0.

    Attributes:
        members: the ranks in the job that each rank stands for: itself, or all ranks of its node.
        checksum: whether the frames of this exchange contain checksums of their messages.
        must_conclude: whether :meth:`conclude` must communicate.
    """

    checksum = False
    must_conclude = False
    # Dtypes of which the backend's own mean has the bits of plain DDP.
    _averages: tuple[torch.dtype, ...] = ()
    _levels: "tuple[Exchange, ...]"

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.global_ranks = tuple(global_ranks or range(world_size))
        self.members: tuple[tuple[int, ...], ...] = tuple((each,) for each in self.global_ranks)
        self._load, self._levels = Load(), (self,)
        # Of this step. Headers stay on an accelerator: reading them would make the host wait. Of
        # those on the host, this list has the ones that are wrong.
        self._headers: list[tuple[Tensor, Origin]] = []
        self._asked: list[Asked] = []
        # From the last step, with what they stand for: the headers that this rank expected, and the
        # numbers of its concluding message.
        self._expected: tuple[list[tuple[Frames, int]], Tensor] = [], torch.empty(0)
        self._numbers: tuple[list[int], Tensor] = [], torch.empty(0)

    @staticmethod
    def split(inside: "Exchange", between: "Exchange") -> "tuple[Exchange, Exchange]":
        """Make two exchanges the levels of one hierarchy, which share counters and findings."""
        inside._levels = between._levels = (between, inside)
        return inside, between

    @property
    def shard(self) -> int:
        """Which part of the values this rank averages: on two levels, its rank inside."""
        return next((level.rank for level in self._levels if level is not self), 0)

    # --- To be implemented by a subclass, without counting bytes ---

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
        """Replace `values` (1-D, contiguous) with their sum, or with the mean of plain DDP."""
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
        """As :meth:`all_reduce_max`, for the ranks of this level."""
        self._load.control += numbers.nbytes * (self.world_size - 1)
        return self._all_gather(numbers).view(self.world_size, -1).amax(0)

    def same(self, number: int) -> bool:
        """Whether all ranks of this level have the same 63-bit number."""
        # One message finds the minimum as well as the maximum, as the maximum of the negatives.
        bounds = torch.tensor([number, -number], dtype=torch.int64, device=self.device)
        highest, lowest = self.level_max(bounds).tolist()
        return bool(highest == -lowest)

    def sum_control(self, numbers: Tensor) -> Callable[[], Tensor]:
        """Add up `numbers` (1-D) on all levels, in place; the result waits for a CPU copy."""
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

    def leave(self, error: BaseException) -> None:  # noqa: B027
        """End the connections of this level, if it has its own, after an error."""

    def _close(self) -> None:  # noqa: B027
        pass

    def count(self, load: Load) -> None:
        """Count bytes that another exchange of the same ranks moves for this one."""
        self._load.add(load)

    def take_traffic(self, dense_bytes: int) -> Traffic:
        """Return the bytes since the last call, with those of plain DDP; reset the counters."""
        first, *others = self._levels
        traffic, first._load = first._load.traffic(first.world_size, dense_bytes), Load()
        for level in others:
            inside, level._load = level._load.traffic(level.world_size), Load()
            traffic.inside += inside.sent
            traffic.control += inside.control
        return traffic

    # --- Values that must match on all ranks ---

    def verify(
        self,
        what: str,
        values: dict[str, Any],
        advice: str = "",
        on_level: dict[str, Any] | None = None,
    ) -> None:
        """Raise RankMismatchError on every rank of all levels unless `values` match, as text.

        The error names the call `what`. Values `on_level` must match only on this level.
        """
        found: RankMismatchError | None = None
        compared = {"error": "none", **values, **(on_level or {})}
        for level in (self, *(each for each in self._levels if each is not self)):
            try:
                level._verify(what, compared, advice)
            except RankMismatchError as mismatch:
                found = found or mismatch
            # Pass a mismatch on to the other level. One of its ranks is in every group of this one,
            # so all ranks find it.
            compared = {"error": "none", **values} | ({"error": found} if found else {})
        if found is not None:
            raise found

    def _verify(self, what: str, values: dict[str, Any], advice: str) -> None:
        # Compare `what` as well, to detect ranks that are in different calls.
        mine = {"call": what, **{name: str(value) for name, value in values.items()}}
        # Compare a digest first: the values themselves can be long, and almost always match.
        digest = hashlib.sha256(repr(mine).encode()).digest()
        if self.same(int.from_bytes(digest[:7], "big")):
            return
        by_rank = self.gather_objects(mine)
        differing = []
        for name in mine:
            found = [theirs[name] for theirs in by_rank if name in theirs]
            if len(set(found)) > 1 and len(found) == len(by_rank):
                differing.append(f"{name}: {_ranks_by_value(found, self.global_ranks)}")
        problem = f"{what}: values that must match on all ranks differ: {'; '.join(differing)}"
        raise RankMismatchError(f"{problem}. {advice}".strip())

    def build(
        self,
        what: str,
        arguments: dict[str, Any],
        make: Callable[[], tuple[Built, dict[str, Any]]],
        advice: str = "",
    ) -> Built:
        """Return the object that `make` builds on every rank, or raise on every rank.

        `make` also returns values that must match, as `arguments` must. A value replaces the
        argument of the same name, as a parsed spec replaces its string. The error of `make` is
        raised if it is the same on all ranks, and otherwise RankMismatchError.
        """
        try:
            built, values = make()
        except Exception as error:
            # First tell the others: they would wait in `verify` for a rank that fails alone.
            self.verify(what, {**arguments, "error": str(error).partition("\n")[0]}, advice)
            raise
        self.verify(what, {**arguments, "error": "none", **values}, advice)
        return built

    # --- Whether a step counts ---

    def check(self, frames: Frames, received: Tensor, senders: Sequence[int]) -> None:
        """Check the headers of received frames, rows of uint8, for :meth:`conclude` to raise.

        `senders` are the ranks that sent each row; or each frame, row by row, also empty ones.
        """
        if not frames.nbytes:
            return
        self.must_conclude = True
        headers = frames.headers(received)
        if headers is None:
            return
        if frames.on_host or received.nbytes > _KEPT:
            headers = headers.clone()
        self._headers.append((headers, Origin(frames, len(received), senders, self.global_ranks)))

    def max_at_end(self, numbers: Iterable[int]) -> list[int]:
        """As :meth:`all_reduce_max` for numbers below 256; `conclude` fills what is returned."""
        combined: list[int] = []
        self._asked.append((list(numbers), combined))
        self.must_conclude = True
        return combined

    def same_at_end(self, digest: bytes) -> Callable[[], bool]:
        """As :meth:`same` for a short digest; what is returned has the answer after `conclude`."""
        # As in `same`: the complements find the minimum.
        bounds = self.max_at_end([*digest, *digest.translate(_COMPLEMENTS)])
        count = len(digest)
        return lambda: bytes(bounds[:count]).translate(_COMPLEMENTS) == bytes(bounds[count:])

    def conclude(self, finite: Tensor | None, where: str, advice: str) -> Conclusion:
        """Ask whether the values of this step are `finite`, a bool, on all ranks of all levels.

        This sends at most one message. Only the result's ``wait`` waits, and raises WireError on
        every rank, with the senders, if a frame received since the last call was not intact.
        """
        received: list[tuple[Tensor, Origin]] = []
        asked: list[Asked] = []
        # Without frames, every rank has checked the whole mean, so `finite` matches already; but
        # not on two levels, where each has checked its piece.
        communicates = finite is not None and len(self._levels) > 1
        for level in self._levels:
            communicates = communicates or level.must_conclude
            received += level._headers
            asked += level._asked
        self.reset()
        if finite is None and not communicates:
            return Conclusion(None, lambda: True)
        differences = self._differences(received) if received else None
        flags = self._own_flags(differences, finite, asked)
        if communicates:
            flags = self.all_reduce_max(flags)
        # Not the headers: their memory may be that of whole messages.
        origins = [origin for _, origin in received]
        wait = host.copy_from(flags)

        def conclusion() -> bool:
            damaged, nonfinite, *numbers = wait().tolist()
            for mine, maxima in asked:
                maxima[:], numbers = numbers[: len(mine)], numbers[len(mine) :]
            if damaged:
                senders = sorted(set().union(*self.gather_all(_senders(differences, origins))))
                names = ", ".join(f"rank {each}'s" for each in senders)
                raise WireError(
                    f"cannot use {names} message of {where}: it was damaged on the way, or has "
                    f"another version, length or layout than the receiver expects. {advice}"
                )
            return not nonfinite

        return Conclusion(flags, conclusion)

    def _own_flags(
        self, differences: Tensor | None, finite: Tensor | None, asked: Sequence[Asked]
    ) -> Tensor:
        flags = [0, 0, *(number for numbers, _ in asked for number in numbers)]
        # These are usually the numbers of the last step, and on the device already.
        if flags != self._numbers[0]:
            there = host.copy_to(torch.tensor(flags, dtype=torch.uint8), self.device)
            self._numbers = flags, there
        damaged, nonfinite, others = torch.split(self._numbers[1], [1, 1, len(flags) - 2])
        if differences is not None:
            damaged = differences.any().view(1).view(torch.uint8)
        if finite is not None:
            nonfinite = finite.logical_not().to(self.device).view(1).view(torch.uint8)
        return torch.cat([damaged, nonfinite, others])

    def _differences(self, received: Sequence[tuple[Tensor, Origin]]) -> Tensor:
        # The tensors of one averager can be on several devices.
        headers = torch.cat([each.to(self.device) for each, _ in received])
        kinds = [(origin.frames, origin.rows) for _, origin in received]
        if kinds != self._expected[0]:
            rows = [f.expected.to(self.device) for f, count in kinds for _ in range(count)]
            self._expected = kinds, torch.cat(rows)
        return headers.bitwise_xor(self._expected[1])

    def reset(self) -> None:
        """Discard the findings of a step that has ended or failed."""
        for level in self._levels:
            level._headers.clear()
            level._asked.clear()
            level.must_conclude = False


def _senders(differences: Tensor | None, origins: Sequence[Origin]) -> set[int]:
    found = iter(() if differences is None else differences.any(1).tolist())
    names = (name for origin in origins for name in origin.names())
    return {name for name, differs in zip(names, found, strict=False) if differs}


def _ranks_by_value(values: list[str], ranks: Sequence[int]) -> str:
    """Return "value on rank 0, other value on ranks 1, 2"."""
    holders: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        holders.setdefault(value, []).append(rank)
    shown = []
    for value, held in holders.items():
        short = value if len(value) <= 200 else f"{value[:200]}... ({len(value)} characters)"
        shown.append(f"{short} on rank{'s' if len(held) > 1 else ''} {', '.join(map(str, held))}")
    return ", ".join(shown)
