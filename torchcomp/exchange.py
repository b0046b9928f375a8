"""Exchange: the only file that calls collectives, and the one that counts their bytes.

Every call is straight-line and blocking for the stream or thread that makes it. Nothing is chained
on futures: a second collective issued from a callback can pair with the wrong one on another rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchcomp import wire
from torchcomp.consensus import Consensus
from torchcomp.errors import WireError
from torchcomp.traffic import Load, Traffic, gather_bytes, sum_bytes

# torch 2.13 renames the collective and deprecates its old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_COPIED = 2**20
"""Bytes of a message of which a copy for every rank is made; latency matters less beyond."""


@dataclass(frozen=True)
class Heard:
    """Every rank's control message, and which of them cannot be used.

    Attributes:
        rows: the numbers of each rank, in rank order.
        damaged: ranks whose check number does not fit; noted for :meth:`Exchange.conclude`.
        absent: ranks that abstained.
    """

    rows: list[Tensor]
    damaged: list[int]
    absent: list[int]


class Exchange(Consensus):
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
        rows = self._everyones(message)
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
        self._all_to_all(received, outgoing, arriving, sizes)
        self._count(outgoing.element_size(), sizes, arriving)
        return received

    def gather_varied(self, mine: Tensor, sizes: Sequence[int]) -> Tensor:
        """Every rank's `mine`, one after another, where rank r's has ``sizes[r]`` elements."""
        copies = [mine.numel()] * self.world_size
        return self.scatter(mine.repeat(self.world_size), copies, sizes)

    def scatter_numbers(self, parts: Sequence[Tensor], arriving: Sequence[int]) -> Heard:
        """Send every rank its part of a control message, and receive what they send here.

        Each part travels with a check number. What does not fit is noted, not raised.

        Args:
            parts: by receiver; 1-D, all int32 or all int64.
            arriving: how many numbers each rank sends here.
        """
        return self._trade_numbers([wire.seal_numbers(part) for part in parts], arriving)

    def gather_numbers(self, mine: Tensor, sizes: Sequence[int]) -> Heard:
        """Every rank's control message `mine`, of ``sizes[r]`` numbers; see `scatter_numbers`."""
        return self._trade_numbers([wire.seal_numbers(mine)] * self.world_size, sizes)

    def abstain(self, room: Sequence[int]) -> None:
        """Send nothing where the others exchange messages next, and drop what they send here.

        A rank does so that can no longer tell how long their messages are. A process group must
        take messages that are shorter than announced, as gloo does.

        Args:
            room: by rank, bytes that its message has at most.
        """
        places = [0 if rank == self.rank else size for rank, size in enumerate(room)]
        dropped = torch.empty(sum(places), dtype=torch.uint8, device=self.device)
        self._all_to_all(dropped, dropped[:0], places, [0] * self.world_size)

    def receive(self, sender: int, frame: Tensor, length: int) -> Tensor:
        """Check a frame, noting what is found, and return its message (1-D uint8, a view).

        What is wrong with it is raised by :meth:`conclude`, by all ranks together: raised here, it
        would leave the others waiting.
        """
        self._found.append((sender, wire.inspect(frame, length)))
        return wire.payload(frame, length)

    def note(self, sender: int, finding: int) -> None:
        """Note what is wrong with a rank's control message, for :meth:`conclude` to raise."""
        self._found.append((sender, torch.tensor(finding, dtype=torch.uint8, device=self.device)))

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
        # Where counts are damaged, other messages cannot be read for that reason alone.
        told = [wire.MISCOUNTED] if wire.MISCOUNTED in findings else list(wire.FINDINGS)
        bad = [f"rank {r}'s {wire.FINDINGS[f]}" for r, f in enumerate(findings) if f in told]
        if bad:
            raise WireError(f"a message of {where} cannot be used: {'; '.join(bad)}. {advice}")
        return not nonfinite

    def forget(self) -> None:
        """Forget the frames of a step that did not finish."""
        self._found.clear()

    def any_rank(self, flags: Tensor) -> Tensor:
        """Per element, whether a rank has a non-zero flag (1-D integer tensor); the same on all."""
        rows = self._everyones(flags)
        return rows.view(self.world_size, -1).amax(0)

    def _everyones(self, mine: Tensor) -> Tensor:
        """Every rank's `mine`, of the same length everywhere, one after another.

        Over gloo every rank sends each other its own copy, unless that is large. gloo's all-gather
        passes everything on around a ring: as many bytes, but the latency of the link as many times
        as there are other ranks.
        """
        received = mine.new_empty(mine.numel() * self.world_size)
        if mine.is_cuda or mine.nbytes > _COPIED:
            _all_gather(received, mine, group=self.group)
        else:
            sizes = [mine.numel()] * self.world_size
            self._all_to_all(received, mine.repeat(self.world_size), sizes, sizes)
        return received

    def _trade_numbers(self, sealed: list[Tensor], arriving: Sequence[int]) -> Heard:
        outgoing, sizes = torch.cat(sealed), [message.numel() for message in sealed]
        places = [count + 1 for count in arriving]
        # Filled, because memory that was used before may hold an earlier step's intact message.
        received = outgoing.new_full((sum(places),), wire.UNSENT)
        self._all_to_all(received, outgoing, places, sizes)
        self._count(outgoing.element_size(), sizes, places)
        return self._heard(torch.split(received, places))

    def _heard(self, messages: Sequence[Tensor]) -> Heard:
        findings = [wire.inspect_numbers(message) for message in messages]
        for sender, finding in enumerate(findings):
            if finding != wire.INTACT:
                self.note(sender, finding)
        damaged, absent = (
            [sender for sender, finding in enumerate(findings) if finding == kind]
            for kind in (wire.MISCOUNTED, wire.ABSENT)
        )
        return Heard([message[:-1] for message in messages], damaged, absent)

    def _all_to_all(
        self, received: Tensor, outgoing: Tensor, arriving: Sequence[int], sizes: Sequence[int]
    ) -> None:
        dist.all_to_all_single(received, outgoing, list(arriving), list(sizes), group=self.group)

    def _count(self, itemsize: int, sizes: Sequence[int], arriving: Sequence[int]) -> None:
        sent, came = sum(sizes) - sizes[self.rank], sum(arriving) - arriving[self.rank]
        self._load.add(Load(sent=itemsize * sent, received=itemsize * came))

    def same_everywhere(self, number: int) -> bool:
        """Whether all ranks hold the same 64-bit number."""
        bounds = torch.tensor([number, -number], dtype=torch.int64, device=self.device)
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=self.group)
        highest, lowest = bounds.tolist()
        return bool(highest == -lowest)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in rank order. Slow: for errors, not for training."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def take_traffic(self, nbytes: int, steps: int = 1) -> Traffic:
        """Bytes of payload since the last call; control messages are not counted.

        Args:
            nbytes: bytes of gradients that plain DDP would have reduced in a step instead.
            steps: number of steps that the call stands for.
        """
        load, self._load = self._load, Load()
        return load.traffic(self.world_size, steps * sum_bytes(nbytes, self.world_size))
