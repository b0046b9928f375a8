"""Conclusion: whether a step counts, combined over the ranks in one message."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from torchcomp.engine import host
from torchcomp.exchange.collectives import Collectives
from torchcomp.routes.wire import FINDINGS, Frames
from torchcomp.specs.errors import WireError

Asked = tuple[list[int], list[int]]
"""Numbers of this rank, and a list for the maxima of all ranks."""


class Origin(NamedTuple):
    """What frames this rank received, and from whom."""

    frames: Frames  # what each row contained
    rows: int
    senders: Sequence[int]  # of each row; or of each frame, row by row
    ranks: Sequence[int]  # the name of each sender in errors

    def names(self) -> list[int]:
        """Return the name of the sender of each frame whose message is not empty."""
        each = self.rows * len(self.frames.sizes) // len(self.senders)
        names = [self.ranks[sender] for sender in self.senders for _ in range(each)]
        sizes = self.frames.sizes * self.rows
        return [name for name, size in zip(names, sizes, strict=True) if size]


@dataclass(eq=False)
class Conclusion:
    """The result of the checks of a step on all ranks. It is called to wait for it.

    Attributes:
        exchange: the ranks.
        flags: uint8, on the exchange's device: whether a frame was not intact on any rank, whether
            a value was not finite, and the numbers of `asked`. None if nothing was checked.
        asked: the numbers, in their order.
        differences: the bits of the headers of frames from `origins`, in their order, that are not
            as expected; None if all are.
        origins: of the frames.
        where: the step or call, for the error.
        advice: what state the failed step leaves, for the error.
    """

    exchange: Collectives
    flags: Tensor | None
    asked: Sequence[Asked]
    differences: Tensor | None
    origins: Sequence[Origin]
    where: str
    advice: str

    def __post_init__(self) -> None:
        # On a CPU, there is nothing to copy or to wait for.
        flags = self.flags
        self._wait = None if flags is None or flags.is_cpu else host.copy_from(flags)

    def __call__(self) -> bool:
        """Return whether the values are finite on all ranks, which all call this.

        Raises:
            WireError: on every rank, if a frame was not intact. It names the senders.
        """
        if self.flags is None:
            return True
        flags = self.flags if self._wait is None else self._wait()  # the only wait of a step
        damaged, nonfinite, *numbers = flags.tolist()
        for mine, maxima in self.asked:
            maxima[:], numbers = numbers[: len(mine)], numbers[len(mine) :]
        if damaged:
            raise self._error()
        return not nonfinite

    def _error(self) -> WireError:
        problems = set()
        found = iter(() if self.differences is None else self.differences.tolist())
        for origin in self.origins:
            for name, words in zip(origin.names(), found, strict=False):
                if any(words):
                    finding = FINDINGS[origin.frames.finding(*words)]
                    problems.add(f"rank {name}'s message {finding}")
        listed = "; ".join(sorted(set().union(*self.exchange.gather_all(problems))))
        return WireError(f"cannot use a message of {self.where}: {listed}. {self.advice}")
