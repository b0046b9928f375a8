"""The digits experiment on four real ranks over gloo: it prints the simulation's table.

    python -m recipes.two_direction.on_ranks

One process a worker; each computes the gradients of its own shard and gathers the others' messages
as bytes. Step sizes are those that experiment.py finds with ten workers. Printed are the table of
the simulation and rank 0's own, and then what real links add: bytes and time. The exit status is 1
if a bit of any rank's x, f or counts differs from the simulation's.
"""

import argparse
import sys
import time
from dataclasses import asdict, dataclass

import torch

from recipes.errors import told_in_one_line
from recipes.local_ranks import run_on_ranks
from recipes.two_direction.contest import Setting, run
from recipes.two_direction.data_sets import digits
from recipes.two_direction.tuning import Run
from torchcomp.algorithms.parameter_server import ParameterServer, Ranks, Simulated
from torchcomp.checks import check_positive

RANKS = 4
# Step sizes 2^i at mu = 1e-4; see results/digits_n10_mu0.0001.csv.
POWERS = {"2Direction": 2, "AGD": 2, "EF21-P + DIANA": 3}


@dataclass(frozen=True)
class Line:
    """A method's line of the table, the digest of its last point, and how it was run."""

    method: str
    iterations: int
    value: float
    traffic: dict[str, int]
    x: tuple[float, ...]
    seconds: float
    link: int

    @property
    def facts(self) -> tuple[object, ...]:
        """Return what both forms must agree on, to the last bit."""
        return self.method, self.iterations, self.value, self.traffic, self.x


@told_in_one_line()
def main() -> None:
    """Run both forms, print both tables and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--gap", type=float, default=1e-6, help="f - f* to reach [1e-6]")
    gap = parser.parse_args().gap
    check_positive("--gap", gap)
    torch.set_num_threads(1)
    given = setting(gap)
    simulated = [line(method, given, Simulated(RANKS)) for method in POWERS]
    real = run_on_ranks(RANKS, on_this_rank, gap)
    print(f"\nsimulated, one process\n{table(simulated)}")
    print(f"\n{RANKS} ranks over gloo\n{table(real[0])}")
    for rank, own in enumerate(real):
        if [each.facts for each in own] != [each.facts for each in simulated]:
            sys.exit(f"error: rank {rank}'s table is not the simulation's")
    print(f"\nall {RANKS} ranks and the simulation agree in every bit of x, f and the counts\n")
    for ours, theirs in zip(simulated, real[0], strict=True):
        print(links(ours, theirs))


def setting(gap: float) -> Setting:
    """Return the digits on four workers, with f* found already."""
    given = Setting(digits(), RANKS, 1e-4, 65, gap, 3_000_000)
    given.least(0)
    return given


def line(method: str, given: Setting, server: ParameterServer) -> Line:
    """Run a method to the gap on four workers and their server."""
    started = time.monotonic()
    done = run(given, method, POWERS[method], 0, server)
    seconds = time.monotonic() - started
    link = server.exchange.take_traffic(0).received if isinstance(server, Ranks) else 0
    return _line(method, done, seconds, link)


def _line(method: str, done: Run, seconds: float, link: int) -> Line:
    last = done.curve[-1]
    x = tuple(done.method.solution.tolist())
    return Line(method, last.iterations, last.value, asdict(last.traffic), x, seconds, link)


def on_this_rank(gap: float) -> list[Line]:
    """Run all methods as one rank of the default group."""
    given = setting(gap)
    return [line(method, given, Ranks()) for method in POWERS]


def table(lines: list[Line]) -> str:
    """Return the table of one form."""
    out = [f"{'':<16}{'iterations':>12}{'up':>10}{'down':>10}{'total':>10}{'bytes':>12}{'f':>18}"]
    for each in lines:
        t = each.traffic
        up, down = t["up_coordinates"], t["down_coordinates"]
        counts = f"{each.iterations:>12,}{up:>10,}{down:>10,}{up + down:>10,}"
        nbytes = t["up_bytes"] + t["down_bytes"]
        out.append(f"{each.method:<16}{counts}{nbytes:>12,}{each.value:>18.12f}")
    return "\n".join(out)


def links(simulated: Line, real: Line) -> str:
    """Return what a rank received, beside what a worker and a server would send each other."""
    both = real.traffic["up_bytes"] + real.traffic["down_bytes"]
    pace = [1000 * each.seconds / each.iterations for each in (simulated, real)]
    return (
        f"{real.method:<16} a rank received {real.link:,} bytes (a worker and a server: {both:,}); "
        f"{pace[1]:.1f} ms an iteration, simulated {pace[0]:.1f} ms"
    )


if __name__ == "__main__":
    main()
