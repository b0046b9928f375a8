"""Traffic: bytes that a rank sends and receives, computed from its collectives."""

from dataclasses import dataclass

COPIED = 2**20
"""Up to this many bytes, gloo copies the message of an all-gather to every rank."""


def sum_bytes(nbytes: int, world_size: int) -> int:
    """Return the bytes that a rank sends, and receives, in a ring all-reduce of `nbytes`."""
    # A reduce-scatter and an all-gather, each of (W - 1) / W of the bytes.
    return 2 * (world_size - 1) * nbytes // world_size


def gathered(nbytes: int, world_size: int, node: int) -> int:
    """Return the bytes that a node sends and receives in an all-gather of `nbytes` of each rank."""
    # On gloo, small messages are copied to every rank. Larger ones go around a ring, in which only
    # the last rank of a node sends to another node. NCCL uses rings.
    copies = node * (world_size - node)
    return nbytes * (copies if nbytes <= COPIED else world_size - 1)


def compared(sent: int, dense: int, other: str = "") -> str:
    """Return "19.7x less", "2.5x more" or "the same", and with `other`, "than plain DDP"."""
    factor = three_digits(max(sent, dense) / min(sent, dense))
    less = f"{factor}x {'less' if dense > sent else 'more'}"
    result, link = ("the same", "as") if factor == "1" else (less, "than")
    return f"{result} {link} {other}" if other else result


def three_digits(number: float) -> str:
    """Return a number of at least 1 with three digits, or all of its digits from 100 on."""
    # From 100 on, `.3g` would round away digits or switch to an exponent.
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


class _Counters:
    def add(self, other: "_Counters") -> None:
        """Add the counts of `other` to these, field by field."""
        for name, more in vars(other).items():
            setattr(self, name, getattr(self, name) + more)


@dataclass
class Load(_Counters):
    """Bytes of the collectives of a step, before the number of ranks is taken into account."""

    summed: int = 0  # bytes of the tensors that were all-reduced
    sent: int = 0  # bytes sent by other collectives
    received: int = 0  # bytes received by other collectives
    control: int = 0  # bytes sent, and as many received, in control messages

    def traffic(self, world_size: int, dense: int = 0) -> "Traffic":
        """Return the traffic of this rank; `dense` is what plain DDP would have sent."""
        around = sum_bytes(self.summed, world_size)
        return Traffic(around + self.sent, around + self.received, dense, self.control)


@dataclass
class Traffic(_Counters):
    """Bytes that this rank sent and received; the transport's headers are not included."""

    sent: int = 0
    received: int = 0
    dense: int = 0  # bytes that plain DDP would have sent instead
    control: int = 0  # bytes sent, and as many received, in control messages, on top of `sent`
    inside: int = 0  # bytes sent inside the node, and as many received, on top of `sent`
