"""Exchange: the only file that calls collectives, and the one that counts their bytes.

Every call is straight-line and blocking for the stream or thread that makes it. Nothing is chained
on futures: a second collective issued from a callback can pair with the wrong one on another rank.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchcomp import wire
from torchcomp.errors import RankMismatchError, WireError

Built = TypeVar("Built")

# torch 2.13 renames the collective and deprecates its old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_COPIED = 2**20
"""Bytes of a message of which a copy for every rank is made; latency matters less beyond."""


def sum_bytes(nbytes: int, world_size: int) -> int:
    """Bytes that a rank sends (and receives) in a ring all-reduce of `nbytes`."""
    return 2 * (world_size - 1) * nbytes // world_size


def gather_bytes(nbytes: int, world_size: int) -> int:
    """Bytes that a rank sends (and receives) in an all-gather of `nbytes` a rank."""
    return (world_size - 1) * nbytes


@dataclass
class Traffic:
    """Bytes of payload that crossed this rank's link.

    Attributes:
        sent: bytes sent.
        received: bytes received.
        dense: bytes that plain DDP would have sent instead.
    """

    sent: int = 0
    received: int = 0
    dense: int = 0

    def add(self, other: "Traffic") -> None:
        """Add another count to this one."""
        self.sent += other.sent
        self.received += other.received
        self.dense += other.dense


@dataclass
class Load:
    """What a step moves over a rank's link.

    Attributes:
        summed: bytes that went through all-reduces.
        sent: bytes sent otherwise.
        received: bytes received otherwise.
    """

    summed: int = 0
    sent: int = 0
    received: int = 0

    def add(self, other: "Load") -> None:
        """Add another load to this one."""
        self.summed += other.summed
        self.sent += other.sent
        self.received += other.received

    def traffic(self, world_size: int, dense: int) -> Traffic:
        """The bytes that crossed the link, beside the `dense` ones of plain DDP."""
        around = sum_bytes(self.summed, world_size)
        return Traffic(around + self.sent, around + self.received, dense)


class Exchange:
    """Collectives of one process group, with their traffic.

    Args:
        group: the process group; None is the default group.
        device: where small control messages live ("cuda" for NCCL).

    Attributes:
        rank: this process's rank in the group.
        world_size: number of ranks in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._load = Load()
        self._found: list[tuple[int, Tensor]] = []

    def sum(self, values: Tensor) -> None:
        """All-reduce `values` (1-D, contiguous, floating point) in place."""
        dist.all_reduce(values, group=self.group)
        self._load.summed += values.nbytes

    def gather(self, message: Tensor) -> list[Tensor]:
        """Every rank's `message` (1-D uint8, the same length everywhere), in rank order."""
        length = message.numel()
        rows = self._everyones(message, [length] * self.world_size)
        moved = gather_bytes(length, self.world_size)
        self._load.add(Load(sent=moved, received=moved))
        return list(rows.view(self.world_size, length).unbind())

    def scatter(self, outgoing: Tensor, sizes: Sequence[int], arriving: Sequence[int]) -> Tensor:
        """Send every rank its part of `outgoing`, and receive what they send here.

        Args:
            outgoing: 1-D; the parts for rank 0, 1, ... one after another.
            sizes: elements of each part.
            arriving: elements that each rank sends here.

        Returns:
            1-D of ``sum(arriving)`` elements, in rank order.
        """
        received = outgoing.new_empty(sum(arriving))
        dist.all_to_all_single(received, outgoing, list(arriving), list(sizes), group=self.group)
        item = outgoing.element_size()
        sent, came = sum(sizes) - sizes[self.rank], sum(arriving) - arriving[self.rank]
        self._load.add(Load(sent=item * sent, received=item * came))
        return received

    def gather_varied(self, mine: Tensor, sizes: Sequence[int]) -> Tensor:
        """Every rank's `mine`, one after another, where rank r's has ``sizes[r]`` elements."""
        moved = mine.element_size() * (self.world_size - 1) * mine.numel()
        came = mine.element_size() * (sum(sizes) - sizes[self.rank])
        self._load.add(Load(sent=moved, received=came))
        return self._everyones(mine, sizes)

    def sum_counts(self, counts: Tensor) -> Tensor:
        """The sum of all ranks' `counts` (1-D, integers), exactly.

        Over gloo every rank adds a part up, and hands it out: twice the latency of the link, where
        its ring takes that twice for every other rank.
        """
        if counts.is_cuda:
            dist.all_reduce(counts, group=self.group)
            self._load.summed += counts.nbytes
            return counts
        sizes = [part.numel() for part in torch.tensor_split(counts, self.world_size)]
        mine = self.scatter(counts, sizes, [sizes[self.rank]] * self.world_size)
        added = mine.view(self.world_size, -1).sum(0, dtype=counts.dtype)
        return self.gather_varied(added, sizes)

    def receive(self, sender: int, frame: Tensor, length: int) -> Tensor:
        """Check a frame, noting what is found, and return its message (1-D uint8, a view).

        What is wrong with it is raised by :meth:`conclude`, by all ranks together: raised here, it
        would leave the others waiting.
        """
        self._found.append((sender, wire.inspect(frame, length)))
        return wire.payload(frame, length)

    @property
    def concludes(self) -> bool:
        """Whether frames came in since the last :meth:`conclude`, which then asks all ranks."""
        return bool(self._found)

    def conclude(self, finite: Tensor, where: str, advice: str) -> bool:
        """Learn what the ranks found in this step; if frames came in, all ranks call it alike.

        Args:
            finite: scalar bool, whether all that this rank has looked at is finite.
            where: what is exchanged, for the error.
            advice: what the step left behind.

        Returns:
            Whether it is finite on all ranks.

        Raises:
            WireError: if a frame that came in since the last call was not intact; on all ranks,
                naming the senders and what is wrong with their messages.
        """
        if not self._found:
            return bool(finite)
        worst = torch.zeros(self.world_size + 1, dtype=torch.uint8, device=self.device)
        senders, found = zip(*self._found, strict=True)
        index = torch.tensor(senders, device=self.device)
        worst.scatter_reduce_(0, index, torch.stack(found), "amax")
        worst[-1] = ~finite
        self._found.clear()
        *findings, nonfinite = self.any_rank(worst).tolist()
        bad = [f"rank {r}'s {wire.FINDINGS[f]}" for r, f in enumerate(findings) if f]
        if bad:
            raise WireError(f"a message of {where} cannot be used: {'; '.join(bad)}. {advice}")
        return not nonfinite

    def forget(self) -> None:
        """Forget the frames of a step that did not finish."""
        self._found.clear()

    def any_rank(self, flags: Tensor) -> Tensor:
        """Per element, whether a rank has a non-zero flag (1-D integer tensor); the same on all."""
        rows = self._everyones(flags, [flags.numel()] * self.world_size)
        return rows.view(self.world_size, -1).amax(0)

    def _everyones(self, mine: Tensor, sizes: Sequence[int]) -> Tensor:
        """Every rank's `mine`, one after another.

        Over gloo every rank sends each other its own copy, unless that is large. gloo's all-gather
        passes everything on around a ring, and its all-reduce twice around: as many bytes, but the
        latency of the link as many times as there are other ranks, or twice that.
        """
        received = mine.new_empty(sum(sizes))
        if len(set(sizes)) == 1 and (mine.is_cuda or mine.nbytes > _COPIED):
            _all_gather(received, mine, group=self.group)
        elif sum(sizes):
            outgoing = mine.repeat(self.world_size)
            split = [mine.numel()] * self.world_size
            dist.all_to_all_single(received, outgoing, list(sizes), split, group=self.group)
        return received

    def same_everywhere(self, numbers: list[int]) -> bool:
        """Whether all ranks hold the same list of integers (of one length)."""
        values = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        bounds = torch.cat([values, -values])
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=self.group)
        highest, lowest = bounds.view(2, -1).unbind()
        return bool(torch.equal(highest, -lowest))

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in rank order. Slow: for errors, not for training."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def require_same(self, what: str, facts: dict[str, Any], advice: str = "") -> None:
        """Raise on all ranks, with each rank's value, unless all ranks hold equal `facts`.

        Args:
            what: what is being compared, for the error.
            facts: name -> printable value; compared as text.
            advice: what to do about it, appended to the error.

        Raises:
            RankMismatchError: listing every fact that differs and who holds which value.
        """
        mine = {name: str(value) for name, value in facts.items()}
        if self.same_everywhere([_digest(repr(mine))]):
            return
        everyone = self.gather_objects(mine)
        common = [name for name in mine if all(name in theirs for theirs in everyone)]
        lines = [_spread(name, [theirs[name] for theirs in everyone]) for name in common]
        differing = "; ".join(line for line in lines if line)
        raise RankMismatchError(f"{what}: ranks disagree. {differing}. {advice}".strip())

    def agree(
        self,
        what: str,
        given: dict[str, Any],
        build: Callable[[], tuple[Built, dict[str, Any]]],
        advice: str = "",
    ) -> Built:
        """Build something on every rank alike, or raise on every rank.

        Args:
            what: what is being built, for the error.
            given: this rank's arguments, compared if nothing can be built from them.
            build: returns what was built and the facts that must be the same on all ranks.
            advice: what to do if they are not.

        Raises:
            RankMismatchError: if the facts differ, or only some ranks fail to build.
            Exception: what `build` raised, if it did on all ranks alike.
        """
        problem: Exception | None = None
        facts: dict[str, Any] = {}
        try:
            built, facts = build()
        except Exception as error:
            problem = error
        self.require_same(what, {**given, "problem": _first_line(problem), **facts}, advice)
        if problem is not None:
            raise problem
        return built

    def take_traffic(self, nbytes: int, steps: int = 1) -> Traffic:
        """Bytes of payload since the last call; control messages are not counted.

        Args:
            nbytes: bytes of gradients that plain DDP would have reduced in a step instead.
            steps: number of steps that the call stands for.
        """
        load, self._load = self._load, Load()
        return load.traffic(self.world_size, steps * sum_bytes(nbytes, self.world_size))


def _first_line(problem: Exception | None) -> str:
    return "none" if problem is None else str(problem).partition("\n")[0]


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _spread(name: str, values: list[Any]) -> str:
    holders: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    if len(holders) == 1:
        return ""
    return f"{name}: " + ", ".join(
        f"{_short(value)} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        for value, ranks in holders.items()
    )


def _short(value: Any, longest: int = 200) -> str:
    text = str(value)
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"
