"""Stats: counters of steps, synchronisations and bytes."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass

from torchcomp.traffic import Traffic, compared


@dataclass(frozen=True)
class Stats:
    """A snapshot of one rank's counters.

    Attributes:
        steps: number of exchanges (gradient methods) or of optimizer steps (local steps).
        syncs: number of exchanges (gradient methods) or of synchronisations (local steps).
        bytes_sent: payload bytes that this rank sent in the last step.
        bytes_received: payload bytes that this rank received in the last step.
        dense_bytes_sent: bytes that plain DDP would have sent in the last step.
        total_bytes_sent: payload bytes sent since the start.
        total_bytes_received: payload bytes received since the start.
        total_dense_bytes_sent: bytes that plain DDP would have sent since the start.
    """

    steps: int
    syncs: int
    bytes_sent: int
    bytes_received: int
    dense_bytes_sent: int
    total_bytes_sent: int
    total_bytes_received: int
    total_dense_bytes_sent: int

    def __str__(self) -> str:
        # A single rank sends nothing, and neither would DDP, so there is no ratio.
        saved = ""
        if self.total_bytes_sent and self.total_dense_bytes_sent:
            saved = f" ({compared(self.total_bytes_sent, self.total_dense_bytes_sent)})"
        return (
            f"{self.steps} steps, {self.syncs} exchanges, {self.total_bytes_sent:,} bytes sent "
            f"instead of {self.total_dense_bytes_sent:,}{saved}"
        )


class Meter:
    """Counts the traffic of the last step and of the whole run."""

    def __init__(self) -> None:
        self.last = Traffic()
        self.total = Traffic()

    def record(self, step: Traffic) -> None:
        """Add the traffic of one step."""
        self.last = step
        self.total.add(step)

    def snapshot(self, steps: int, syncs: int) -> Stats:
        """Return a snapshot of the counters."""
        # After `steps` and `syncs`, Stats has the fields of two Traffic objects, in their order.
        return Stats(steps, syncs, *astuple(self.last), *astuple(self.total))

    def state_dict(self) -> dict[str, int]:
        """Return the totals, for a checkpoint."""
        return dict(vars(self.total))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the totals. The counters of the last step are not saved."""
        self.total = Traffic(**state)
