"""Time model: predict the wall clock of parallel training and of training with local steps.

    parallel:     T c + T max(0, e - o c)
    local steps:  T c + S e

- T: steps of the run;
- S: synchronisations of the schedule;
- c: seconds of one step without communication;
- e: seconds of one exchange of the whole model;
- o: fraction of a step that DDP overlaps with its exchange. Local steps average between two steps
  and overlap nothing.

An exchange of m bytes between N machines is a ring all-reduce:

    e = 2 (N - 1)/N m/b + 2 (N - 1) l

- b: bandwidth of a machine's link;
- l: latency from one machine to the next.

The ranks of one machine share its link. Their own reduction is assumed to take no time.

The model does not include: waiting for the slowest rank, which local steps do less often; data
loading; evaluation and checkpoints; averages that are compressed, overlapped, in fragments or on
two levels.
"""

from dataclasses import dataclass

from torchcomp.checks import check_at_least_0, check_count, check_positive, check_share
from torchcomp.component import Component
from torchcomp.errors import SpecError
from torchcomp.learning_rates import LRFunction
from torchcomp.local_sgd.schedules import Horizon, synchronisations
from torchcomp.spec import parse_schedule
from torchcomp.traffic import sum_bytes


@dataclass(frozen=True)
class WallClock:
    """Wall clock of a whole run. ``str()`` prints it in hours.

    Attributes:
        method: "parallel", or the schedule in canonical form.
        syncs: exchanges of the whole model: S, or T for parallel training.
        compute_seconds: T c.
        exchange_seconds: seconds of communication that no computation overlaps.
    """

    method: str
    syncs: int
    compute_seconds: float
    exchange_seconds: float

    @property
    def seconds(self) -> float:
        """Total seconds of the run."""
        return self.compute_seconds + self.exchange_seconds

    def __str__(self) -> str:
        hours, exchange = self.seconds / 3600, self.exchange_seconds / 3600
        return f"{hours:.3g} h, of which {exchange:.3g} h for {self.syncs:,} exchanges"


@dataclass(frozen=True)
class TimeModel:
    """The constants of a cluster and a model, measured or fitted (:func:`fit_time_model`).

    Attributes:
        step_seconds: c, seconds of forward, backward and optimizer step on one rank without
            communication, at the batch size per rank of the run.
        bandwidth: b, bytes per second that a machine's link sends, and at the same time receives,
            in an all-reduce. Use the measured value, which is below the nominal one.
        latency: l, seconds.
        ranks_per_machine: ranks that share a link. Runs with at most this many ranks use one
            machine.
        overlap: o, from 0 to 1, the fraction of a step that overlaps with DDP's gradient exchange;
            at most the backward pass. Use 0 if the bandwidth was fitted on parallel runs, because
            the fitted value then already includes the overlap.
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
        """Return e, the seconds of one all-reduce of the whole model.

        Args:
            nbytes: bytes of the model in the dtype of the all-reduce.
            world_size: number of ranks.

        Raises:
            SpecError: if an argument is not an integer above 0, or the ranks do not fill
                their machines.
        """
        check_count("nbytes", nbytes)
        machines = _machines(world_size, self.ranks_per_machine)
        # The ring has 2 (N - 1) stages. On one machine both terms are 0.
        around = sum_bytes(nbytes, machines) / self.bandwidth
        return around + 2 * (machines - 1) * self.latency

    def parallel(self, *, total_steps: int, nbytes: int, world_size: int) -> WallClock:
        """Predict a run that all-reduces its gradients, `nbytes`, in each of `total_steps` steps.

        Raises:
            SpecError: as in :meth:`exchange_seconds`.
        """
        # Horizon also checks the number of steps.
        steps = Horizon(total_steps).total_steps
        hidden = self.overlap * self.step_seconds
        # The overlap hides at most the whole exchange.
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
        """Predict a run that averages its parameters by a schedule.

        Args:
            spec: the schedule, such as ``"every(4)"`` or ``"qsr(alpha=0.0175, h_base=4)"``.
            total_steps: T.
            nbytes: bytes of the parameters, which are averaged in float32 or wider.
            world_size: number of ranks.
            warmup_steps: W.
            lr: for a schedule that reads it, as for :func:`torchcomp.sync_steps`.

        Raises:
            SpecError: if an argument is invalid.
            ScheduleError: if the schedule cannot use a learning rate.
        """
        schedule = parse_schedule(spec)
        if lr is None and schedule.reads_lr:
            raise SpecError(
                f"'{schedule}' depends on the learning rate: pass lr, a function of the step"
            )
        # `overlap` does not apply: the ranks wait for the average before their next step.
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
    """Fit a time model to a parallel run and a run with local steps.

    The fit is exact. It solves two equations for step time and bandwidth, with latency and overlap
    0: e = (P - L)/(T - S), c = P/T - e.

    Args:
        parallel_seconds: P, wall clock of T parallel steps.
        local_seconds: L, wall clock of T local steps with S synchronisations, on the same cluster.
        total_steps: T.
        syncs: S.
        nbytes: bytes of the whole model, the same in both runs.
        world_size: number of ranks, on at least two machines.
        ranks_per_machine: ranks that share a link.

    Raises:
        SpecError: if an argument is invalid, or no positive constants fit the times.
    """
    total_steps = Horizon(total_steps).total_steps
    # With S = T both runs would exchange equally often, and e = 0 / 0.
    check_count("syncs", syncs, most=total_steps - 1)
    check_count("nbytes", nbytes)
    check_positive("parallel_seconds", parallel_seconds)
    check_positive("local_seconds", local_seconds)
    around = sum_bytes(nbytes, _machines(world_size, ranks_per_machine))  # 2 (N - 1)/N m
    if not around:
        raise SpecError(
            f"world_size={world_size} with ranks_per_machine={ranks_per_machine} is one machine, "
            "but the fit needs at least two: use times from a run on several machines"
        )
    exchange = (parallel_seconds - local_seconds) / (total_steps - syncs)  # e
    step = parallel_seconds / total_steps - exchange  # c
    if exchange <= 0 or step <= 0:
        raise SpecError(
            f"cannot fit parallel_seconds={parallel_seconds:g} with {total_steps:,} exchanges and "
            f"local_seconds={local_seconds:g} with {syncs:,}: the run with fewer exchanges must be "
            "faster, but by less than the ratio of the exchanges"
        )
    # `around` is what each link carries in one exchange, so this is a bandwidth.
    return TimeModel(step, around / exchange, ranks_per_machine=ranks_per_machine)


def _machines(world_size: int, ranks_per_machine: int) -> int:
    check_count("world_size", world_size)
    check_count("ranks_per_machine", ranks_per_machine)
    # The formula assumes the same number of ranks on every machine of the ring.
    if world_size > ranks_per_machine and world_size % ranks_per_machine:
        raise SpecError(
            f"world_size={world_size} is not a multiple of ranks_per_machine={ranks_per_machine}: "
            "the time model needs either one machine or full machines"
        )
    return max(1, world_size // ranks_per_machine)
