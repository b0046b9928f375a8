"""The tables of the pages, from the committed results."""

from recipes.page_tables import markdown_table
from recipes.result_files import read_csv
from recipes.spread import paired, spread

_HEADER = ["method", "mode", "loss", "excess", "between nodes", "inside a node", "residual"]
_PLAIN = ("mean", "ddp")
_Row = dict[str, str]


def losses(rows: list[_Row]) -> str:
    """Return the mean loss over the seeds, and the bytes, by method and mode."""
    runs: dict[tuple[str, str], list[_Row]] = {}
    for row in rows:
        runs.setdefault((row["compress"], row["mode"]), []).append(row)
    plain, lines = _by_seed(runs[_PLAIN]), []
    for kind, own in runs.items():
        found = _by_seed(own)
        excess = "" if kind == _PLAIN else paired(found, plain).with_error(3)
        counts = [f"{int(own[0][name]):,}" for name in ("between", "inside", "residual")]
        loss = spread(found.values()).with_deviation(3)
        lines.append([f"`{kind[0]}`", kind[1], loss, excess, *counts])
    return markdown_table(_HEADER, lines)


def modes(rows: list[_Row]) -> str:
    """Return the rows of plain DDP, and of TopK in all modes."""
    shown = [row for row in rows if row["compress"] == "ef(topk(0.1))"]
    return losses([row for row in rows if (row["compress"], row["mode"]) == _PLAIN] + shown)


def _by_seed(rows: list[_Row]) -> dict[int, float]:
    return {int(row["seed"]): float(row["loss"]) for row in rows}


TABLES = {
    "losses": lambda results: losses(read_csv(results / "runs.csv")),
    "modes": lambda results: modes(read_csv(results / "runs.csv")),
}
