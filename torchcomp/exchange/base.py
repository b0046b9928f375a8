"""Exchange: the collectives of a set of ranks, and the checks of what a step receives."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchcomp.engine import host
from torchcomp.exchange.collectives import Collectives
from torchcomp.exchange.traffic import Load
from torchcomp.routes.wire import FINDINGS, Frames
from torchcomp.specs.errors import RankMismatchError, WireError

_KEPT = 2**25
"""Frames of more bytes, about a bucket of DDP, are not kept in memory for their headers."""

_COMPLEMENTS = bytes(255 - byte for byte in range(256))
Built = TypeVar("Built")
Asked = tuple[list[int], list[int]]
"""Numbers of this rank, and a list for the maxima of all ranks."""


class Origin(NamedTuple):
    """What frames this rank received, and from whom."""

    frames: Frames
    rows: int
    senders: Sequence[int]
    ranks: Sequence[int]  # the name of each sender in errors

    def names(self) -> list[int]:
        each = self.rows * len(self.frames.sizes) // len(self.senders)
        names = [self.ranks[sender] for sender in self.senders for _ in range(each)]
        sizes = self.frames.sizes * self.rows
        return [name for name, size in zip(names, sizes, strict=True) if size]


class Conclusion(NamedTuple):
    """The result of the checks of a step on all ranks. It is called to wait for it."""

    flags: Tensor | None  # whether a frame was not intact, a value not finite; and the numbers
    wait: Callable[[], bool]

    def __call__(self) -> bool:
        return self.wait()


class Exchange(Collectives):
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
        self.members = tuple((each,) for each in self.global_ranks)
        self._load, self._levels = Load(), (self,)
        # Of this step. On an accelerator, headers stay there: reading them here would make the host
        # wait in the middle of the step. On the host, only those that are wrong are in this list.
        self._headers: list[tuple[Tensor, Origin]] = []
        self._asked: list[Asked] = []
        # On the device, from the last step: the headers that this rank expected, and the numbers of
        # its concluding message; and what they stand for.
        self._expected: tuple[list[tuple[Frames, int]], Tensor] = [], torch.empty(0)
        self._numbers: tuple[list[int], Tensor] = [], torch.empty(0)

    @staticmethod
    def split(inside: "Exchange", between: "Exchange") -> "tuple[Exchange, Exchange]":
        """Make two exchanges the levels of one hierarchy, which share counters and findings."""
        inside._levels = between._levels = (between, inside)
        return inside, between

    # --- Values that must match on all ranks ---

    def verify(
        self,
        what: str,
        values: dict[str, Any],
        advice: str = "",
        on_level: dict[str, Any] | None = None,
    ) -> None:
        """Raise RankMismatchError on every rank of all levels unless `values` match, as text.

        The error names the call `what`, and ends in `advice`. Those `on_level` must match only on
        the ranks of this exchange.
        """
        found: RankMismatchError | None = None
        compared = {"error": "none", **values, **(on_level or {})}
        for level in (self, *(each for each in self._levels if each is not self)):
            try:
                _verify(level, what, compared, advice)
            except RankMismatchError as mismatch:
                found = found or mismatch
            # Pass a mismatch on to the other level. One of its ranks is in every group of this one,
            # so all ranks find it.
            compared = {"error": "none", **values} | ({"error": found} if found else {})
        if found is not None:
            raise found

    def build(
        self,
        what: str,
        arguments: dict[str, Any],
        make: Callable[[], tuple[Built, dict[str, Any]]],
        advice: str = "",
    ) -> Built:
        """Return the object that `make` builds on every rank, or raise on every rank.

        `make` also returns values that must match, as `arguments` must. A value replaces the
        argument of the same name, as a parsed spec replaces its string.

        Raises:
            RankMismatchError: if arguments or values differ, or `make` fails only on some ranks.
            Exception: the exception of `make`, if it fails on all ranks in the same way.
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

    def conclude(self, finite: Tensor | None, where: str, advice: str) -> bool:
        """Return whether the values of this step are `finite`, a bool, on all ranks of all levels.

        One message and one wait, or none if there is nothing to combine.

        Raises:
            WireError: on every rank, if a frame received since the last call was not intact. It
                names the senders and the findings.
        """
        return self.conclude_later(finite, where, advice)()

    def conclude_later(self, finite: Tensor | None, where: str, advice: str) -> Conclusion:
        """As :meth:`conclude`, but all ranks call what is returned to wait for the result."""
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
        # On a CPU, there is nothing to copy or to wait for.
        wait = None if flags.is_cpu else host.copy_from(flags)

        def conclusion() -> bool:
            found = flags if wait is None else wait()  # the only wait of a step
            damaged, nonfinite, *numbers = found.tolist()
            for mine, maxima in asked:
                maxima[:], numbers = numbers[: len(mine)], numbers[len(mine) :]
            if damaged:
                problems = sorted(set().union(*self.gather_all(_problems(differences, origins))))
                text = f"cannot use a message of {where}: {'; '.join(problems)}. {advice}"
                raise WireError(text)
            return not nonfinite

        return Conclusion(flags, conclusion)

    def _own_flags(
        self, differences: Tensor | None, finite: Tensor | None, asked: Sequence[Asked]
    ) -> Tensor:
        flags = [0, 0]
        for numbers, _ in asked:
            flags += numbers
        if self.device.type == "cpu":
            own = torch.tensor(flags, dtype=torch.uint8)
            if differences is not None:
                own[:1] = differences.any()
            if finite is not None:
                own[1:2] = finite.logical_not()
            return own
        # The numbers are usually those of the last step, and on the device already.
        if flags != self._numbers[0]:
            numbers_there = host.copy_to(torch.tensor(flags, dtype=torch.uint8), self.device)
            self._numbers = flags, numbers_there
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


def _problems(differences: Tensor | None, origins: Sequence[Origin]) -> set[str]:
    found = iter(() if differences is None else differences.tolist())
    return {
        f"rank {name}'s message {FINDINGS[origin.frames.finding(*words)]}"
        for origin in origins
        for name, words in zip(origin.names(), found, strict=False)
        if any(words)
    }


def _verify(level: Exchange, what: str, values: dict[str, Any], advice: str) -> None:
    # Compare `what` as well, to detect ranks that are in different calls.
    mine = {"call": what, **{name: str(value) for name, value in values.items()}}
    # Compare a digest first: the values themselves can be long, and almost always match.
    digest = hashlib.sha256(repr(mine).encode()).digest()
    if level.same(int.from_bytes(digest[:7], "big")):
        return
    by_rank = level.gather_objects(mine)
    common = [name for name in mine if all(name in theirs for theirs in by_rank)]
    lines = [
        _ranks_by_value(name, [theirs[name] for theirs in by_rank], level.global_ranks)
        for name in common
    ]
    differing = "; ".join(line for line in lines if line)
    problem = f"{what}: values that must match on all ranks differ: {differing}"
    raise RankMismatchError(f"{problem}. {advice}".strip())


def _ranks_by_value(name: str, values: list[str], ranks: Sequence[int]) -> str:
    """Return "name: value on rank 0, other value on ranks 1, 2", or "" if all values are equal."""
    holders: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        holders.setdefault(value, []).append(rank)
    if len(holders) == 1:
        return ""
    shown = []
    for value, held in holders.items():
        short = value if len(value) <= 200 else f"{value[:200]}... ({len(value)} characters)"
        shown.append(f"{short} on rank{'s' if len(held) > 1 else ''} {', '.join(map(str, held))}")
    return f"{name}: {', '.join(shown)}"
