"""Progress: one rank's clock of local steps, and the rounds that it runs through."""

import logging
from dataclasses import dataclass, field

from torchcomp.local_sgd.batches import Batches
from torchcomp.schedules import Horizon, Schedule

_log = logging.getLogger(__package__)


@dataclass
class Round:
    """The round of one fragment that is in progress, or the last one.

    Attributes:
        round_start: steps before it.
        round_end: the step, counted from 1, at whose end it synchronises.
        synced: the step at whose end the fragment synchronised last; 0 before that.
        rates: learning rate of each parameter group at its first step.
        rate_sum: the largest rate of each step since the last synchronisation, added up.
    """

    round_start: int = 0
    round_end: int = 0
    synced: int = 0
    rates: list[float] = field(default_factory=list)
    rate_sum: float = 0.0

    def __str__(self) -> str:
        return f"{self.round_start} to {self.round_end}"

    def begin(
        self,
        step: int,
        schedule: Schedule,
        rates: list[float],
        horizon: Horizon,
        phase: tuple[int, int] = (1, 1),
    ) -> None:
        """Fix the length of the round that the next step begins.

        Args:
            step: optimizer steps so far.
            schedule: the rule for the length.
            rates: learning rates of the parameter groups, of which the rule reads the largest; if
                there are none, it reads 0.
            horizon: ends of warm-up and run.
            phase: numerator and denominator of the part of it that the run's first round takes.

        Raises:
            ScheduleError: if the schedule cannot use the rate; nothing changes.
        """
        rate = max(rates, default=0.0)
        end = schedule.round_end(step, rate, horizon)
        if step == 0:
            numerator, denominator = phase
            end = -(-end * numerator // denominator)
        self.round_start, self.round_end, self.rates = step, end, rates
        if schedule.reads_rate and 2 * (end - step) > horizon.total_steps:
            _log.warning(
                "the round from step %d to %d is most of the run (%d steps), because the learning "
                "rate is %g: no rank averages before its end. If that is a warm-up rate, give "
                "warmup_steps; else compare the schedule's coefficient with the peak rate",
                step,
                end,
                horizon.total_steps,
                rate,
            )

    def mean_rate(self, step: int) -> float:
        """The mean over the steps since the last synchronisation of their largest rates."""
        return self.rate_sum / (step - self.synced)

    def end(self, step: int) -> None:
        """The ranks have synchronised after `step` steps."""
        self.synced = step
        self.rate_sum = 0.0


@dataclass
class Progress:
    """One rank's clock.

    Attributes:
        rounds: of each fragment.
        step: optimizer steps so far, skipped ones included.
        syncs: synchronisations so far.
        batches: what this rank has done with its data.
    """

    rounds: list[Round]
    step: int = 0
    syncs: int = 0
    batches: Batches = field(default_factory=Batches)

    @property
    def next_sync(self) -> int | None:
        """The end of the round in progress that ends first; None if there is none."""
        ends = [each.round_end for each in self.rounds if self.step > each.synced]
        return min(ends, default=None)

    def warn_inside_round(self, horizon: Horizon) -> None:
        """Log that local steps end where the ranks' parameters differ, if they do.

        A script that ends inside a round has as many models as ranks, and may not know it.
        """
        if self.next_sync is not None:
            _log.warning(
                "local steps ended at step %d of %d, inside the round from %s: the ranks' "
                "parameters differ, and what one rank evaluates or saves is its own model only",
                self.step,
                horizon.total_steps,
                " and ".join(map(str, self.rounds)),
            )
