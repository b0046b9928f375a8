"""Several ranks behind each link: tables and goals, from nodes.csv.

A method of torchcomp runs in one level, among all ranks, or in two: dense inside a node, and
compressed between nodes. PyTorch's hooks have one level.
"""

from collections.abc import Callable
from pathlib import Path

from benchmarks.net.names import BASELINES, BF16, FLOOR, PLAIN
from benchmarks.report_data import MISSING, Row, StepRows, read

# Follows the method's name where it runs in two levels.
_TWO = ", two levels"
# Of the bytes and of the time of the same method in one level.
_BYTES_GOAL, _TIME_GOAL = 0.27, 0.5
_GOAL_RANKS, _GOAL_MBIT = 4, 100
# Time above `no-op` of the bf16 hook, divided by that of this method in two levels.
_SPEED_GOAL, _SPEED_METHOD, _SPEED_HOSTS, _SPEED_MBIT = 4.0, "ef(topk(0.01))", 2, 1000

Goal = tuple[str, str, str, bool]
Grid = dict[int, StepRows]


def by_ranks(path: Path) -> Grid:
    """The rows of nodes.csv by the number of ranks of a node."""
    rows = read(path)
    return {
        ranks: StepRows([_named(row) for row in rows if int(row["ranks"]) == ranks])
        for ranks in sorted({int(row["ranks"]) for row in rows})
    }


def _named(row: Row) -> Row:
    # `no-op` exchanges nothing, so its rows of one and two levels measure the same.
    two = row["levels"] == "2" and row["method"] != FLOOR
    return row | {"method": row["method"] + _TWO * two}


def _shapes(grid: Grid) -> list[tuple[str, int, int]]:
    """The (model, nodes, ranks of a node) that were measured."""
    found = {
        (model, hosts, ranks) for ranks, steps in grid.items() for model, hosts, _ in steps.by_link
    }
    return sorted(found)


# --- Tables ---------------------------------------------------------------------------------------


def text(path: Path) -> str:
    """The text above the tables."""
    rows = read(path)
    if not rows:
        return "Not measured yet."

    def distinct(column: str) -> str:
        return ", ".join(sorted({row[column].partition("T")[0] for row in rows}))

    return f"""
Several ranks share the link of their node, as the GPUs of a machine share its network card:

```
python -m benchmarks.network --nodes --resume
```

- Levels: 1 is the exchange among all ranks. 2 is `register(..., nodes=...)`: the ranks of a node
  average their gradients uncompressed, and the method runs between the nodes.
- Link: payload bytes that a node sends per step over its link, as the kernel counts them. In
  brackets: relative to plain DDP, and to DDP with the bf16 hook.
- Inside: bytes that the ranks of a node send each other, as TCP counts them. They do not pass the
  link.
- The other columns: median milliseconds of a step. In brackets: relative to plain DDP, and to DDP
  with the bf16 hook.
- Ranks of a node exchange over TCP on the loopback. All ranks share {distinct("cpus")} cores.
  What two levels send inside takes CPU time there, which nodes with NVLink or shared memory do not
  spend. [Noise](#noise) has the range of `no-op`.
- Measured on {distinct("date")}, on {distinct("device")}, with torch {distinct("torch")}, at
  revision {distinct("revision")} (+: with uncommitted changes).
"""


def tables(path: Path) -> list[tuple[list[str], list[list[str]]]]:
    """One table for every model, number of nodes and number of ranks: its heads and rows."""
    grid = by_ranks(path)
    return [_table(grid[ranks], model, hosts, ranks) for model, hosts, ranks in _shapes(grid)]


def _table(
    steps: StepRows, model: str, hosts: int, ranks: int
) -> tuple[list[str], list[list[str]]]:
    speeds = sorted(
        {mbit for name, count, mbit in steps.by_link if (name, count) == (model, hosts)}
    )
    rows = []
    for name in sorted(steps.methods(), key=_order(steps)):
        times = [steps.time_cell(model, hosts, mbit, name) for mbit in speeds]
        if all(cell == MISSING for cell in times):
            continue
        method, levels = name.removesuffix(_TWO), "2" if name.endswith(_TWO) else "1"
        inside = steps.median("inside_bytes", model, hosts, name)
        cells = [_link_cell(steps, model, hosts, name), f"{inside or 0:,.0f}", *times]
        if name == FLOOR:
            levels, cells[:2] = MISSING, [MISSING, MISSING]
        rows.append([f"`{method}`", levels, *cells])
    heads = [f"{model}, {hosts} nodes of {ranks} ranks", "levels", "link, bytes", "inside, bytes"]
    return [*heads, *[f"{mbit:,} Mbit/s" for mbit in speeds]], rows


