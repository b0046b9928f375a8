"""The tables of the page."""

from recipes.page_tables import markdown_table
from recipes.result_files import read_csv

_HEADER = (
    *("method", "ranks", "kills", "starts", "repeated steps"),
    *("bit-identical", "lost, relative"),
)


def kills(rows: list[dict[str, str]]) -> str:
    """Return a line for every run with kills."""
    return markdown_table(_HEADER, [_line(row) for row in rows])


def _line(row: dict[str, str]) -> list[object]:
    ranks = [int(count) for count in row["ranks"].split()]
    smallest, largest = min(ranks), max(ranks)
    flags = [f"{name}={row[name]}" for name in ("sync", "outer") if row[name] != "none"]
    return [
        f"`{', '.join([row['compress'], *flags])}`",
        f"{smallest}" if smallest == largest else f"{smallest} to {largest}",
        row["kills"],
        len(ranks),
        row["repeated"],
        row["identical"] or "–",
        row["deviation"],
    ]


def origin(rows: list[dict[str, str]]) -> str:
    """Return the commands, versions and dates of the rows, and how long their runs took."""
    commands = "`, `".join(dict.fromkeys(row["command"] for row in rows))
    versions = "; ".join(dict.fromkeys(row["versions"] for row in rows))
    dates = ", ".join(sorted({row["date"] for row in rows}))
    minutes = sum(int(row["seconds"]) for row in rows) / 60
    return (
        f"- Made by `{commands}`, with {versions}, on {dates}. The runs with kills took "
        f"{minutes:.0f} minutes."
    )


TABLES = {
    "kills": lambda results: kills(read_csv(results / "kills.csv")),
    "origin": lambda results: origin(read_csv(results / "kills.csv")),
}
