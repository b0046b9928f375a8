"""Write docs/performance.md and its pictures from the CSV files in benchmarks/results.

python benchmarks/report.py            # write both
python benchmarks/report.py --check    # exit 1 if the text is not what the CSV files say
"""

import argparse
import statistics
import sys
from pathlib import Path

import plots
import report_kernels
from net.names import BASELINES, FLOOR, PLAIN, POWERSGD
from report_accuracy import Reached, loopback_ratios, times_to_accuracy
from report_data import FLAT, MISSING, StepRows, read

_ROOT = Path(__file__).parents[1]
RESULTS = _ROOT / "benchmarks" / "results"
DOCUMENT = _ROOT / "docs" / "performance.md"
PICTURES = _ROOT / "docs" / "performance"
_LOOPBACK_GOALS = {"mean": 1.03}
_LOOPBACK_GOAL = 1.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it differs")
    text = document(RESULTS)
    if parser.parse_args().check:
        check(text)
        return
    DOCUMENT.write_text(text)
    plots.draw_all(RESULTS, PICTURES)


def check(text: str) -> None:
    lacking = [name for name in plots.NAMES if not (PICTURES / name).is_file()]
    if not DOCUMENT.is_file() or DOCUMENT.read_text() != text:
        sys.exit("docs/performance.md is not what the CSV files say: python benchmarks/report.py")
    if lacking:
        sys.exit(f"docs/performance lacks {', '.join(lacking)}: python benchmarks/report.py")


def document(results: Path) -> str:
    steps = StepRows(results / "network.csv")
    reached = times_to_accuracy(results / "time_to_accuracy.csv")
    ratios = loopback_ratios(results / "loopback.csv")
    parts = [
        _HEAD,
        conditions(results),
        noise(steps),
        "## Goals",
        goals(steps, reached, ratios, report_kernels.goals(results / "encode.csv")),
        "## Time of a step",
        _STEP_TEXT,
        *[step_table(steps, model, hosts) for model, hosts in shapes(steps)],
        "## Where the time goes",
        _SPLIT_TEXT,
        split_table(steps, "resnet18", 4),
        "## Bytes",
        _BYTES_TEXT,
        *[bytes_table(steps, model) for model in steps.values(0)],
        counted_text(steps),
        "## Time to accuracy",
        accuracy_text(results),
        accuracy_table(reached),
        "## Where the network is free",
        loopback_text(results),
        loopback_table(ratios),
        "## What the kernels cost",
        report_kernels.text(results / "encode.csv"),
        markdown(*report_kernels.table(results / "encode.csv")),
        "## Where it does not pay",
        does_not_pay(steps, ratios),
        _AGAIN,
    ]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


_HEAD = f"""
# Performance

Made by `python benchmarks/report.py` from the CSV files in `benchmarks/results`: change nothing
here by hand. What every column means and how to measure again is in
[benchmarks/README.md](../benchmarks/README.md). In the tables, {MISSING} stands for what was not
measured.
"""

_STEP_TEXT = """
Milliseconds of a training step (median), and in brackets the time relative to plain DDP on the same
link. `no-op` exchanges nothing: no method can be faster.

![Step time by method and link](performance/step_time.png)
"""

_SPLIT_TEXT = """
*Compute* is the step of `no-op` (the median of all its rows). *Encode* is the processor's time in
user mode above that of `no-op`, over all threads: selecting, coding, decoding, adding up. *Sockets*
is the same in the kernel. *Wait* is the rest of the step: the network, and waiting for one's turn
on a shared core. What overlaps the backward pass is not in *wait*; *in collectives* is what the
method's own threads spent inside of blocking collectives, overlapped or not (not visible for
asynchronous calls).
"""

_BYTES_TEXT = """
Bytes of payload that a rank sends per step, as the kernel counts them: bytes of the interface's
queue minus 66 bytes of headers for each packet, which takes the acknowledgements out as well. They
contain gloo's own headers and all control messages.

![Bytes by method and hosts](performance/bytes.png)
"""

