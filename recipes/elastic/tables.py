"""The tables of the page."""

from pathlib import Path

from recipes.rows import Row, distinct, read_rows
from recipes.tables import TableMaker, table


def _method(row: Row) -> str:
    flags = [f"{name}={row[name]}" for name in ("sync", "outer") if row[name] != "none"]
    return f"`{', '.join([row['compress'], *flags])}`"


def _ranks(row: Row) -> str:
    counts = list(map(int, str(row["ranks"]).split()))
    least, most = min(counts), max(counts)
    return f"{least}" if least == most else f"{least} to {most}"


_COLUMNS = {
    "method": _method,
    "ranks": _ranks,
    "kills": lambda row: row["kills"],
    "starts": lambda row: len(str(row["ranks"]).split()),
    "repeated steps": lambda row: row["repeated"],
    "bit-identical": lambda row: row["identical"] or "–",
    "lost, relative": lambda row: f"{row['deviation']:.1e}",
}


def kills(results: Path) -> str:
    """Return a line for every run with kills."""
    return table(_COLUMNS, read_rows(results / "kills.csv"))


def origin(results: Path) -> str:
    """Return the commands, versions and dates of the rows, and how long their runs took."""
    rows = read_rows(results / "kills.csv")
    commands, versions = (
        "`, `".join(distinct(rows, "command")),
        "; ".join(distinct(rows, "versions")),
    )
    dates = ", ".join(sorted(distinct(rows, "date")))
    minutes = sum(row["seconds"] for row in rows) / 60
    return (
        f"- Made by `{commands}`, with {versions}, on {dates}. The runs with kills took "
        f"{minutes:.0f} minutes."
    )


TABLES: dict[str, TableMaker] = {"kills": kills, "origin": origin}
