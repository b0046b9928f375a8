"""Write docs/performance.md and its plots from the CSV files in benchmarks/results.

python -m benchmarks.report            # write both
python -m benchmarks.report --page     # write the page only, which needs no matplotlib
python -m benchmarks.report --check    # exit 1 if the page differs from what this would write
"""

import argparse
import statistics
import sys
from pathlib import Path

from benchmarks import plots, report_final, report_gpu, report_kernels, report_nodes
from benchmarks.net.names import BASELINES, BF16, FLOOR, PLAIN, POWERSGD
from benchmarks.report_accuracy import Ratios, Reached, loopback_ratios, times_to_accuracy
from benchmarks.report_data import FLAT, MISSING, Row, StepRows, read
from benchmarks.report_final import Final

_ROOT = Path(__file__).parents[1]
RESULTS = _ROOT / "benchmarks" / "results"
DOCUMENT = _ROOT / "docs" / "performance.md"
PICTURES = _ROOT / "docs" / "performance"
# Largest step time on the loopback, relative to plain DDP. `mean` only adds the hook's overhead.
_LOOPBACK_GOALS = {"mean": 1.03}
# For all other methods, which also select and encode.
_LOOPBACK_GOAL = 1.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it differs")
    parser.add_argument("--page", action="store_true", help="write the page, and no plot")
    options, text = parser.parse_args(), document(RESULTS)
    if options.check:
        check(text)
        return
    DOCUMENT.write_text(text)
    if not options.page:
        plots.draw_all(RESULTS, PICTURES)


def check(text: str) -> None:
    """Exit with a message unless the page equals `text` and every plot exists."""
    # Plots are not compared: their bytes depend on the version of matplotlib and its fonts.
    missing = [name for name in plots.NAMES if not (PICTURES / name).is_file()]
    if not DOCUMENT.is_file() or DOCUMENT.read_text() != text:
        sys.exit(
            "docs/performance.md does not match the CSV files in benchmarks/results: "
            "run python -m benchmarks.report"
        )
    if missing:
        sys.exit(f"docs/performance lacks {', '.join(missing)}: run python -m benchmarks.report")


def document(results: Path) -> str:
    """The text of docs/performance.md: results, then details, then conditions and caveats."""
    steps = StepRows(read(results / "network.csv"))
    reached = times_to_accuracy(results / "time_to_accuracy.csv")
    ratios, to_bf16 = (loopback_ratios(results / "loopback.csv", to) for to in (PLAIN, BF16))
    nodes = results / "nodes.csv"
    other_goals = report_nodes.goals(nodes) + report_kernels.goals(results / "encode.csv")
    other_goals += report_gpu.goals(results)
    parts = [
        _HEAD,
        "## Step time",
        _STEP_TEXT,
        *[step_table(steps, model, hosts) for model, hosts in shapes(steps)],
        "## Several ranks behind each link",
        report_nodes.text(nodes),
        *[markdown(*table) for table in report_nodes.tables(nodes)],
        "## Time to accuracy",
        accuracy_text(results),
        accuracy_table(reached),
        "## Final accuracy",
        report_final.text(results),
        markdown(report_final.HEADS, report_final.table(results)),
        "## Bytes",
        _BYTES_TEXT,
        *[bytes_table(steps, model) for model in steps.values(0)],
        "## Overhead on the loopback",
        loopback_text(results),
        loopback_table(ratios, to_bf16),
        "## CPU cost of the kernels",
        report_kernels.text(results / "encode.csv"),
        markdown(*report_kernels.table(results / "encode.csv")),
        "## On a GPU",
        report_gpu.text(results),
        *[f"{title}\n\n{markdown(*table)}" for title, *table in report_gpu.sections(results)],
        "## Goals",
        _GOALS_TEXT,
        goals(steps, reached, ratios, other_goals, report_final.finals(results / "accuracy.csv")),
        "## Where the time goes",
        _SPLIT_TEXT,
        split_table(steps, "resnet18", 4),
        counted_text(steps),
        "## Conditions",
        conditions(results),
        "## Caveats",
        _CAVEATS,
        noise(steps.rows + read(nodes)),
        does_not_pay(steps, ratios, to_bf16),
        gain_text(steps),
    ]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


