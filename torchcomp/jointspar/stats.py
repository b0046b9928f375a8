"""Counters of JointSpar."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class JointSparStats:
    """A snapshot of one rank's counters after a step.

    Attributes:
        step: number of committed steps. Steps that were skipped for a non-finite gradient are not
            counted.
        kept: names of the layers whose gradients this rank computed in the last step.
        p: probability of each layer in the next step, by name.
        share: expected cost of the next step as a share of the cost of all layers.
        bytes_sent, total_bytes_sent: bytes of messages that this rank sent, in the last step and
            in total.
        dense_bytes_sent, total_dense_bytes_sent: bytes that plain DDP would have sent, in the last
            step and in total.
        control_bytes_sent, total_control_bytes_sent: bytes of control messages that this rank sent,
            in the last step and in total; see :class:`torchcomp.Stats`.
        backward_ms: milliseconds of the last backward pass, without waiting for the exchange.
    """

    step: int
    kept: tuple[str, ...]
    p: Mapping[str, float]
    share: float
    bytes_sent: int
    dense_bytes_sent: int
    total_bytes_sent: int
    total_dense_bytes_sent: int
    control_bytes_sent: int
    total_control_bytes_sent: int
    backward_ms: float

    def __str__(self) -> str:
        return (
            f"{self.step} steps, {len(self.kept)} of {len(self.p)} layers in the last one "
            f"({self.backward_ms:.3g} ms backward), {self.total_bytes_sent:,} bytes sent instead "
            f"of {self.total_dense_bytes_sent:,}, {self.total_control_bytes_sent:,} bytes of "
            "control messages"
        )

    def row(self) -> dict[str, Any]:
        """Return the counters as plain values, for a line of ``metrics.jsonl``."""
        return asdict(self)
