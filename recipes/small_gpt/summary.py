"""Means over the seeds: the excess of the validation loss over plain DDP, and the traffic."""

from dataclasses import dataclass

from recipes.small_gpt.training import DENSE
from recipes.spread import Spread, spread


@dataclass(frozen=True)
class Summary:
    """The runs of one method.

    Attributes:
        method: its strings, or "dense".
        loss: mean validation loss, in nats per character.
        excess: by how many per cent the loss is above that of plain DDP with the same seed.
        saving: how many times fewer bytes than plain DDP a rank sent.
    """

    method: str
    loss: Spread
    excess: Spread
    saving: float


def summaries(rows: list[dict[str, str]]) -> list[Summary]:
    """Summarise rows of ``runs.csv`` by method, in the order of its first seed."""
    dense = {row["seed"]: float(row["loss"]) for row in rows if row["method"] == DENSE}
    return [_summary(method, rows, dense) for method in dict.fromkeys(r["method"] for r in rows)]


def _summary(method: str, rows: list[dict[str, str]], dense: dict[str, float]) -> Summary:
    own = [row for row in rows if row["method"] == method]
    return Summary(
        method=method,
        loss=spread(float(row["loss"]) for row in own),
        excess=spread(100 * (float(row["loss"]) / dense[row["seed"]] - 1) for row in own),
        saving=sum(int(row["dense_bytes"]) for row in own) / sum(int(row["bytes"]) for row in own),
    )
