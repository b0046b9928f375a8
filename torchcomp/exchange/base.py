"""Exchange: the collectives of a set of ranks, and the checks of what a step receives."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from torchcomp.engine import host
from torchcomp.exchange.conclusion import Asked, Conclusion, Origin
from torchcomp.exchange.verify import Verifying
from torchcomp.routes.wire import Frames

_KEPT = 2**25
"""Frames of more bytes, about a bucket of DDP, are not kept in memory for their headers."""

_COMPLEMENTS = bytes(255 - byte for byte in range(256))
P = ParamSpec("P")
R = TypeVar("R")


def explained(call: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Pass an error of a method that is a collective to ``exchange.explain(call, error)``."""

    def decorate(collective: Callable[P, R]) -> Callable[P, R]:
        @wraps(collective)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return collective(*args, **kwargs)
            except Exception as error:
                exchange: Any = args[0]
                exchange.explain(call, error)
                raise

        return run

    return decorate


class Exchange(Verifying):
    """Collectives among `world_size` ranks. All ranks make the same calls in the same order.

    Args:
        rank: rank of this process among them.
        world_size: number of ranks.
        device: device of small control messages ("cuda" for NCCL).
        global_ranks: the name of each rank in error messages, which is its rank in the whole job.
            By default, ranks are numbered from 0.

    Attributes:
        members: the ranks in the job that each rank stands for: itself, or all ranks of its node.
        checksum: whether the frames of this exchange contain checksums of their messages.
        must_conclude: whether :meth:`conclude` must communicate, because frames were received or
            numbers were handed to :meth:`max_at_end` since its last call.
    """

    checksum = False
    _levels: "tuple[Exchange, ...]"

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(rank, world_size, device, global_ranks)
        self.must_conclude = False
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
        """Make two exchanges the levels of one hierarchy. They share counters and findings.

        Each rank of an `inside` group is in a different `between` group. :meth:`conclude` and
        :meth:`build`, called on either, then cover all ranks of both.
        """
        inside._levels = between._levels = (between, inside)
        return inside, between

    def check(self, frames: Frames, received: Tensor, senders: Sequence[int]) -> None:
        """Check the headers of received frames, and their checksums if they have any.

        A bad frame does not raise here: the other ranks would wait in their next collective.
        :meth:`conclude` raises instead, on every rank. On an accelerator, nothing is launched
        unless there are checksums: `received` must keep its values until then.

        Args:
            frames: what each row contains.
            received: (count, frames.nbytes) uint8, contiguous, aligned to 8 bytes.
            senders: the rank that sent each row; or each of the frames, row by row, with those of
                empty messages.
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
        """As :meth:`all_reduce_max` for the host's numbers, in the message of :meth:`conclude`.

        Args:
            numbers: from 0 to 255, or flags; as many on every rank.

        Returns:
            A list that is empty until `conclude` fills it with the elementwise maximum over the
            ranks. It stays empty if the step is discarded before.
        """
        combined: list[int] = []
        self._asked.append((list(numbers), combined))
        self.must_conclude = True
        return combined

    def same_at_end(self, digest: bytes) -> Callable[[], bool]:
        """As :meth:`same` for a short digest, in the message of :meth:`conclude`.

        The function that is returned has the answer after it.
        """
        # As in `same`: the complements find the minimum.
        bounds = self.max_at_end([*digest, *digest.translate(_COMPLEMENTS)])
        count = len(digest)
        return lambda: bytes(bounds[:count]).translate(_COMPLEMENTS) == bytes(bounds[count:])

    def conclude(self, finite: Tensor | None, where: str, advice: str) -> bool:
        """Combine the checks of this step over the ranks, with one message and one wait.

        All ranks call this; after a :meth:`split`, all ranks of both levels. If there is nothing to
        combine, it neither communicates nor waits.

        Args:
            finite: scalar bool, whether all values that this rank checked are finite. None if it
                checked none.
            where: the step or call, for the error.
            advice: what state the failed step leaves, for the error.

        Returns:
            Whether the values are finite on all ranks.

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
        differences = self._differences(received) if received else None
        flags = None
        if communicates or finite is not None:
            flags = self._own_flags(differences, finite, asked)
            if communicates:
                flags = self.all_reduce_max(flags)
        # Not the headers: their memory may be that of whole messages.
        origins = [origin for _, origin in received] if received else []
        return Conclusion(self, flags, asked, differences, origins, where, advice)

    def _own_flags(
        self, differences: Tensor | None, finite: Tensor | None, asked: Sequence[Asked]
    ) -> Tensor:
        """Return the flags and numbers of this rank; see :class:`Conclusion`."""
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
        """Return the bits of all headers that are not as expected: int64, a row for each frame."""
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