_HEAD = f"""
# Performance

How fast the methods of torchcomp train on links of 10 Mbit/s to 1 Gbit/s, compared with plain DDP
and PyTorch's own communication hooks, and what they cost [on a GPU](#on-a-gpu).
[benchmarks/README.md](../benchmarks/README.md) has the command of each measurement and explains its
columns.

This page is generated from the CSV files in `benchmarks/results`. Do not edit it. After a new
measurement, write it again:

```
python -m benchmarks.report
```

A method is a [torchcomp spec](usage.md#methods) or one of five baselines:

| baseline | what it is |
| --- | --- |
| `no-op` | exchanges nothing: the time of the arithmetic alone, a lower bound for every method |
| `ddp` | DDP without a hook |
| `bf16` | PyTorch's `bf16_compress_hook` |
| `powersgd-1` | PyTorch's `powerSGD_hook`, rank 1 |
| `naive-topk` | error feedback with `torch.topk`, 1 %, fp32 values and int32 indices |

In the tables, {MISSING} means not measured. The title of a plot compares plain DDP with
the best method of torchcomp that reached the [target accuracy](#time-to-accuracy), in all of those
runs or on average at the [end of training](#final-accuracy). In bar charts, the value of that
method is bold.
"""

_STEP_TEXT = """
Median milliseconds of a training step. In brackets: relative to plain DDP on the same link, and to
DDP with the bf16 hook, the usual way to send less.
A method that sends less can need more steps: see [time to accuracy](#time-to-accuracy).

![Step time by method and link](performance/step_time.png)
"""

_SPLIT_TEXT = """
Milliseconds per step, divided into four parts:

| part | meaning |
| --- | --- |
| compute | the step of `no-op`: the median of all its rows |
| encode | CPU time in user mode above that of `no-op`, over all threads: selecting, coding, \
decoding, adding up |
| sockets | the same for CPU time in the kernel |
| wait | the rest of the step: the network, and waiting for a shared core |
| in collectives | time that the method's own threads spent inside blocking collectives, whether \
overlapped or not. Asynchronous calls are not measured |

Communication that overlaps the backward pass is not part of *wait*.
"""

_BYTES_TEXT = """
Payload bytes that a rank sends per step, as the kernel counts them: the bytes of the interface's
queue, minus 66 bytes of headers per packet. This also removes acknowledgements, which consist of
headers only. gloo's own headers and all control messages are included. In brackets: the bytes of
the messages alone, as `handle.stats` counts them
([comparison](#bytes-counted-by-the-kernel-and-by-handlestats)).

![Bytes by method and hosts](performance/bytes.png)
"""

_GOALS_TEXT = """
The goals of the project, and what was measured.
"""

_CAVEATS = """
All hosts share the cores of one machine. Ratios within a table mean more than milliseconds.
"""


# --- Conditions -----------------------------------------------------------------------------------


def conditions(results: Path) -> str:
    rows = [row for name in _FILES for row in read(results / f"{name}.csv")]
    if not rows:
        return "Nothing has been measured yet."

    def distinct(column: str) -> str:
        return ", ".join(sorted({row[column] for row in rows if row[column]}))

    days = sorted({row["date"][:10] for row in rows})
    shaped = [row for row in rows if row["mbit"] != "0"]
    delays = ", ".join(sorted({f"{int(row['delay_us']) / 1e3:g}" for row in shaped}))
    table = {
        "machine": f"{distinct('device')}, {distinct('cpus')} cores shared by all hosts",
        "software": f"torch {distinct('torch')}, gloo",
        "revision": f"{distinct('revision')} (+: with uncommitted changes)",
        "dates": f"{days[0]} to {days[-1]}",
        "hosts": "network namespaces, with one process of one thread each",
        "links": f"shaped in both directions, {delays} ms one way, TCP cubic",
        "data": "scikit-learn's digits",
        "`resnet18`": f"ResNet-18, {parameters(rows, 'resnet18')} parameters, images of 32 pixels",
        "`smallcnn`": f"a small CNN, {parameters(rows, 'smallcnn')} parameters, images of 8 pixels",
        "images per rank and step": distinct("batch"),
        "`powersgd-1`": "the hook's defaults, but one bucket (`bucket_cap_mb`): with two, it hangs "
        "on gloo",
        "`bf16`": "called through a hook of another name, because DDP refuses its name with gloo",
    }
    return markdown(["condition", "value"], [[name, text] for name, text in table.items()])


