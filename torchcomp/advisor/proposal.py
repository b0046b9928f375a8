"""Proposal: what ``LocalSGD(model, optimizer, "auto")`` measures, and the schedule it proposes."""

import logging
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from torchcomp.advisor.moments import Moment, now, seconds
from torchcomp.exchange import Exchange

_log = logging.getLogger(__name__)

STEPS = 50  # that are measured
_FIRST = 5  # steps that do not count: they allocate, and libraries choose algorithms
_LITTLE = 0.1  # an average that takes this share of the rest of a step is not worth saving
_STEPS_OF_ROUNDS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Proposal:
    """A schedule, and the times that it follows from. The same on all ranks."""

    alone: float  # seconds of a step without the average, on the slowest rank
    average: float  # seconds of an average, on the rank that does not wait for others

    @property
    def h(self) -> int:
        """Fewest local steps, as a power of 2, with which the average takes little of the time."""
        found = (h for h in _STEPS_OF_ROUNDS if self.average / h <= _LITTLE * self.alone)
        return next(found, _STEPS_OF_ROUNDS[-1])

    @property
    def schedule(self) -> str:
        """The schedule that is proposed, such as ``"every(8)"``."""
        return f"every({self.h})"

    def __str__(self) -> str:
        now, then = (1000 * (self.alone + self.average / h) for h in (1, self.h))
        times = f"a step takes {now:.3g} ms, of which the average takes {1000 * self.average:.3g}"
        if self.h == 1:
            return f"auto proposes plain DDP, because there is little to win: {times} ms"
        return (
            f"auto proposes {self.schedule}, with which a step would take about {then:.3g} ms. "
            f"Now {times} ms. Training goes on with every(1): local steps change it, so the choice "
            f"is yours. qsr(alpha=..., h_base={self.h}) averages less often as the learning rate "
            "decays"
        )


class Proposing:
    """Measures the first steps, and then makes a proposal and, if this rank `logs`, logs it."""

    def __init__(self, exchange: Exchange, logs: bool) -> None:
        self._exchange, self._logs = exchange, logs
        self._begin = now(exchange.device)
        self._steps: list[tuple[Moment, Moment]] = []  # begin and end of each average
        self.proposal: Proposal | None = None

    def begin(self) -> None:
        if self.proposal is None:
            self._begin = now(self._exchange.device)

    def end(self) -> None:
        """Note that it has ended. All ranks call this after the same step."""
        if self.proposal is not None:
            return
        self._steps.append((self._begin, now(self._exchange.device)))
        if len(self._steps) < STEPS:
            return
        counted, self._steps = self._steps[_FIRST - 1 :], []
        averages = [seconds(*each) for each in counted[1:]]
        alone = [seconds(last, begin) for (_, last), (begin, _) in pairwise(counted)]
        # The shortest average is that of the rank that the others wait for.
        mine = [round(1e9 * median(alone)), -round(1e9 * median(averages))]
        numbers = torch.tensor(mine, dtype=torch.int64, device=self._exchange.device)
        slowest, shortest = self._exchange.all_reduce_max(numbers).tolist()
        self.proposal = Proposal(slowest / 1e9, -shortest / 1e9)
        if self._logs:
            # A warning: without a logger of its own, a script would not show it.
            _log.warning("%s", self.proposal)
