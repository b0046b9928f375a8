"""The tables of the pages, from the committed results."""

from pathlib import Path

from recipes.rows import Row, by_seed, grouped, over_seeds, paired, read_rows
from recipes.tables import TableMaker, table

_PLAIN = ("mean", "ddp")
_TOPK = "ef(topk(0.1))"


def losses(results: Path, *only: str) -> str:
    kinds = grouped(read_rows(results / "runs.csv"), "compress", "mode")
    plain = by_seed(kinds[_PLAIN], "loss")

    def excess(runs: list[Row]) -> str:
        if runs is kinds[_PLAIN]:
            return ""
        return paired(by_seed(runs, "loss"), plain).with_error(3)

    columns = {
        "method": lambda runs: f"`{runs[0]['compress']}`",
        "mode": lambda runs: runs[0]["mode"],
        "loss": lambda runs: over_seeds(runs, "loss").with_deviation(3),
        "excess": excess,
        "between nodes": lambda runs: f"{runs[0]['between']:,}",
        "inside a node": lambda runs: f"{runs[0]['inside']:,}",
        "residual": lambda runs: f"{runs[0]['residual']:,}",
    }
    shown = [runs for kind, runs in kinds.items() if not only or kind == _PLAIN or kind[0] in only]
    return table(columns, shown)


TABLES: dict[str, TableMaker] = {"losses": losses, "modes": lambda results: losses(results, _TOPK)}