def noise(measured: list[Row]) -> str:
    """The range of `no-op`'s step times, which shows the machine's other load."""
    floors: dict[tuple[str, int, int], list[float]] = {}
    for row in measured:
        if row["method"] == FLOOR:
            key = row["model"], int(row.get("ranks", 1)), int(row["hosts"])
            floors.setdefault(key, []).append(float(row["step_ms"]))
    rows = [
        [model, str(hosts), str(ranks), f"{min(times):,.3g}", f"{max(times):,.3g}", str(len(times))]
        for (model, ranks, hosts), times in sorted(floors.items())
        if len(times) > 1
    ]
    if not rows:
        return ""
    heads = ["model", "hosts", "ranks of each", "lowest, ms", "highest, ms", "runs"]
    table = markdown(heads, rows)
    return f"""
### Noise

`no-op` does the same work on every link. Its step times therefore show how much other load on the
machine changes the results. Differences of this size mean nothing.

{table}
"""


# encode.csv is left out: it has other columns, and its section names its own conditions.
_FILES = ("network", "time_to_accuracy", "loopback")


def parameters(rows: list[dict[str, str]], model: str) -> str:
    return next((f"{int(r['parameters']):,}" for r in rows if r["model"] == model), MISSING)


# --- Goals ----------------------------------------------------------------------------------------


def goals(
    steps: StepRows,
    reached: list[Reached],
    ratios: Ratios,
    others: list[tuple[str, str, str, bool]],
    finals: dict[str, Final],
) -> str:
    rows: list[Goal] = []
    for method in two_way(steps.methods()):
        rows += [above_floor_goal(steps, method, finals)]
        rows += [flat_goal(steps, model, method) for model in steps.values(0)]
    rows += [accuracy_goal(reached, method) for method in ours({one.method for one in reached})]
    rows += loopback_goals(ratios)
    rows += [(what, goal, measured, yes(met)) for what, goal, measured, met in others]
    return markdown(["method", "goal", "measured", "reached"], [list(row) for row in rows])


Goal = tuple[str, str, str, str]


def two_way(methods: list[str]) -> list[str]:
    """The methods whose bytes per rank should not grow with the number of hosts."""
    return [method for method in methods if method.startswith("bidirectional(")]


def ours(methods: set[str]) -> list[str]:
    """The methods of torchcomp, in alphabetical order."""
    return sorted(methods - set(BASELINES))


def above_floor_goal(
    steps: StepRows,
    method: str,
    finals: dict[str, Final],
    model: str = "resnet18",
    hosts: int = 4,
) -> Goal:
    goal = f"100 Mbit/s, {hosts} hosts, {model}: time above `no-op` at most half of PowerSGD's, "
    goal += "and [accuracy](#final-accuracy) of the small CNN not below PowerSGD's"
    # Time above `no-op`: every method does the same arithmetic, so the rest is what it costs.
    own, theirs = (steps.above_floor(model, hosts, 100, name) for name in (method, POWERSGD))
    if own is None or theirs is None:
        return f"`{method}`", goal, "not measured", MISSING
    share = own / theirs
    measured = f"{own:.0f} ms of {theirs:.0f} ms: {share:.2f}"
    if not {method, POWERSGD} <= finals.keys():
        return f"`{method}`", goal, f"{measured}; accuracy not measured", MISSING
    final, powersgd = finals[method], finals[POWERSGD]
    measured += f"; {final.above(powersgd).with_error()} points"
    return f"`{method}`", goal, measured, yes(share <= 0.5 and not final.is_below(powersgd))