_AGAIN = """
## Measure again

`benchmarks/README.md` has the command of each table. A number is as good as its machine: all hosts
share its cores, so ratios within a table mean more than milliseconds.
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
    return f"""
Conditions: {distinct("device")}, {distinct("cpus")} cores shared by all hosts; torch
{distinct("torch")}, gloo; revision {distinct("revision")} (+: with changes); measured
{days[0]} to {days[-1]}. One process a host with one thread; hosts are network namespaces whose
links are shaped both ways, {delays} ms one way; TCP cubic. Of scikit-learn's digits, ResNet-18
({parameters(rows, "resnet18")} parameters) sees images of 32 pixels, the small CNN
({parameters(rows, "smallcnn")} parameters) of 8; {distinct("batch")} images per rank and step.
PowerSGD is PyTorch's hook with its defaults and one bucket (`bucket_cap_mb`), because with two it
hangs on gloo; bf16 is PyTorch's hook, which DDP refuses beside gloo by its name alone; naive TopK
is error feedback with `torch.topk`, fp32 values and int32 indices, 1 %.
"""


def noise(steps: StepRows) -> str:
    """How much the floor varied, which is the same work every time: what other load there was."""
    floors: dict[tuple[str, str], list[float]] = {}
    for row in steps.rows:
        if row["method"] == FLOOR:
            floors.setdefault((row["model"], row["hosts"]), []).append(float(row["step_ms"]))
    told = [
        f"{min(times):,.3g} to {max(times):,.3g} ms ({model}, {hosts} hosts, {len(times)} times)"
        for (model, hosts), times in sorted(floors.items())
        if len(times) > 1
    ]
    if not told:
        return ""
    return f"""
How much the machine's other load is in these numbers shows in `no-op`, which is the same work on
every link: {"; ".join(told)}. Differences of that order mean nothing.
"""


_FILES = ("network", "time_to_accuracy", "loopback")


def parameters(rows: list[dict[str, str]], model: str) -> str:
    return next((f"{int(r['parameters']):,}" for r in rows if r["model"] == model), MISSING)


# --- Goals ----------------------------------------------------------------------------------------


def goals(
    steps: StepRows,
    reached: list[Reached],
    ratios: dict[tuple[str, int], dict[str, list[float]]],
    kernels: list[tuple[str, str, str, bool]],
) -> str:
    rows: list[Goal] = []
    for method in two_way(steps.methods()):
        rows += [above_floor_goal(steps, method)]
        rows += [flat_goal(steps, model, method) for model in steps.values(0)]
    rows += [accuracy_goal(reached, method) for method in ours({one.method for one in reached})]
    rows += loopback_goals(ratios)
    rows += [(what, goal, told, yes(reached)) for what, goal, told, reached in kernels]
    return markdown(["method", "goal", "measured", "reached"], [list(row) for row in rows])


Goal = tuple[str, str, str, str]


def two_way(methods: list[str]) -> list[str]:
    """The methods whose bytes do not grow with the hosts."""
    return [method for method in methods if method.startswith("bidirectional(")]


def ours(methods: set[str]) -> list[str]:
    """The methods that are torchcomp's, in alphabetical order."""
    return sorted(methods - set(BASELINES))


def above_floor_goal(steps: StepRows, method: str, model: str = "resnet18", hosts: int = 4) -> Goal:
    goal = f"100 Mbit/s, {hosts} hosts, {model}: time above `no-op` at most half of PowerSGD's"
    own, theirs = (steps.above_floor(model, hosts, 100, name) for name in (method, POWERSGD))
    if own is None or theirs is None:
        return f"`{method}`", goal, "not measured", MISSING
    share = own / theirs
    return f"`{method}`", goal, f"{own:.0f} ms of {theirs:.0f} ms: {share:.2f}", yes(share <= 0.5)


