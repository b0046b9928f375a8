"""Twenty kills in 2,000 steps: is the result the same, and is anything lost?

    python -m recipes.elastic.experiment               # 3 methods
    python -m recipes.elastic.experiment --quick       # 4 kills in 400 steps
    python -m recipes.elastic.experiment --resume

Ranks are processes over gloo on this machine, each with an agent of torchrun of its own. The file
in ``--out`` is ``kills.csv`` (every run, saved as it ends).

- ``fixed``: always three ranks. The checkpoint of the last step, with weights, residuals, server
  residuals and momentum of all ranks, is compared bit for bit with that of a run without kills.
- ``changing``: two to four ranks, another number after most kills. The law of conservation is
  checked with the last checkpoint: see ``account.py``.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from recipes.elastic.account import audit
from recipes.elastic.faults import plan
from recipes.elastic.runs import run, same
from recipes.elastic.settings import Settings
from recipes.elastic.tables import kills
from recipes.errors import exit_on_user_error
from recipes.experiments import ExperimentParser, ResultTable, fill
from recipes.result_files import make_folder
from recipes.rows import columns

_HERE = Path(__file__).resolve().parent
METHODS = {
    "ef": {"compress": "ef(topk(0.01))"},
    "bidirectional": {"compress": 'bidirectional(topk(0.02), quantize("int8"), selection="shard")'},
    "local": {"compress": "ef(topk(0.05))", "sync": "every(8)", "outer": "nesterov()"},
}
NODES = {"fixed": (3, 3), "changing": (2, 4)}
EVERY = 40
"""Steps between two checkpoints: a multiple of the steps of a round."""
RUN = ("method", "size", "seed")
Run = tuple[str, str, int]


@dataclass(frozen=True)
class Result:
    """The result of a run with kills, and the flags of ``recipes.elastic.train``."""

    compress: str
    sync: str
    outer: str
    kills: int  # number of faults
    ranks: str  # of every start, separated by spaces
    repeated: int  # steps that were taken again after a kill
    identical: str  # fixed size: whether the last checkpoint is that of a run without kills
    deviation: str  # see recipes.elastic.account.Audit
    unsent: str
    seconds: int


@exit_on_user_error()
def main() -> None:
    """Run all methods with a fixed and a changing number of ranks, and print the table."""
    arguments = parse(sys.argv[1:])
    steps, count = (400, 4) if arguments.quick else (2000, 20)
    task = f"{steps} steps, a checkpoint every {EVERY}, batch {Settings.batch}, lr {Settings.lr:g}"
    path = arguments.out / "kills.csv"
    table = ResultTable(path, RUN, columns(Result), task, resume=arguments.resume)
    make_folder(arguments.out)
    planned = product(arguments.seeds, arguments.only, NODES)
    runs = [(method, size, seed) for seed, method, size in planned]
    fill(table, runs, partial(measured, steps=steps, count=count))
    print(f"\n{kills(arguments.out)}\n\nthe table is in {path}")


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = ExperimentParser(__doc__, _HERE, METHODS, seeds=(0,), quick_seeds=(0,))
    parsed = parser.read(words)
    parsed.out = parser.output_folder(parsed)
    return parsed


def measured(run_of: Run, steps: int, count: int) -> Result:
    """Run a method with kills, and compare the result."""
    method, size, seed = run_of
    settings = Settings(**METHODS[method], steps=steps, seed=seed, checkpoint_every=EVERY)
    smallest, largest = NODES[size]
    faults = plan(count, steps, range(smallest, largest + 1), seed)
    with tempfile.TemporaryDirectory() as folder:
        killed = run(Path(folder) / "killed", settings, NODES[size], faults)
        identical = ""
        if size == "fixed":
            whole = run(Path(folder) / "whole", settings, NODES[size])
            identical = "yes" if same(killed.states, whole.states) else "no"
    found = audit(killed.states, settings)
    return Result(
        *(settings.compress, settings.sync, settings.outer, count),
        ranks=" ".join(map(str, killed.ranks)),
        repeated=killed.steps - steps,
        identical=identical,
        deviation=f"{found.deviation:.1e}",
        unsent=f"{found.unsent:.1e}",
        seconds=round(killed.seconds),
    )


if __name__ == "__main__":
    main()