def accuracy_goal(reached: list[Reached], method: str, mbit: int = 10) -> Goal:
    goal = f"{mbit} Mbit/s: shortest time to accuracy of all"
    found = {one.method: one for one in reached if one.mbit == mbit}
    if method not in found:
        return f"`{method}`", goal, "not measured", MISSING
    # A method that misses the target in more runs ranks below one that misses it in fewer.
    best = min(found.values(), key=lambda one: (one.missed, one.seconds))
    measured = f"{found[method].seconds:.2f} s; `{best.method}` takes {best.seconds:.2f} s"
    return f"`{method}`", goal, measured, yes(best.method == method)


def flat_goal(steps: StepRows, model: str, method: str) -> Goal:
    goal = f"{model}: bytes per rank constant within 5 % from 4 to 16 ranks"
    sent = [steps.payload(model, hosts, method) for hosts in (4, 8, 16)]
    known = [value for value in sent if value]
    if len(known) < 3:
        return f"`{method}`", goal, "not measured", MISSING
    spread = max(known) / min(known)
    # A rank does not send its own share, 1 / hosts of the whole. This alone makes the bytes grow
    # from 4 to 16 hosts, by 1.25 even for plain DDP. The table also shows the growth without it.
    shares = [value / (1 - 1 / hosts) for value, hosts in zip(known, (4, 8, 16), strict=True)]
    measured = " → ".join(f"{value:,.0f}" for value in known) + f" bytes: {spread:.3f} ×"
    measured += f"; {max(shares) / min(shares):.3f} × if a rank also sent its own share"
    return f"`{method}`", goal, measured, yes(spread <= FLAT)


def loopback_goals(ratios: Ratios) -> list[Goal]:
    rows: list[Goal] = []
    for (model, batch), methods in ratios.items():
        for method, values in methods.items():
            if method in BASELINES:
                continue
            limit = _LOOPBACK_GOALS.get(method, _LOOPBACK_GOAL)
            ratio = statistics.median(values)
            goal = f"loopback, {model}, batch {batch}: at most {limit} × plain DDP"
            rows.append((f"`{method}`", goal, f"{ratio:.3f} ×", yes(ratio <= limit)))
    return rows


def yes(true: bool) -> str:
    return "yes" if true else "**no**"


# --- Tables ---------------------------------------------------------------------------------------


def shapes(steps: StepRows) -> list[tuple[str, int]]:
    """The models and numbers of hosts for which plain DDP was measured."""
    return sorted({key[:2] for key, rows in steps.by_link.items() if PLAIN in rows})


def step_table(steps: StepRows, model: str, hosts: int) -> str:
    speeds = [
        mbit for mbit in steps.values(2) if PLAIN in steps.by_link.get((model, hosts, mbit), {})
    ]
    rows = []
    for method in steps.methods():
        cells = [steps.time_cell(model, hosts, mbit, method) for mbit in speeds]
        if any(cell != MISSING for cell in cells):
            rows.append([f"`{method}`", *cells])
    heads = [f"{model}, {hosts} hosts", *[f"{mbit:,} Mbit/s" for mbit in speeds]]
    return markdown(heads, rows)


def split_table(steps: StepRows, model: str, hosts: int) -> str:
    heads = [f"{model}, {hosts} hosts", "Mbit/s", "compute", "encode", "sockets", "wait"]
    heads += ["in collectives"]
    rows = []
    for mbit in steps.values(2):
        for method in steps.methods():
            split = steps.split(model, hosts, mbit, method)
            row = steps.cell(model, hosts, mbit, method)
            if method == FLOOR or split is None or row is None:
                continue
            parts = [split.compute, split.encode, split.sockets, split.wait]
            inside = f"{float(row['collective_ms']):,.1f}" if row["collective_ms"] else MISSING
            cells = [f"{part:,.1f}" for part in parts]
            rows.append([f"`{method}`", f"{mbit:,}", *cells, inside])
    return markdown(heads, rows)


