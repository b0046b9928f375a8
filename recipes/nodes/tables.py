"""The table of the page, from the committed results."""

from recipes.page_tables import markdown_table
from recipes.result_files import read_csv
from recipes.spread import paired, spread

_HEADER = ["method", "mode", "loss", "excess", "between nodes", "inside a node", "residual"]


def losses(rows: list[dict[str, str]]) -> str:
    """Return the mean loss over the seeds, and the bytes, by method and mode."""
    kinds = dict.fromkeys((row["compress"], row["mode"]) for row in rows)
    plain = _by_seed(rows, "mean", "ddp")
    lines = []
    for method, mode in kinds:
        own = _by_seed(rows, method, mode)
        excess = paired(own, plain).with_error(3) if own != plain else ""
        one = next(row for row in rows if (row["compress"], row["mode"]) == (method, mode))
        counts = [f"{int(one[name]):,}" for name in ("between", "inside", "residual")]
        loss = spread(own.values()).with_deviation(3)
        lines.append([f"`{method}`", mode, loss, excess, *counts])
    return markdown_table(_HEADER, lines)


def _by_seed(rows: list[dict[str, str]], method: str, mode: str) -> dict[int, float]:
    return {
        int(row["seed"]): float(row["loss"])
        for row in rows
        if (row["compress"], row["mode"]) == (method, mode)
    }


TABLES = {"losses": lambda results: losses(read_csv(results / "runs.csv"))}
