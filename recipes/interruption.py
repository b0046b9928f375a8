"""Stop at a signal: SIGUSR1 and SIGTERM end a run after a checkpoint of all ranks.

A scheduler announces the end of a job with a signal. It can reach all ranks, or only some of them,
and all ranks must end after the same step. So they ask each other every few steps, with an
all-reduce in the background, and read its result when they ask the next time.
"""

import signal
import sys
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from recipes.signals import REQUEUE, SIGNALS


class Interruption:
    """Decides together with the other ranks whether a signal ends the run."""

    def __init__(self, every: int, device: torch.device) -> None:
        self._every, self._device = every, device
        self._received = False
        self._question: tuple[torch.Tensor, dist.Work] | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def after_step(self, step: int) -> bool:
        """Return whether the run ends here. All ranks must call this after every step."""
        if step % self._every:
            return False
        if self._answer():
            return True
        received = torch.tensor([float(self._received)], device=self._device)
        work = dist.all_reduce(received, dist.ReduceOp.MAX, async_op=True)
        self._question = received, work
        return False

    def finish(self) -> None:
        """Wait for the last answer, before the process group is destroyed."""
        self._answer()

    def _answer(self) -> bool:
        if self._question is None:
            return False
        received, work = self._question
        self._question = None
        work.wait()
        return bool(received.item())

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def __enter__(self) -> "Interruption":
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
            # A write of a checkpoint must not fail because a signal arrives.
            signal.siginterrupt(number, False)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def exit_for_requeue() -> NoReturn:
    # torchrun sends SIGTERM to the other ranks as soon as one has ended.
    ignore_signals()
    sys.exit(REQUEUE)


def ignore_signals(*_: object) -> None:
    """Ignore the signals in this process. A DataLoader can call this in its workers."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