def bytes_table(steps: StepRows, model: str) -> str:
    # `no-op` is measured in every run, so it shows which numbers of hosts a model has.
    counts = [hosts for hosts in steps.values(1) if steps.payload(model, hosts, FLOOR) is not None]
    rows = []
    for method in steps.methods():
        cells = [bytes_cell(steps, model, hosts, method) for hosts in counts]
        if method != FLOOR and any(cell != MISSING for cell in cells):
            rows.append([f"`{method}`", *cells])
    return markdown([model, *[f"{hosts} hosts" for hosts in counts]], rows)


def bytes_cell(steps: StepRows, model: str, hosts: int, method: str) -> str:
    """The kernel's count, and in brackets that of `handle.stats`, if there is one."""
    kernel = steps.payload(model, hosts, method)
    counted = steps.median("counted_bytes", model, hosts, method)
    if not kernel:
        return MISSING
    return f"{kernel:,.0f}" + (f" ({counted:,.0f})" if counted else "")


def counted_text(steps: StepRows) -> str:
    """The section that compares the kernel's count of bytes with `handle.stats`."""
    rows, ratios = [], {}
    for model, hosts in dict.fromkeys(key[:2] for key in sorted(steps.by_link)):
        for method in steps.methods():
            kernel = steps.payload(model, hosts, method)
            counted = steps.median("counted_bytes", model, hosts, method)
            if kernel and counted:
                control = 2 * (hosts - 1)
                ratios[model, hosts, method] = kernel / counted
                parts = (kernel, counted, control, kernel - counted - control)
                cells = [f"{nbytes:,.0f}" for nbytes in parts]
                rows.append([f"`{method}`", model, str(hosts), *cells, f"{kernel / counted:.2f}"])
    if not rows:
        return ""
    heads = ["method", "model", "hosts", "kernel, payload", "messages", "control messages"]
    heads += ["gloo's headers", "kernel / messages"]
    (model, hosts, method), ratio = max(ratios.items(), key=lambda item: item[1])
    text = f"""
## Bytes counted by the kernel and by `handle.stats`

`handle.stats.bytes_sent` counts messages. `control_bytes_sent` counts control messages: at the end
of a step, two bytes to every other rank (computed here, because the rows are older than this
counter). The kernel counts a third part as well: the headers of the transport, gloo. It adds some
to every send, so they grow with the number of collectives and ranks, and not with the size of the
messages. Where messages are small, headers are most of the traffic. The two counts differ most, by
a factor of {ratio:.1f}, with {model} on {hosts} hosts for

- `{method}`

All figures are medians over the links.
"""
    return f"{text.strip()}\n\n{markdown(heads, rows)}"


def accuracy_text(results: Path) -> str:
    rows = read(results / "time_to_accuracy.csv")
    if not rows:
        return "Not measured yet."
    target = 100 * float(rows[0]["target"])
    lrs = ", ".join(sorted({row["rate"] for row in rows}))
    return f"""
Seconds of training until the small CNN first classifies {target:g} % of the digits' test images
correctly, on {rows[0]["hosts"]} hosts. The time of the tests does not count.

![Time to accuracy](performance/time_to_accuracy.png)

- Each value is the median over the seeds.
- Rank 0's weights are tested every four steps.
- Peak learning rates tried: {lrs}. The table shows each method at its best one, chosen by these
  runs.
- The schedule is that of `recipes/configs/digits.yaml`, 24 epochs.
- Every rank trains on images that the other ranks do not have. `no-op` is rank 0 alone, with its
  part of them.
- A run misses if it does not reach the target by the end of the schedule.
"""


def accuracy_table(reached: list[Reached]) -> str:
    rows = []
    for one in reached:
        missed = f", {one.missed} missed" if one.missed else ""
        cells = [f"{one.mbit}", f"{one.seconds:.2f}", f"{one.steps:.0f}", f"{one.megabytes:.3f}"]
        rows.append([f"`{one.method}`", *cells, f"{one.lr:g}", f"{one.runs}{missed}"])
    return markdown(
        ["method", "Mbit/s", "seconds", "steps", "MB per rank", "learning rate", "runs"], rows
    )