def accuracy_goal(reached: list[Reached], method: str, mbit: int = 10) -> Goal:
    goal = f"{mbit} Mbit/s: shortest time to accuracy of all"
    found = {one.method: one for one in reached if one.mbit == mbit}
    if method not in found:
        return f"`{method}`", goal, "not measured", MISSING
    best = min(found.values(), key=lambda one: (one.missed, one.seconds))
    told = f"{found[method].seconds:.2f} s; `{best.method}` takes {best.seconds:.2f} s"
    return f"`{method}`", goal, told, yes(best.method == method)


def flat_goal(steps: StepRows, model: str, method: str) -> Goal:
    goal = f"{model}: bytes of a rank flat within 5 % from 4 to 16 ranks"
    sent = [steps.payload(model, hosts, method) for hosts in (4, 8, 16)]
    known = [value for value in sent if value]
    if len(known) < 3:
        return f"`{method}`", goal, "not measured", MISSING
    spread = max(known) / min(known)
    # A rank keeps its own share, 1 / ranks: plain DDP's bytes grow by 1.25 from 4 to 16 ranks, too.
    shares = [value / (1 - 1 / hosts) for value, hosts in zip(known, (4, 8, 16), strict=True)]
    told = " → ".join(f"{value:,.0f}" for value in known) + f" bytes: {spread:.3f} ×"
    told += f"; {max(shares) / min(shares):.3f} × with the share that a rank keeps for itself"
    return f"`{method}`", goal, told, yes(spread <= FLAT)


def loopback_goals(ratios: dict[tuple[str, int], dict[str, list[float]]]) -> list[Goal]:
    rows: list[Goal] = []
    for (model, batch), methods in ratios.items():
        for method, values in methods.items():
            if method == PLAIN:
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
    """Models and hosts for which plain DDP was timed."""
    return sorted({key[:2] for key, rows in steps.by_link.items() if PLAIN in rows})


def step_table(steps: StepRows, model: str, hosts: int) -> str:
    rates = [
        mbit for mbit in steps.values(2) if PLAIN in steps.by_link.get((model, hosts, mbit), {})
    ]
    rows = []
    for method in steps.methods():
        cells = [step_cell(steps, model, hosts, mbit, method) for mbit in rates]
        if any(cell != MISSING for cell in cells):
            rows.append([f"`{method}`", *cells])
    heads = [f"{model}, {hosts} hosts", *[f"{mbit:,} Mbit/s" for mbit in rates]]
    return markdown(heads, rows)


def step_cell(steps: StepRows, model: str, hosts: int, mbit: int, method: str) -> str:
    time, ratio = (
        look(model, hosts, mbit, method) for look in (steps.milliseconds, steps.relative)
    )
    return MISSING if time is None or ratio is None else f"{time:,.1f} ({ratio:.3f})"


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
    counts = [hosts for hosts in steps.values(1) if steps.payload(model, hosts, FLOOR) is not None]
    rows = []
    for method in steps.methods():
        sent = [steps.payload(model, hosts, method) for hosts in counts]
        if method != FLOOR and any(sent):
            rows.append([f"`{method}`", *[f"{v:,.0f}" if v else MISSING for v in sent]])
    return markdown([model, *[f"{hosts} hosts" for hosts in counts]], rows)


def counted_text(steps: StepRows) -> str:
    """How far the kernel's count and `handle.stats` are apart."""
    rows = []
    for (model, hosts, _), methods in sorted(steps.by_link.items()):
        for row in methods.values():
            if row["counted_bytes"]:
                kernel, said = float(row["payload_bytes"]), float(row["counted_bytes"])
                apart = f"{kernel / said - 1:+.2%}"
                link = f"{int(row['mbit']):,}"
                rows.append([f"`{row['method']}`", model, str(hosts), link, f"{kernel:,.0f}"])
                rows[-1] += [f"{said:,.0f}", apart]
    heads = ["method", "model", "hosts", "Mbit/s", "kernel, payload", "`handle.stats`", "apart"]
    text = """
`handle.stats` counts the messages themselves. gloo's headers (of every send, so they grow with the
number of collectives and ranks) and the few numbers that conclude a step come on top, which shows
where messages are small.
"""
    return f"{text.strip()}\n\n{markdown(heads, rows)}" if rows else ""


