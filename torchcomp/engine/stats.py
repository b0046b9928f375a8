"""Stats: counters of steps, synchronisations and bytes."""

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass

from torchcomp.exchange.traffic import Traffic, compared


@dataclass(frozen=True)
class Stats:
    """A snapshot of one rank's counters, all of them integers.

    Messages carry the values that are averaged, their indices, and what a selection over all ranks
    takes (counts and histograms). Control messages are checks: of NaN and damaged messages at the
    end of each step, and of values that must match on all ranks, again after a resume. The
    transport adds its own headers to both, which are not counted.

    Each counter of bytes is of the last step, and with ``total_`` in front of its name, since the
    start of the run, with what came before a checkpoint.

    Attributes:
        steps: number of exchanges (gradient methods) or of optimizer steps (local steps).
        syncs: number of exchanges (gradient methods) or of synchronisations (local steps).
        bytes_sent: bytes of messages that this rank sent, as planned by :func:`torchcomp.explain`.
        bytes_received: bytes of messages that this rank received.
        dense_bytes_sent: bytes that plain DDP would have sent.
        control_bytes_sent: bytes of control messages that this rank sent, and as many received, on
            top of `bytes_sent`.
        inside_bytes_sent: bytes that this rank sent inside its node, and as many received, with
            ``register(..., nodes=...)``. All other counters leave them out.
    """

    steps: int
    syncs: int
    bytes_sent: int
    bytes_received: int
    dense_bytes_sent: int
    control_bytes_sent: int
    inside_bytes_sent: int
    total_bytes_sent: int
    total_bytes_received: int
    total_dense_bytes_sent: int
    total_control_bytes_sent: int
    total_inside_bytes_sent: int

    def as_dict(self, prefix: str = "torchcomp/") -> dict[str, int | float]:
        """Return the counters as scalars by name, as TensorBoard and Weights & Biases log them.

        ``traffic_ratio`` and ``total_traffic_ratio`` say how many times fewer bytes than plain DDP
        this rank sent in messages; they are left out while it has sent nothing.

        Args:
            prefix: put in front of every name.
        """
        scalars = {n: v for n, v in asdict(self).items() if isinstance(v, int | float)}
        for ratio, kind in (("traffic_ratio", ""), ("total_traffic_ratio", "total_")):
            if sent := scalars[f"{kind}bytes_sent"]:
                scalars[ratio] = scalars[f"{kind}dense_bytes_sent"] / sent
        return {prefix + name: value for name, value in scalars.items()}

    def __str__(self) -> str:
        return (
            f"{self.steps} steps, {self.syncs} exchanges, "
            f"{sent_instead(self.total_bytes_sent, self.total_dense_bytes_sent)}, "
            f"{self.total_control_bytes_sent:,} bytes of control messages"
        )


def sent_instead(sent: int, dense: int) -> str:
    """Return "1,000 bytes sent instead of 10,000 (10x less)"; `dense` is what DDP would send."""
    # A single rank sends nothing, and neither would DDP, so there is no ratio.
    saved = f" ({compared(sent, dense)})" if sent and dense else ""
    return f"{sent:,} bytes sent instead of {dense:,}{saved}"


class Meter:
    """Counts the traffic of the last step and of the whole run."""

    def __init__(self) -> None:
        self._total = Traffic()
        self.record(Traffic(), 0)

    def record(self, traffic: Traffic, steps: int) -> None:
        """Add the traffic of one step, after which the run has taken `steps` steps."""
        self._total.add(traffic)
        # One assignment of an immutable object: a thread that reads in between gets the counters
        # of one step. After `steps` and `syncs`, Stats has the fields of two Traffic objects.
        self.stats = Stats(steps, steps, *astuple(traffic), *astuple(self._total))

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self._total))

    def load_state_dict(self, state: Mapping[str, int], steps: int) -> None:
        """Restore the totals after `steps` steps. The counters of the last step are not saved."""
        self._total = Traffic(**state)
        self.record(Traffic(), steps)