def loopback_text(results: Path) -> str:
    if not read(results / "loopback.csv"):
        return "Not measured yet."
    return """
The cost of the hook where there is nothing to gain: two ranks on the loopback, two cores each, no
shaped link. Every round measures all methods one after another. The ratio is the step time divided
by plain DDP's in the same round.
"""


def loopback_table(ratios: Ratios, to_bf16: Ratios) -> str:
    rows = []
    for (model, batch), methods in ratios.items():
        for method, values in methods.items():
            spread = f"{min(values):.3f} to {max(values):.3f}"
            others = to_bf16.get((model, batch), {}).get(method)
            bf16 = f"{statistics.median(others):.3f}" if others else MISSING
            cells = [f"{statistics.median(values):.3f}", spread, bf16, str(len(values))]
            rows.append([f"`{method}`", f"{model}, batch {batch}", *cells])
    return markdown(
        ["method", "model", "median ratio", "range", "median ratio to `bf16`", "rounds"], rows
    )


def does_not_pay(steps: StepRows, to_plain: Ratios, to_bf16: Ratios) -> str:
    """Every measurement that was not faster than plain DDP, or than DDP with the bf16 hook."""
    rows = []
    for (model, hosts, mbit), methods in sorted(steps.by_link.items()):
        for method in methods:
            found = [steps.relative(model, hosts, mbit, method, to) for to in (PLAIN, BF16)]
            if cells := _slower(method, *found):
                rows.append([f"`{method}`", model, str(hosts), f"{mbit:,}", *cells])
    for key, methods_of in to_plain.items():
        for method in methods_of:
            rounds = [ratios.get(key, {}).get(method) for ratios in (to_plain, to_bf16)]
            found = [statistics.median(values) if values else None for values in rounds]
            if cells := _slower(method, *found):
                # Two hosts, as in network.py's --loopback.
                rows.append([f"`{method}`", key[0], "2", "loopback", *cells])
    heads = ["method", "model", "hosts", "Mbit/s", "step time relative to plain DDP", "to `bf16`"]
    intro = "Not faster than plain DDP, or not faster than DDP with the bf16 hook:"
    intro = intro if rows else "Every measured method was faster than both."
    return "\n\n".join(filter(None, ["### Where it does not pay", intro, markdown(heads, rows)]))


def _slower(method: str, to_plain: float | None, to_bf16: float | None) -> list[str]:
    """The two ratios if the method is not faster than both; empty if it is, or is one of them."""
    if method in (FLOOR, PLAIN):
        return []
    ratios = [to_plain, None if method == BF16 else to_bf16]
    if not any(ratio is not None and ratio >= 1 for ratio in ratios):
        return []
    return [MISSING if ratio is None else f"{ratio:.2f}" for ratio in ratios]


def gain_text(steps: StepRows) -> str:
    """The bound on every gain: the step time of `no-op`, relative to plain DDP and to bf16."""
    links = sorted(key for key in steps.by_link if steps.relative(*key, FLOOR) is not None)
    speeds = sorted({mbit for _, _, mbit in links})
    rows = []
    for model, hosts in dict.fromkeys(key[:2] for key in links):
        for to in (PLAIN, BF16):
            bounds = [steps.relative(model, hosts, mbit, FLOOR, to) for mbit in speeds]
            cells = [MISSING if bound is None else f"{bound:.3f}" for bound in bounds]
            rows.append([model, str(hosts), f"`{to}`", *cells])
    if not rows:
        return ""
    table = markdown(
        ["model", "hosts", "relative to", *[f"{mbit:,} Mbit/s" for mbit in speeds]], rows
    )
    return f"""
### The most that any method can gain

The step time of `no-op`, relative to plain DDP and to DDP with the bf16 hook. No method can be
lower.

{table}
"""


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, or an empty string if there are no rows."""
    if not rows:
        return ""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
