"""Traffic: bytes that cross a rank's link, and how collectives make them up."""

from dataclasses import dataclass


def sum_bytes(nbytes: int, world_size: int) -> int:
    """Bytes that a rank sends (and receives) in a ring all-reduce of `nbytes`."""
    return 2 * (world_size - 1) * nbytes // world_size


class _Counters:
    """Numbers that add up, field by field."""

    def add(self, other: "_Counters") -> None:
        """Add the counts of another to these."""
        for name, more in vars(other).items():
            setattr(self, name, getattr(self, name) + more)


@dataclass
class Load(_Counters):
    """What a step moves over a rank's link."""

    summed: int = 0  # bytes that went through all-reduces
    sent: int = 0  # bytes sent otherwise
    received: int = 0  # bytes received otherwise

    def traffic(self, world_size: int, dense: int) -> "Traffic":
        """The bytes that cross the link, compared with the `dense` ones of plain DDP."""
        around = sum_bytes(self.summed, world_size)
        return Traffic(around + self.sent, around + self.received, dense)


@dataclass
class Traffic(_Counters):
    """Bytes of payload that crossed this rank's link."""

    sent: int = 0  # bytes sent
    received: int = 0  # bytes received
    dense: int = 0  # bytes that plain DDP would have sent instead
