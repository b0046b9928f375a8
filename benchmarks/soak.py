"""Train for long, and pass mutated messages, specs and checkpoints to torchcomp.

    python -m benchmarks.soak --resume                # what has no row yet (50 min, two cores)
    python -m benchmarks.soak --only "ef topk" specs  # some parts
    python -m benchmarks.soak --quick                 # a minute: does it work?

A part is a family that trains for 20,000 steps on four ranks, or a target of mutations. Each adds a
row to soak.csv or mutations.csv in the folder --out. The exit status is 1 if a part does not pass.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.arguments import parsed_by, table_parser
from benchmarks.net.rows import MUTATIONS, SOAK, Table, TableError, conditions
from benchmarks.soak_fuzz import SLOW, Messages, Outcome, Specs, fuzz
from benchmarks.soak_states import CLIENTS, mutate_states
from benchmarks.soak_training import EVERY, FAMILIES, RANKS, STEPS, Verdict, run
from recipes.errors import exit_on_user_error
from recipes.result_files import make_folder

CASES = 1_000_000
MESSAGES, BOUNDS, SPECS = "messages", "messages, bounds checked", "specs"
PARTS = (*FAMILIES, MESSAGES, BOUNDS, SPECS, *CLIENTS)


def main() -> None:
    arguments = parse(sys.argv[1:])
    with exit_on_user_error(TableError):
        make_folder(arguments.out)
        failed = soak(arguments)
    if failed:
        sys.exit("did not pass: " + ", ".join(failed))


def parse(words: list[str]) -> argparse.Namespace:
    parser = table_parser(__doc__, quick="few steps and cases, in a minute")
    add = parser.add_argument
    add("--only", nargs="+", metavar="PART", choices=PARTS, default=PARTS, help="; ".join(PARTS))
    add("--seed", type=int, default=0, help="seed of the mutations [0]")
    add("--workers", type=int, default=2, help="processes for the mutations [2]")
    return parsed_by(parser, words, "soak")


def soak(arguments: argparse.Namespace) -> list[str]:
    """Run the parts, and return the names of those that do not pass."""
    families = Table(arguments.out / "soak.csv", SOAK)
    mutations = Table(arguments.out / "mutations.csv", MUTATIONS)
    small = 100 if arguments.quick else 1
    failed = []
    for part in arguments.only:
        trains = part in FAMILIES
        table = families if trains else mutations
        if arguments.resume and table.has(part=part):
            continue
        began = time.monotonic()
        passed, row = train(part, small) if trains else mutate(part, small, arguments)
        row |= {"seconds": f"{time.monotonic() - began:.0f}", "passed": passed}
        table.add({**conditions(), "part": part, **row})
        if not passed:
            failed.append(part)
        print(part, "passed" if passed else "DID NOT PASS", row, flush=True)
    return failed


def train(family: str, small: int) -> tuple[bool, dict[str, Any]]:
    """Train a family; return whether it passes, and its columns."""
    steps = STEPS // small
    ranks = run(family, steps, EVERY // small)
    verdict = Verdict.of(ranks)
    # A short run is all warm-up.
    passed = verdict.correct if small > 1 else verdict.passed
    return passed, {
        "method": FAMILIES[family].method,
        "ranks": RANKS,
        "steps": steps,
        "step_ms": f"{1e3 * ranks[0].seconds / steps:.2f}",
        "swaps": ranks[0].swaps,
        "loads": ranks[0].loads,
        **verdict.columns(),
    }


def mutate(part: str, small: int, arguments: argparse.Namespace) -> tuple[bool, dict[str, Any]]:
    """Run the mutations of a target; return whether it passes, and its columns."""
    outcome = targets(small, arguments)[part]()
    cases = sum(outcome.counts.values()) + len(outcome.problems)
    for problem in outcome.problems[:20]:
        print(f"{part}: {problem}", file=sys.stderr)
    return not outcome.problems and outcome.slowest < SLOW, {
        "seed": arguments.seed,
        "cases": cases,
        "problems": len(outcome.problems),
        "slowest_ms": f"{1e3 * outcome.slowest:.1f}",
        "results": "; ".join(f"{name}: {count}" for name, count in outcome.counts.items()),
    }


def targets(small: int, arguments: argparse.Namespace) -> dict[str, Callable[[], Outcome]]:
    """What runs the mutations of each part."""
    seed, workers = arguments.seed, arguments.workers
    cases = CASES // small
    return {
        MESSAGES: lambda: fuzz(Messages, cases, seed, workers=workers),
        # Another seed, so that the cases are others.
        BOUNDS: lambda: fuzz(Messages, cases, seed + 1, workers=workers, bounds_checked=True),
        SPECS: lambda: fuzz(Specs, cases, seed, workers=workers),
        **{name: lambda name=name: mutate_states(name, every=small) for name in CLIENTS},
    }


if __name__ == "__main__":
    main()
