"""Means over the seeds: the excess of the validation loss over plain DDP, and the traffic."""

import statistics
from dataclasses import dataclass

from recipes.small_gpt.training import DENSE


@dataclass(frozen=True)
class Summary:
    """The runs of one method.

    Attributes:
        method: its strings, or "dense".
        loss: mean validation loss, in nats per character.
        excess: by how many per cent the loss is above that of plain DDP with the same seed; mean.
        deviation: the sample standard deviation of the excess; 0 for a single seed.
        saving: how many times fewer bytes than plain DDP a rank sent.
    """

    method: str
    loss: float
    excess: float
    deviation: float
    saving: float

    @property
    def spread(self) -> str:
        """The excess as text, with its deviation."""
        # Adding 0 turns -0.0 into 0.0.
        return f"{round(self.excess, 1) + 0.0:+.1f} ± {self.deviation:.1f}"


def summaries(rows: list[dict[str, str]]) -> list[Summary]:
    """Summarise rows of ``runs.csv`` by method, in the order of its first seed."""
    dense = {row["seed"]: float(row["loss"]) for row in rows if row["method"] == DENSE}
    return [_summary(method, rows, dense) for method in dict.fromkeys(r["method"] for r in rows)]


def _summary(method: str, rows: list[dict[str, str]], dense: dict[str, float]) -> Summary:
    own = [row for row in rows if row["method"] == method]
    losses = [float(row["loss"]) for row in own]
    excess = [100 * (loss / dense[r["seed"]] - 1) for loss, r in zip(losses, own, strict=True)]
    return Summary(
        method=method,
        loss=statistics.fmean(losses),
        excess=statistics.fmean(excess),
        deviation=statistics.stdev(excess) if len(excess) > 1 else 0.0,
        saving=sum(int(row["dense_bytes"]) for row in own) / sum(int(row["bytes"]) for row in own),
    )
