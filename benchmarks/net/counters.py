"""Read from the kernel how many bytes this host has sent. The ranks of a host share its counters.

The queueing discipline (`tc -s qdisc`) counts the bytes and packets on the wire. The payload is
bytes - 66 * packets, including retransmissions. TCP's own count (`ss -i`: bytes_sent -
bytes_retrans) serves as a check. It leaves out the rendezvous of the ranks.

Ranks of one host reach each other at the address of its link, which the kernel delivers within the
host: the queueing discipline does not see these bytes, and TCP's count has them apart.
"""

import re
from dataclasses import dataclass, fields

from benchmarks.net.shell import run

# Ethernet 14, IPv4 20, TCP with time stamps 32. An acknowledgement consists of headers only, so
# subtracting them from every packet removes acknowledgements as well.
HEADER = 66


@dataclass(frozen=True)
class Counters:
    """What this host has sent.

    Attributes:
        wire: bytes on its link.
        packets: packets on its link.
        tcp: bytes on its link, as TCP counts them.
        inside: bytes between its own ranks, as TCP counts them.
    """

    wire: int = 0
    packets: int = 0
    tcp: int = 0
    inside: int = 0

    def __sub__(self, earlier: "Counters") -> "Counters":
        names = [field.name for field in fields(self)]
        return Counters(*(getattr(self, name) - getattr(earlier, name) for name in names))

    @property
    def payload(self) -> int:
        return self.wire - HEADER * self.packets


def read(interface: str, rendezvous_port: int) -> Counters:
    """Read the counters in the network namespace of the calling process."""
    qdisc = run("tc", "-s", "qdisc", "show", "dev", interface)
    sent = re.search(r"Sent (\d+) bytes (\d+) pkt", qdisc)
    assert sent is not None, qdisc
    return Counters(int(sent[1]), int(sent[2]), *_tcp_bytes(rendezvous_port))


def _tcp_bytes(rendezvous_port: int) -> tuple[int, int]:
    """Bytes to other hosts, and bytes within this host."""
    out = inside = 0
    for line in run("ss", "--tcp", "--info", "--numeric", "--no-header", "--oneline").splitlines():
        # Connections of the rendezvous have its port at one end.
        _state, _received, _queued, local, peer, *_ = line.split()
        (own, own_port), (other, other_port) = local.rsplit(":", 1), peer.rsplit(":", 1)
        if str(rendezvous_port) in (own_port, other_port):
            continue
        nbytes = _number("bytes_sent", line) - _number("bytes_retrans", line)
        if own == other:
            inside += nbytes
        else:
            out += nbytes
    return out, inside


def _number(name: str, line: str) -> int:
    found = re.search(rf"\b{name}:(\d+)", line)
    return int(found[1]) if found else 0
