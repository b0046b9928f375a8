"""Stats: what a handle reports about its traffic and its memory."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchcomp.traffic import Traffic


@dataclass(frozen=True)
class Stats:
    """A snapshot of one rank's counters.

    Attributes:
        steps: exchanges (gradient methods) or optimizer steps (local steps) so far.
        syncs: exchanges so far; for local steps, the synchronisations.
        bytes_sent: payload bytes that this rank sent in the last step.
        bytes_received: payload bytes that it received in the last step.
        dense_bytes_sent: bytes that plain DDP would have sent in that step.
        total_bytes_sent: payload bytes sent since the start.
        total_bytes_received: payload bytes received since the start.
        total_dense_bytes_sent: bytes that plain DDP would have sent since the start.
        error_norms: Euclidean norm of this rank's error memory, by parameter name.
        owner_norms: the same of what it owes as the owner of shards, where the method has owners.
    """

    steps: int
    syncs: int
    bytes_sent: int
    bytes_received: int
    dense_bytes_sent: int
    total_bytes_sent: int
    total_bytes_received: int
    total_dense_bytes_sent: int
    error_norms: Mapping[str, float] = field(default_factory=dict)
    owner_norms: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        saved = ""
        if self.total_bytes_sent:
            saved = f" ({self.total_dense_bytes_sent / self.total_bytes_sent:.3g} x less)"
        return (
            f"{self.steps} steps, {self.syncs} exchanges, {self.total_bytes_sent:,} bytes sent "
            f"instead of {self.total_dense_bytes_sent:,}{saved}, "
            f"error memory of norm {self.error_norm:.3g}"
        )

    @property
    def error_norm(self) -> float:
        """Euclidean norm of this rank's whole error memory; 0.0 where there is none."""
        return math.hypot(*self.error_norms.values())


class Meter:
    """Keeps the traffic of the last step and of the whole run."""

    def __init__(self) -> None:
        self.last = Traffic()
        self.total = Traffic()

    def record(self, step: Traffic) -> None:
        """Add the traffic of one step."""
        self.last = step
        self.total.add(step)

    def snapshot(
        self,
        steps: int,
        syncs: int,
        error_norms: Mapping[str, float],
        owner_norms: Mapping[str, float],
    ) -> Stats:
        """The counters as :class:`Stats`."""
        return Stats(
            steps=steps,
            syncs=syncs,
            bytes_sent=self.last.sent,
            bytes_received=self.last.received,
            dense_bytes_sent=self.last.dense,
            total_bytes_sent=self.total.sent,
            total_bytes_received=self.total.received,
            total_dense_bytes_sent=self.total.dense,
            error_norms=error_norms,
            owner_norms=owner_norms,
        )

    def state_dict(self) -> dict[str, int]:
        """The totals, for a checkpoint."""
        return {"sent": self.total.sent, "received": self.total.received, "dense": self.total.dense}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the totals."""
        self.total = Traffic(**state)
