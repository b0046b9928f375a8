"""The digits experiment on four real ranks over gloo, compared with the simulation bit for bit.

Each rank is one worker. It computes the gradients of its own shard and gathers the other workers'
messages as bytes. The step sizes are the ones that the contest finds with ten workers. The table
also has what only real ranks show: the bytes that a rank receives, and the time.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from recipes.errors import RecipeError
from recipes.experiments import ResultTable
from recipes.local_ranks import run_on_ranks
from recipes.two_direction.contest import Options, tenth
from recipes.two_direction.contest import setting as contest_setting
from recipes.two_direction.data_sets import digits
from recipes.two_direction.race import Setting, run
from recipes.two_direction.tuning import MethodRun
from torchcomp.two_direction.parameter_server import ParameterServer, Ranks, Simulated

RANKS = 4
MU = 1e-2
# Step sizes 2^i, as in results/contest_digits_n10.csv; with fewer workers, EF21-P + DIANA needs a
# smaller one.
POWERS = {"2Direction": 6, "AGD": 0, "EF21-P + DIANA": 0}
COLUMNS = (
    *("method", "iterations", "up", "down", "total", "bytes_up", "bytes_down", "value"),
    *("received_by_rank", "ms_ranks", "ms_simulated"),
)
_MILLISECONDS = 1000


@dataclass(frozen=True)
class RankRun:
    """A method's run, by the simulation or as seen by one rank.

    Attributes:
        method: its name.
        iterations: until f - f* reached the gap.
        value: the last f.
        traffic: what a worker and a server would send each other.
        x: the solution.
        seconds: wall time.
        received: bytes that this rank received; 0 in the simulation.
    """

    method: str
    iterations: int
    value: float
    traffic: dict[str, int]
    x: tuple[float, ...]
    seconds: float
    received: int

    @property
    def exact(self) -> tuple[object, ...]:
        """What must be equal, to the last bit, on all ranks and in the simulation."""
        return self.method, self.iterations, self.value, self.traffic, self.x

    @property
    def pace(self) -> float:
        """Milliseconds per iteration."""
        return _MILLISECONDS * self.seconds / self.iterations


def setting(gap: float | None = None, seed: int = 0) -> Setting:
    """Return the digits on four workers, with the f* of a seed computed."""
    samples = digits()
    shared = contest_setting(samples, RANKS, MU, tenth(samples), Options(gap))
    # Before the clock starts: f* is cached.
    shared.case(seed)
    return shared


def open_table(shared: Setting, folder: Path, seed: int, *, resume: bool) -> ResultTable:
    """Open the table of a seed, with the finished methods if the run is resumed."""
    return ResultTable(
        folder / "on_ranks.csv",
        COLUMNS,
        f"{shared}, f - f* <= {shared.gap:g}, seed {seed}",
        resume=resume,
    )


def run_ranks(shared: Setting, table: ResultTable, seed: int) -> None:
    """Run the methods that the table lacks in both forms, compare them, and print the table.

    Raises:
        RecipeError: if a rank's x, f or counts differ from the simulation's in any bit.
    """
    finished = {row["method"] for row in table.rows}
    missing = [method for method in POWERS if method not in finished]
    if missing:
        simulated = [run_method(method, shared, Simulated(RANKS, seed)) for method in missing]
        # One start of the processes for all methods, because each rank finds f* again.
        by_rank = run_on_ranks(RANKS, on_this_rank, missing, shared.gap, seed)
        for rank, own in enumerate(by_rank):
            compare(rank, own, simulated)
        table.add(*map(cells, by_rank[0], simulated))
    print(f"\n{shared}, {RANKS} ranks over gloo\n{printed(table.rows)}")
    print(f"all {RANKS} ranks and the simulation agree in every bit of x, f and the counts")


def compare(rank: int, own: list[RankRun], simulated: list[RankRun]) -> None:
    """Raise if a run on this rank differs from the simulation.

    Raises:
        RecipeError: if x, f or a count differs in any bit.
    """
    for mine, theirs in zip(own, simulated, strict=True):
        if mine.exact != theirs.exact:
            raise RecipeError(f"{mine.method}: rank {rank} differs from the simulation")


def run_method(method: str, shared: Setting, server: ParameterServer) -> RankRun:
    """Run a method to the gap on four workers.

    Raises:
        RecipeError: if it does not reach the gap.
    """
    started = time.monotonic()
    done = run(shared, method, POWERS[method], server.seed, server)
    seconds = time.monotonic() - started
    if not done.reached:
        raise RecipeError(
            f"{method} does not reach f - f* <= {shared.gap:g} with seed {server.seed} and step "
            f"size 2^{POWERS[method]}: choose another first seed with --seeds, or a larger --gap"
        )
    received = server.exchange.take_traffic(0).received if isinstance(server, Ranks) else 0
    return _rank_run(method, done, seconds, received)


def _rank_run(method: str, done: MethodRun, seconds: float, received: int) -> RankRun:
    last = done.curve[-1]
    x = tuple(done.method.solution.tolist())
    traffic = asdict(last.traffic)
    return RankRun(method, last.iterations, last.value, traffic, x, seconds, received)


def on_this_rank(methods: list[str], gap: float, seed: int) -> list[RankRun]:
    """Run the methods as one rank of the default group."""
    shared = setting(gap, seed)
    return [run_method(method, shared, Ranks(seed=seed)) for method in methods]


def cells(on_rank: RankRun, simulated: RankRun) -> list[object]:
    """Return a method's row of the table."""
    traffic = on_rank.traffic
    up, down = traffic["up_coordinates"], traffic["down_coordinates"]
    counts = [up, down, up + down, traffic["up_bytes"], traffic["down_bytes"]]
    # 17 digits identify a float64.
    named = [on_rank.method, on_rank.iterations, *counts, f"{on_rank.value:.17g}"]
    return [*named, on_rank.received, f"{on_rank.pace:.1f}", f"{simulated.pace:.1f}"]


def printed(rows: list[dict[str, str]]) -> str:
    """Return the table as text."""
    bytes_columns = f"{'MB, with a server':>19}{'MB, a rank receives':>21}"
    times = f"{'ms':>7}{'simulated':>11}"
    lines = [f"{'':<16}{'iterations':>12}{'coordinates':>13}{bytes_columns}{times}"]
    for row in rows:
        counts = f"{int(row['iterations']):>12,}{int(row['total']):>13,}"
        with_server = (int(row["bytes_up"]) + int(row["bytes_down"])) / 1e6
        traffic = f"{with_server:>19.2f}{int(row['received_by_rank']) / 1e6:>21.2f}"
        pace = f"{row['ms_ranks']:>7}{row['ms_simulated']:>11}"
        lines.append(f"{row['method']:<16}{counts}{traffic}{pace}")
    return "\n".join(lines)
