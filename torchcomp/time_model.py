"""Time model: the wall clock of parallel training and of local steps.

With T steps, c seconds of a step that exchanges nothing, e seconds of one exchange of the whole
model, and S synchronisations of a schedule,

    parallel:     T c + T max(0, e - o c)
    local steps:  T c + S e

where o is the share of a step under which DDP hides its exchange; local steps average between two
steps and hide nothing. An exchange of m bytes between N machines is an all-reduce around a ring,

    e = 2 (N - 1)/N m/b + 2 (N - 1) l

with the bandwidth b of a machine's link and the latency l from one machine to the next. The ranks
of a machine share its link and add up among themselves in no time.

What it leaves out: ranks that wait for the slowest one, which local steps do less often; the
loading of data; evaluations and checkpoints; averages that are compressed, overlapped, in fragments
or on two levels.
"""

from dataclasses import dataclass

from torchcomp.checks import check_at_least_0, check_count, check_positive, check_share
from torchcomp.component import Component
from torchcomp.errors import SpecError
from torchcomp.learning_rates import LRFunction
from torchcomp.schedules import Horizon, synchronisations
from torchcomp.spec import parse_schedule
from torchcomp.traffic import sum_bytes


@dataclass(frozen=True)
class WallClock:
    """Seconds of a whole run; ``str()`` says them in hours.

    Attributes:
        method: "parallel", or the schedule in canonical form.
        syncs: exchanges of the whole model, S, or T for parallel training.
        compute_seconds: T c.
        exchange_seconds: seconds in which ranks do nothing but exchange.
    """

    method: str
    syncs: int
    compute_seconds: float
    exchange_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds of the run in all."""
        return self.compute_seconds + self.exchange_seconds

    def __str__(self) -> str:
        hours, exchange = self.seconds / 3600, self.exchange_seconds / 3600
        return f"{hours:.3g} h, of which {exchange:.3g} h for {self.syncs:,} exchanges"


@dataclass(frozen=True)
class TimeModel:
    """The constants of a cluster and a model, measured or fitted (:func:`fit_time_model`).

    Attributes:
        step_seconds: c; forward, backward and optimizer of one step on one rank, without any
            exchange, at the batch that each rank will have.
        bandwidth: b, bytes a second that a machine's link sends and, at once, receives in an
            all-reduce: what it reaches, which is less than its name says.
        latency: l, seconds.
        ranks_per_machine: how many ranks share a link; runs with fewer ranks stay in one machine.
        overlap: o, from 0 to 1; how much of a step DDP's exchange of gradients runs under, at best
            the backward pass. 0 where the bandwidth was fitted on parallel runs, because it then
            includes what they hide.
    """

    step_seconds: float
    bandwidth: float
    latency: float = 0.0
    ranks_per_machine: int = 1
    overlap: float = 0.0

    def __post_init__(self) -> None:
        check_positive("step_seconds", self.step_seconds)
        check_positive("bandwidth", self.bandwidth)
        check_at_least_0("latency", self.latency)
        check_share("overlap", self.overlap)
        check_count("ranks_per_machine", self.ranks_per_machine)

    def exchange_seconds(self, nbytes: int, world_size: int) -> float:
        """e: seconds of one all-reduce of the whole model's `nbytes`, as they travel.

        Raises:
            SpecError: if they are not whole numbers above 0, or machines would be part-full.
        """
        check_count("nbytes", nbytes)
        machines = _machines(world_size, self.ranks_per_machine)
        around = sum_bytes(nbytes, machines) / self.bandwidth
        return around + 2 * (machines - 1) * self.latency

    def parallel(self, *, total_steps: int, nbytes: int, world_size: int) -> WallClock:
        """The run of T steps that exchanges its gradients, of `nbytes`, in every one.

        Raises:
            SpecError: as :meth:`exchange_seconds` does.
        """
        steps = Horizon(total_steps).total_steps
        hidden = self.overlap * self.step_seconds
        shown = max(0.0, self.exchange_seconds(nbytes, world_size) - hidden)
        return WallClock("parallel", steps, steps * self.step_seconds, steps * shown)

    def local(
        self,
        spec: str | Component,
        *,
        total_steps: int,
        nbytes: int,
        world_size: int,
        warmup_steps: int = 0,
        lr: LRFunction | None = None,
    ) -> WallClock:
        """The run that averages its parameters when a schedule says so.

        Args:
            spec: the schedule, such as ``"every(4)"`` or ``"qsr(alpha=0.0175, h_base=4)"``.
            total_steps: T.
            nbytes: bytes of the parameters, which are averaged in float32 or wider.
            world_size: number of ranks.
            warmup_steps: W.
            lr: for a schedule that reads it, as for :func:`torchcomp.sync_steps`.

        Raises:
            SpecError: if an argument cannot be used.
            ScheduleError: if the schedule cannot use a rate.
        """
        schedule = parse_schedule(spec)
        if lr is None and schedule.reads_lr:
            raise SpecError(f"the time of '{schedule}' needs lr=, a function of the step")
        syncs = len(synchronisations(schedule, lr, Horizon(total_steps, warmup_steps)))
        exchanging = syncs * self.exchange_seconds(nbytes, world_size)
        return WallClock(str(schedule), syncs, total_steps * self.step_seconds, exchanging)


def fit_time_model(
    *,
    parallel_seconds: float,
    local_seconds: float,
    total_steps: int,
    syncs: int,
    nbytes: int,
    world_size: int,
    ranks_per_machine: int = 1,
) -> TimeModel:
    """The step time and bandwidth that explain a parallel run and one of local steps exactly.

    Two equations in two unknowns, with latency and overlap 0: e = (P - L)/(T - S), c = P/T - e.

    Args:
        parallel_seconds: P, wall clock of T parallel steps.
        local_seconds: L, wall clock of T local steps with S synchronisations, on the same cluster.
        total_steps: T.
        syncs: S.
        nbytes: bytes of the whole model, alike in both.
        world_size: number of ranks, in two machines at least.
        ranks_per_machine: how many of them share a link.

    Raises:
        SpecError: if an argument cannot be used, or no positive constants explain the times.
    """
    total_steps = Horizon(total_steps).total_steps
    check_count("syncs", syncs, most=total_steps - 1)
    check_count("nbytes", nbytes)
    check_positive("parallel_seconds", parallel_seconds)
    check_positive("local_seconds", local_seconds)
    around = sum_bytes(nbytes, _machines(world_size, ranks_per_machine))
    if not around:
        raise SpecError(
            f"{world_size} ranks, {ranks_per_machine} a machine, are one machine, and a link is "
            "fitted between two or more"
        )
    exchange = (parallel_seconds - local_seconds) / (total_steps - syncs)
    step = parallel_seconds / total_steps - exchange
    if exchange <= 0 or step <= 0:
        raise SpecError(
            f"no exchange and step of positive length explain {parallel_seconds:g} s with "
            f"{total_steps:,} exchanges and {local_seconds:g} s with {syncs:,}: fewer exchanges "
            "must save time, and less than in proportion"
        )
    return TimeModel(step, around / exchange, ranks_per_machine=ranks_per_machine)


def _machines(world_size: int, ranks_per_machine: int) -> int:
    check_count("world_size", world_size)
    check_count("ranks_per_machine", ranks_per_machine)
    if world_size > ranks_per_machine and world_size % ranks_per_machine:
        raise SpecError(
            f"world_size={world_size} does not fill machines of ranks_per_machine="
            f"{ranks_per_machine}: the model knows full machines, or one"
        )
    return max(1, world_size // ranks_per_machine)
