"""The tables that end a run: each step over that of plain DDP, and the host's time for a bucket."""

from collections.abc import Iterator

from benchmarks.figures import Row
from benchmarks.net.names import BASELINES, PLAIN

_WIDTH = 80
_FIGURES = (9, 12)  # widths of the two columns of numbers


def text(rows: list[Row]) -> str:
    """Return the tables of the rows of one run, in lines of at most 80 characters."""
    return "".join((*_steps(rows), *_host(rows)))


def _steps(rows: list[Row]) -> Iterator[str]:
    steps = [row for row in rows if row["part"] == "step"]
    for model, ranks in dict.fromkeys((row["model"], row["ranks"]) for row in steps):
        each = {row["what"]: row for row in steps if (row["model"], row["ranks"]) == (model, ranks)}
        plain = float(each[PLAIN]["step_ms"]) if PLAIN in each else None
        yield f"\nA training step of {model}, ranks: {ranks}\n"
        yield _line("method", "ms", "over plain")
        for what in sorted(each, key=lambda what: what not in BASELINES):
            step = float(each[what]["step_ms"])
            yield _line(what, f"{step:.2f}", f"{step / plain:.3f}" if plain else "–")


def _host(rows: list[Row]) -> Iterator[str]:
    host = [row for row in rows if row["part"] == "host"]
    if host:
        size, ranks = int(host[0]["n"]) * 4 / 2**20, host[0]["ranks"]  # float32, in MiB
        yield f"\nThe calling thread's time for a bucket of {size:g} MiB, ranks: {ranks}\n"
        yield _line("method", "", "us")
        yield from (_line(row["what"], "", row["cpu_us"]) for row in host)


def _line(what: str, *figures: str) -> str:
    cells = "".join(f"{figure:>{width}}" for figure, width in zip(figures, _FIGURES, strict=True))
    name = _WIDTH - len(cells)
    return f"{what[:name]:<{name}}{cells}\n"