def accuracy_text(results: Path) -> str:
    rows = read(results / "time_to_accuracy.csv")
    if not rows:
        return "Not measured yet."
    target = 100 * float(rows[0]["target"])
    rates = ", ".join(sorted({row["rate"] for row in rows}))
    return f"""
Seconds of training (tests not counted) until the small CNN has {target:g} % of the digits' test
images right for the first time, {rows[0]["hosts"]} hosts: the median over the seeds, tested every
four steps with rank 0's weights. Highest learning rates tried: {rates}; every method gets the best
of these for itself. The schedule is that of `recipes/configs/digits.yaml`, 24 epochs; every rank
trains with images that the others do not have. `no-op` is rank 0 alone, with its part of them.

![Time to accuracy](performance/time_to_accuracy.png)
"""


def accuracy_table(reached: list[Reached]) -> str:
    rows = []
    for one in reached:
        missed = f", {one.missed} missed" if one.missed else ""
        cells = [f"{one.mbit}", f"{one.seconds:.2f}", f"{one.steps:.0f}", f"{one.megabytes:.3f}"]
        rows.append([f"`{one.method}`", *cells, f"{one.rate:g}", f"{one.runs}{missed}"])
    return markdown(["method", "Mbit/s", "seconds", "steps", "MB per rank", "rate", "runs"], rows)


def loopback_text(results: Path) -> str:
    if not read(results / "loopback.csv"):
        return "Not measured yet."
    return """
Two ranks on the loopback, two cores each, nothing shaped: what the hook costs where there is
nothing to win. Every round measures all methods one after another; the ratio is to plain DDP in the
same round.
"""


def loopback_table(ratios: dict[tuple[str, int], dict[str, list[float]]]) -> str:
    rows = []
    for (model, batch), methods in ratios.items():
        for method, values in methods.items():
            spread = f"{min(values):.3f} to {max(values):.3f}"
            cells = [f"{statistics.median(values):.3f}", spread, str(len(values))]
            rows.append([f"`{method}`", f"{model}, batch {batch}", *cells])
    return markdown(["method", "model", "median ratio", "range", "rounds"], rows)


def does_not_pay(steps: StepRows, ratios: dict[tuple[str, int], dict[str, list[float]]]) -> str:
    """Everything measured that was no faster than plain DDP."""
    lines = []
    for (model, hosts, mbit), rows in sorted(steps.by_link.items()):
        for method in rows:
            ratio = steps.relative(model, hosts, mbit, method)
            if method not in (FLOOR, PLAIN) and ratio is not None and ratio >= 1:
                where = f"{model}, {hosts} hosts, {mbit:,} Mbit/s"
                lines.append(f"- `{method}`: {ratio:.2f} × plain DDP ({where})")
    for (model, _batch), methods in ratios.items():
        for method, values in methods.items():
            ratio = statistics.median(values)
            if method != PLAIN and ratio >= 1:
                lines.append(f"- `{method}`: {ratio:.2f} × plain DDP ({model}, loopback)")
    intro = "Measured, and no faster than plain DDP:" if lines else "No such row was measured."
    return "\n\n".join(filter(None, [intro, "\n".join(lines), gain_text(steps)]))


def gain_text(steps: StepRows) -> str:
    """The most that any method can win: what `no-op` leaves of plain DDP's time."""
    parts = []
    for (model, hosts, mbit), rows in sorted(steps.by_link.items()):
        ratio = steps.relative(model, hosts, mbit, FLOOR)
        if ratio is not None and FLOOR in rows:
            parts.append(f"{ratio:.3f} ({model}, {hosts} hosts, {mbit:,} Mbit/s)")
    bound = "What `no-op` leaves of plain DDP's time bounds every gain"
    return f"{bound}: {'; '.join(parts)}." if parts else ""


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    """A table; nothing without rows."""
    if not rows:
        return ""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
