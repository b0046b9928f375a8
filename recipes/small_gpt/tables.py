"""The tables and the picture of the page: excess of the loss over plain DDP, and traffic."""

from dataclasses import dataclass
from pathlib import Path

from recipes.rows import Row, Spread, grouped, over_seeds, read_rows, where
from recipes.small_gpt.training import DENSE
from recipes.tables import TableMaker, table

_WARMUP = 'warmup(topk(0.17, values="int4"), steps=60, start=0.34)'


@dataclass(frozen=True)
class Method:
    """The runs of one method: by how many per cent the loss is above plain DDP's, by seed."""

    name: str
    loss: Spread
    excess: Spread
    saving: float  # how many times fewer bytes than plain DDP a rank sent


def compared(folder: Path) -> list[Method]:
    """Return the methods of a folder, plain DDP included, the lowest excess first."""
    rows = read_rows(folder / "runs.csv")
    dense = {row["seed"]: row["loss"] for row in where(rows, method=DENSE)}

    def excess(row: Row) -> float:
        return 100 * (row["loss"] / dense[row["seed"]] - 1)

    found = [
        Method(
            name,
            over_seeds(runs, "loss"),
            over_seeds(runs, excess),
            sum(row["dense_bytes"] for row in runs) / sum(row["bytes"] for row in runs),
        )
        for name, runs in grouped(rows, "method").items()
    ]
    return sorted(found, key=lambda each: each.excess.mean)


def others(folder: Path) -> list[Method]:
    return [each for each in compared(folder) if each.name != DENSE]


_METHOD = {"method": lambda each: f"`{each.name}`", "traffic": lambda each: f"{each.saving:.1f}x"}
_EXCESS = {"excess, %": lambda each: each.excess.with_error(1)}
_LOSS = {"loss": lambda each: f"{each.loss.mean:.3f}"}


def longer_runs(results: Path) -> str:
    """Return the table of 600 and 2,400 steps, the least traffic saved first."""
    lengths = [
        {each.name: each for each in others(results / folder)}
        for folder in ("steps_600", "steps_2400")
    ]
    short, long = lengths

    def traffic(each: Method) -> str:
        # The warm-up has another share of the longer run.
        found = [length[each.name].saving for length in lengths if each.name in length]
        return ", ".join(dict.fromkeys(f"{saving:.1f}x" for saving in found))

    def excess(length: dict[str, Method], each: Method) -> str:
        return length[each.name].excess.with_error(1) if each.name in length else ""

    columns = {
        "method": lambda each: f"`{each.name}`",
        "traffic": traffic,
        "600 steps, %": lambda each: excess(short, each),
        "2,400 steps, %": lambda each: excess(long, each),
    }
    return table(columns, sorted((long | short).values(), key=lambda each: each.saving))


def dense(results: Path) -> str:
    folders = {"200": "", "600": "steps_600", "2,400": "steps_2400"}
    found = [
        (steps, next(each.loss for each in compared(results / folder) if each.name == DENSE))
        for steps, folder in folders.items()
    ]
    columns = {
        "steps": lambda each: each[0],
        "loss of plain DDP, nats per character": lambda each: each[1].with_deviation(3),
        "seeds": lambda each: each[1].count,
    }
    return table(columns, found)


TABLES: dict[str, TableMaker] = {
    "short_runs": lambda results: table(_METHOD | _EXCESS | _LOSS, others(results)),
    "longer_runs": longer_runs,
    "four_ranks": lambda results: table(_METHOD | _EXCESS, others(results / "four_ranks")).replace(
        _WARMUP, "W"
    ),
    "dense": dense,
}
