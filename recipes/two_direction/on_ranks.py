"""The digits on four real ranks over gloo, compared with the simulation bit for bit.

Each rank is one worker. It computes the gradients of its own shard and gathers the other workers'
messages as bytes. The step sizes are the ones that the contest finds with ten workers. The table
also has what only real ranks show: the bytes that a rank receives, and the time.
"""

import argparse
import time
from dataclasses import asdict, dataclass
from typing import Any

from recipes.errors import RecipeError
from recipes.experiments import ResultTable
from recipes.local_ranks import run_on_ranks
from recipes.two_direction import contest
from recipes.two_direction.contest import Measure
from recipes.two_direction.data_sets import digits
from recipes.two_direction.race import Setting, run
from torchcomp.algorithms.parameter_server import ParameterServer, Ranks, Simulated

RANKS = 4
MU = 1e-2
# Step sizes 2^i, as in results/contest_digits_n10.csv; with fewer workers, EF21-P + DIANA needs a
# smaller one.
POWERS = {"2Direction": 6, "AGD": 0, "EF21-P + DIANA": 0}
OUTCOME = (
    *("iterations", "up", "down", "total", "bytes_up", "bytes_down", "value"),
    *("received_by_rank", "ms_ranks", "ms_simulated"),
)


@dataclass(frozen=True)
class RankRun:
    """A method's run, by the simulation or as seen by one rank."""

    method: str
    iterations: int
    value: float  # the last f
    traffic: dict[str, int]  # what a worker and a server would send each other
    x: tuple[float, ...]
    seconds: float
    received: int  # bytes, by this rank; 0 in the simulation

    @property
    def exact(self) -> tuple[object, ...]:
        """What must be equal, to the last bit, on all ranks and in the simulation."""
        return self.method, self.iterations, self.value, self.traffic, self.x

    @property
    def pace(self) -> str:
        """Milliseconds per iteration."""
        return f"{1000 * self.seconds / self.iterations:.1f}"


def open_ranks(arguments: argparse.Namespace) -> Measure:
    """Return what runs the methods that the table lacks in both forms, and compares them."""
    # Real ranks are compared with the simulation: one seed is enough.
    seed = arguments.seeds[0]
    shared = _setting(arguments.gap, seed)
    path, task = arguments.out / "on_ranks.csv", f"{shared}, f - f* <= {shared.gap:g}, seed {seed}"
    table = ResultTable(path, ("method",), OUTCOME, task, resume=arguments.resume)

    def measure() -> None:
        missing = table.missing(POWERS)
        if missing:
            simulated = [run_method(each, shared, Simulated(RANKS, seed)) for each in missing]
            # One start of the processes for all methods, because each rank finds f* again.
            by_rank = run_on_ranks(RANKS, on_this_rank, missing, shared.gap, seed)
            for rank, own in enumerate(by_rank):
                compare(rank, own, simulated)
            for own, other in zip(by_rank[0], simulated, strict=True):
                table.add(own.method, outcome(own, other))
        print(f"all {RANKS} ranks and the simulation agree in every bit of x, f and the counts")

    return measure


def _setting(gap: float | None, seed: int) -> Setting:
    shared = contest.setting(digits(), RANKS, MU, gap=gap)
    # Before the clock starts: f* is cached.
    shared.case(seed)
    return shared


def compare(rank: int, own: list[RankRun], simulated: list[RankRun]) -> None:
    """Raise RecipeError if x, f or a count on this rank differs from the simulation in any bit."""
    for mine, theirs in zip(own, simulated, strict=True):
        if mine.exact != theirs.exact:
            raise RecipeError(f"{mine.method}: rank {rank} differs from the simulation")


def run_method(method: str, shared: Setting, server: ParameterServer) -> RankRun:
    """Run a method to the gap on four workers; raise RecipeError if it does not reach it."""
    started = time.monotonic()
    done = run(shared, method, POWERS[method], server.seed, server)
    seconds = time.monotonic() - started
    if not done.reached:
        raise RecipeError(
            f"{method} does not reach f - f* <= {shared.gap:g} with seed {server.seed} and step "
            f"size 2^{POWERS[method]}: choose another first seed with --seeds, or a larger --gap"
        )
    received = server.exchange.take_traffic(0).received if isinstance(server, Ranks) else 0
    last, x = done.curve[-1], tuple(done.method.solution.tolist())
    counts = asdict(last.traffic)
    return RankRun(method, last.iterations, last.value, counts, x, seconds, received)


def on_this_rank(methods: list[str], gap: float, seed: int) -> list[RankRun]:
    """Run the methods as one rank of the default group."""
    shared = _setting(gap, seed)
    return [run_method(method, shared, Ranks(seed=seed)) for method in methods]


def outcome(on_rank: RankRun, simulated: RankRun) -> tuple[Any, ...]:
    """Return a method's row of the table."""
    sent = on_rank.traffic
    up, down = sent["up_coordinates"], sent["down_coordinates"]
    counts = (up, down, up + down, sent["up_bytes"], sent["down_bytes"])
    # 17 digits identify a float64.
    counted = (on_rank.iterations, *counts, f"{on_rank.value:.17g}")
    return (*counted, on_rank.received, on_rank.pace, simulated.pace)