def _order(steps: StepRows) -> Callable[[str], tuple[int, str]]:
    """Both levels of a method next to each other, in the order of the methods."""
    names = list(dict.fromkeys(name.removesuffix(_TWO) for name in steps.methods()))
    return lambda name: (names.index(name.removesuffix(_TWO)), name)


def _link_cell(steps: StepRows, model: str, hosts: int, name: str) -> str:
    own, *others = (steps.payload(model, hosts, one) for one in (name, PLAIN, BF16))
    if own is None:
        return MISSING
    ratios = [f"{own / other:.4f}" if other else MISSING for other in others]
    return f"{own:,.0f} ({', '.join(ratios)})"


# --- Goals ----------------------------------------------------------------------------------------


def goals(path: Path) -> list[Goal]:
    """What was to be reached with two levels; none if nothing was measured."""
    grid = by_ranks(path)
    names = dict.fromkeys(name for steps in grid.values() for name in steps.methods())
    ours = [name for name in names if name not in BASELINES and not name.endswith(_TWO)]
    found = [_bytes_goal(grid, method) for method in ours]
    found += [_time_goal(grid, method) for method in ours]
    found += [_speed_goal(grid, shape) for shape in _shapes(grid)]
    return [goal for goal in found if goal is not None]


def _bytes_goal(grid: Grid, method: str) -> Goal | None:
    shares = {}
    for model, hosts, ranks in _shapes(grid):
        flat, two = (grid[ranks].payload(model, hosts, name) for name in (method, method + _TWO))
        if ranks == _GOAL_RANKS and flat and two:
            shares[model, hosts, ranks] = two / flat
    if not shares:
        return None
    goal = f"two levels, {_GOAL_RANKS} ranks a node: the link carries at most {_BYTES_GOAL} of the "
    measured = "; ".join(f"{_shape(*key)}: {share:.3f}" for key, share in shares.items())
    met = max(shares.values()) <= _BYTES_GOAL
    return f"`{method}`", goal + "bytes of one level", measured, met


def _time_goal(grid: Grid, method: str) -> Goal | None:
    measured, met = [], True
    for model, hosts, ranks in _shapes(grid):
        flat, two = (
            grid[ranks].above_floor(model, hosts, _GOAL_MBIT, name)
            for name in (method, method + _TWO)
        )
        if flat is None or two is None:
            continue
        # Below 0, the other load of the machine was larger than what the method costs.
        valid = min(flat, two) > 0
        times = f"{two:,.1f} ms of {flat:,.1f} ms" if valid else "within the noise"
        measured.append(f"{_shape(model, hosts, ranks)}: {times}")
        met = met and valid and two <= _TIME_GOAL * flat
    if not measured:
        return None
    goal = f"two levels, {_GOAL_MBIT} Mbit/s: time above `no-op` at most {_TIME_GOAL} of that of "
    return f"`{method}`", goal + "one level", "; ".join(measured), met


def _speed_goal(grid: Grid, shape: tuple[str, int, int]) -> Goal | None:
    model, hosts, ranks = shape
    own, theirs = (
        grid[ranks].above_floor(model, hosts, _SPEED_MBIT, name)
        for name in (_SPEED_METHOD + _TWO, BF16)
    )
    if hosts != _SPEED_HOSTS or own is None or theirs is None:
        return None
    goal = f"two levels, {_shape(*shape)}, {_SPEED_MBIT:,} Mbit/s: time above `no-op` at most "
    goal += f"1/{_SPEED_GOAL:g} of the bf16 hook's"
    if own <= 0:
        return f"`{_SPEED_METHOD}`", goal, "within the noise", False
    measured = f"{own:,.1f} ms; the hook {theirs:,.1f} ms: {theirs / own:.2f} ×"
    return f"`{_SPEED_METHOD}`", goal, measured, own * _SPEED_GOAL <= theirs


def _shape(model: str, hosts: int, ranks: int) -> str:
    return f"{model} {hosts} × {ranks}"
