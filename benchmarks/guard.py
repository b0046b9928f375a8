"""Measure the guard: seeded faults that it finds, clean runs of the recipes, and its cost.

    python -m benchmarks.guard --resume        # what has no row yet (20 min, two cores)
    python -m benchmarks.guard --only faults   # one part
    python -m benchmarks.guard --quick         # two minutes: does it work?

Results are rows of guard_faults.csv, guard_clean.csv and guard_cost.csv in the folder --out. The
exit status is 1 if a fault is not found, or a clean run has an alarm. benchmarks/report_guard.py
writes the tables of docs/guard.md from them.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import cycle, product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.arguments import table_folder, table_parser
from benchmarks.net.rows import GUARD_CLEAN, GUARD_COST, GUARD_FAULTS, Table, TableError, conditions

WITHIN = 100
"""Steps in which a fault is to be found."""

EVERY = 50
_ROOT = Path(__file__).parents[1]
_METHODS = (
    "ef(topk(0.01))",
    'ef(quantize("int8"))',
    "dgc(topk(0.01))",
    "bidirectional(topk(0.01), topk(0.01))",
)
_BY_LAYER = (
    'ef(topk(0.01, scope="tensor"))',
    'ef(randk(0.01, scope="tensor"))',
    'dgc(topk(0.01, scope="tensor"))',
    'bidirectional(topk(0.01, scope="tensor"), topk(0.01, scope="tensor"))',
)
_RANKS_AND_SEEDS = ((2, 0), (4, 1))
_DIGITS = ["--config", "recipes/configs/digits.yaml"]
CLEAN: tuple[tuple[int, list[str]], ...] = (
    *(
        (2, ["--compress", method, "--seed", str(seed)])
        for method in (
            *_METHODS,
            "ef(topk(0.001))",
            "ef(randk(0.05))",
            "powersgd(rank=2)",
            "ef21(topk(0.1))",
        )
        for seed in (0,)
    ),
    (2, ["--compress", 'bidirectional(topk(0.01), topk(0.01), selection="exact")']),
    (2, ["--compress", 'cast("bf16")']),
    (2, ["--compress", 'ef(cast("bf16"))']),
    (2, ["--compress", 'ef(topk(0.01), memory_dtype="bf16")']),
    (2, ["--compress", "ef(warmup(topk(0.01), steps=200))"]),
    (2, ["--compress", "ef(topk(0.01))", "--lr-inside"]),
    (2, ["--compress", "ef(topk(0.01))", "--optimizer", "adamw", "--lr", "0.002"]),
    (2, ["--compress", "ef(topk(0.01))", "--amp", "bf16"]),
    (2, ["--compress", "ef(topk(0.01))", "--accumulate", "2", "--clip-norm", "1"]),
    (4, ["--compress", 'bidirectional(topk(0.01, values="int8"), topk(0.01, values="int8"))']),
    (4, ["--compress", 'ef(topk(0.01, scope="tensor"))', "--channels-last"]),
    (2, ["--compress", "ef(topk(0.01))", "--model", "torchvision/resnet18", "--small-stem"]),
)
"""Ranks and flags of recipes.train, by run."""


def main() -> None:
    # Here, because the report imports this module, and should not have to import torch.
    from recipes.errors import exit_on_user_error
    from recipes.result_files import make_folder

    arguments = parse(sys.argv[1:])
    with exit_on_user_error(TableError):
        make_folder(arguments.out)
        failed = [each for part in arguments.only for each in _PARTS[part](arguments)]
    if failed:
        sys.exit("did not pass: " + ", ".join(failed))


def parse(words: list[str]) -> argparse.Namespace:
    parser = table_parser(__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="one run of each kind")
    add("--only", nargs="+", choices=_PARTS, default=list(_PARTS), help="some parts")
    parsed = parser.parse_args(words)
    parsed.out = parsed.out or table_folder(parsed.quick, "guard")
    return parsed


# --- Faults ---


def faults(arguments: argparse.Namespace) -> Iterator[str]:
    """Plant each fault in runs of several methods. Yield those that are not found."""
    from benchmarks.guard_faults import FAULTS
    from recipes.local_ranks import run_on_ranks

    table = Table(arguments.out / "guard_faults.csv", GUARD_FAULTS)
    methods = {name: _BY_LAYER if fault.by_layer else _METHODS for name, fault in FAULTS.items()}
    # A method without a residual is a fault from the first step on.
    methods[NO_FEEDBACK] = _WITHOUT
    # Half of the methods on two ranks, half on four.
    cases = [
        (fault, method, run)
        for fault, chosen in methods.items()
        for method, run in zip(chosen, cycle(_RANKS_AND_SEEDS), strict=False)
    ]
    if arguments.quick:
        cases = cases[:: len(_METHODS)]
    for fault, method, (ranks, seed) in cases:
        labels = {"fault": fault, "method": method, "ranks": ranks, "seed": seed}
        if arguments.resume and table.has(**labels):
            continue
        planted = 0 if fault == NO_FEEDBACK else random.Random(f"{labels}").randint(20, 80)
        alarms = run_on_ranks(ranks, faulty_run, fault, method, seed, planted)
        row = judged(fault, planted, alarms)
        table.add({**conditions(), **labels, **row})
        print(*labels.values(), row, flush=True)
        if not row["passed"]:
            yield f"{fault} with {method}"


NO_FEEDBACK = "a method without a residual"
LAYER = "features.3.weight"
_WITHOUT = ("topk(0.01)", "randk(0.1)")


def faulty_run(fault: str, method: str, seed: int, planted: int) -> list[Any]:
    """Train on this rank, with a fault after `planted` steps. Return the alarms."""
    import torch.distributed as dist

    from benchmarks.guard_faults import FAULTS, Run

    found: list[Any] = []
    trainee = Trainee("smallcnn", method, seed, every=EVERY, callback=found.append)
    for step in range(planted + WITHIN + 1):
        if step == planted and fault in FAULTS:
            names = dict(trainee.model.module.named_parameters())
            FAULTS[fault].plant(Run(trainee.handle, names, LAYER, dist.get_rank()))
        trainee.step()
    return found


def judged(fault: str, planted: int, by_rank: list[list[Any]]) -> dict[str, Any]:
    """Return the columns of a run, from the alarms of all ranks."""
    from benchmarks.guard_faults import CULPRIT, FAULTS

    alarms = by_rank[0]
    right = all(each == alarms for each in by_rank) and bool(alarms)
    first = [alarm for alarm in alarms if alarm.step == alarms[0].step]
    kinds = sorted({alarm.kind for alarm in first})
    if fault in FAULTS:
        wanted = FAULTS[fault]
        chosen = [alarm for alarm in first if alarm.kind in wanted.kinds]
        right &= bool(chosen) and all(alarm.step > planted for alarm in alarms)
        right &= not wanted.layer or all(alarm.parameters == (LAYER,) for alarm in chosen)
        right &= not wanted.culprit or all(alarm.ranks == (CULPRIT,) for alarm in chosen)
    else:
        right &= kinds == ["lost"]
    step = alarms[0].step if alarms else None
    return {
        "planted": planted,
        "found": step,
        "after": None if step is None else step - planted,
        "kinds": "; ".join(kinds),
        "parameters": "; ".join(sorted({n for alarm in first for n in alarm.parameters})),
        "named_ranks": "; ".join(map(str, sorted({r for alarm in first for r in alarm.ranks}))),
        "passed": right and step is not None and step - planted <= WITHIN,
    }


class Trainee:
    """A model that trains on the digits with compressed gradients, on this rank.

    Args:
        model: its name in benchmarks/net/models.py.
        method: the spec.
        seed: of the weights and the batches.
        every: steps between comparisons; 0 without the guard.
        callback: gets the alarms.
        batch: images per rank.
    """

    def __init__(
        self,
        model: str,
        method: str,
        seed: int,
        *,
        every: int,
        callback: Callable[[Any], object] | None = None,
        batch: int = 32,
    ) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        import torchcomp
        from benchmarks.net import data, models

        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._seed, self._batch, self._step = seed, batch, 0
        self._train, _ = data.digits(models.SIZES[model])
        self.model = DistributedDataParallel(models.build(model, seed))
        guard = torchcomp.Guard(every=every, callback=callback) if every else False
        self.handle = torchcomp.register(self.model, method, seed=seed, guard=guard)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def step(self) -> None:
        from torch.nn.functional import cross_entropy

        from benchmarks.net import data

        rows = data.shard(self._train, self._batch, self._rank, self._world, self._step, self._seed)
        images, labels = self._train.take(rows)
        self._optimizer.zero_grad()
        cross_entropy(self.model(images), labels).backward()
        self._optimizer.step()
        self._step += 1


# --- Clean runs ---


def clean(arguments: argparse.Namespace) -> Iterator[str]:
    """Run the training recipe without a fault. Yield the runs that have an alarm."""
    table = Table(arguments.out / "guard_clean.csv", GUARD_CLEAN)
    for run, (ranks, flags) in enumerate(CLEAN[:1] if arguments.quick else CLEAN, start=1):
        if arguments.resume and table.has(run=run):
            continue
        summary = recipe(ranks, [*flags, "--guard", str(EVERY)])
        row = {
            "run": run,
            "ranks": ranks,
            "flags": " ".join(flags),
            "steps": summary["steps"],
            "comparisons": summary["steps"] // EVERY,
            "alarms": summary["alarms"],
            "accuracy": f"{100 * summary['test_accuracy']:.2f}",
            "bytes": summary["bytes_sent"],
            "control_bytes": summary["control_bytes_sent"],
        }
        table.add({**conditions(), **row})
        print(row, flush=True)
        if summary["alarms"]:
            yield f"clean run {run}"


def recipe(ranks: int, flags: list[str]) -> dict[str, Any]:
    """Run the training recipe on the digits with torchrun. Return its summary."""
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(ranks), "-m", "recipes.train", *_DIGITS]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(
            [*launch, *flags, "--threads", "1", "--out", folder],
            cwd=_ROOT,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        summary: dict[str, Any] = json.loads((Path(folder) / "summary.json").read_text())
    return summary


# --- Cost ---

_COSTS = (
    ("resnet18", 16, EVERY, 5),
    ("smallcnn", 64, EVERY, 40),
    ("smallcnn", 64, 4 * EVERY, 10),
)
"""Model, images per rank, steps from one comparison to the next, and pairs."""


def cost(arguments: argparse.Namespace) -> Iterator[str]:
    """Measure step time and bytes with the guard and without, in pairs. Nothing fails here."""
    from recipes.local_ranks import run_on_ranks

    table = Table(arguments.out / "guard_cost.csv", GUARD_COST)
    methods = ("ef(topk(0.01))", 'bidirectional(topk(0.01), topk(0.01), selection="exact")')
    for (model, batch, every, pairs), method in product(_COSTS, methods):
        labels = {"model": model, "method": method, "every": every}
        if arguments.resume and table.has(**labels):
            continue
        few = 2 if arguments.quick else pairs
        row = {**labels, "batch": batch, "ranks": 2, "pairs": few}
        row |= run_on_ranks(2, costs, model, method, batch, every, few)[0]
        table.add({**conditions(), **row})
        print(row, flush=True)
    yield from ()


def costs(model: str, method: str, batch: int, every: int, pairs: int) -> dict[str, Any]:
    """Return the columns of one set-up. A pair is a comparison's period with the guard, and one
    without, in alternating order."""
    guarded, plain = (Trainee(model, method, 0, every=each, batch=batch) for each in (every, 0))
    inside = Stopwatch(guarded.handle.guard)
    times: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(pairs + 1):
        for with_guard in (True, False) if pair % 2 else (False, True):
            trainee = guarded if with_guard else plain
            began = time.perf_counter()
            for _ in range(every):
                trainee.step()
            # The first pair compiles and allocates.
            if pair:
                times[with_guard].append(time.perf_counter() - began)
            else:
                inside.seconds = 0.0
    ratios = sorted(a / b for a, b in zip(times[True], times[False], strict=True))
    control = [each.handle.stats.total_control_bytes_sent for each in (guarded, plain)]
    sent = plain.handle.stats.total_bytes_sent
    return {
        "parameters": sum(each.numel() for each in plain.model.parameters()),
        "step_ms": f"{1e3 * median(times[False]) / every:.2f}",
        "inside": f"{100 * inside.seconds / sum(times[True]):.2f}",
        "time": f"{100 * (median(ratios) - 1):.2f}",
        "time_low": f"{100 * (ratios[len(ratios) // 4] - 1):.2f}",
        "time_high": f"{100 * (ratios[3 * len(ratios) // 4] - 1):.2f}",
        "bytes": f"{100 * (control[0] - control[1]) / sent:.3f}",
    }


class Stopwatch:
    """The time of a guard: the work of its thread, and its messages.

    Attributes:
        seconds: in total.
    """

    def __init__(self, observer: Any) -> None:
        self.seconds = 0.0
        # On the clock, another thread that gets the core would count.
        for name in ("begin", "before", "after", "finishing"):
            setattr(observer, name, self._timed(getattr(observer, name), time.thread_time))
        for name in ("finished", "settle"):
            setattr(observer, name, self._timed(getattr(observer, name), time.perf_counter))

    def _timed(self, call: Callable[..., Any], clock: Callable[[], float]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = clock()
            try:
                return call(*arguments)
            finally:
                self.seconds += clock() - began

        return timed


_PARTS: dict[str, Callable[[argparse.Namespace], Iterator[str]]] = {
    "faults": faults,
    "clean": clean,
    "cost": cost,
}


if __name__ == "__main__":
    main()
