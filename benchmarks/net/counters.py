"""What the kernel says that this host has sent.

The queueing discipline (`tc -s qdisc`) counts the bytes and the packets of the wire. Each packet
carries 66 bytes of headers (Ethernet 14, IPv4 20, TCP with time stamps 32), and an acknowledgement
is nothing else: so bytes - 66 * packets is payload. Retransmissions are in it. TCP's own count of
the same (`ss -i`: bytes_sent - bytes_retrans), without the rendezvous of the ranks, is the second
opinion.
"""

import re
from dataclasses import dataclass, fields

from net.shell import run

HEADER = 66


@dataclass(frozen=True)
class Counters:
    """Bytes and packets that this host has sent."""

    wire: int
    packets: int
    tcp: int

    def __sub__(self, earlier: "Counters") -> "Counters":
        names = [field.name for field in fields(self)]
        return Counters(*(getattr(self, name) - getattr(earlier, name) for name in names))

    @property
    def payload(self) -> int:
        return self.wire - HEADER * self.packets


def read(interface: str, rendezvous_port: int) -> Counters:
    """Read them, in the namespace of the calling process."""
    qdisc = run("tc", "-s", "qdisc", "show", "dev", interface)
    sent = re.search(r"Sent (\d+) bytes (\d+) pkt", qdisc)
    assert sent is not None, qdisc
    return Counters(int(sent[1]), int(sent[2]), _tcp_bytes(rendezvous_port))


def _tcp_bytes(rendezvous_port: int) -> int:
    total = 0
    for line in run("ss", "--tcp", "--info", "--numeric", "--no-header", "--oneline").splitlines():
        _state, _received, _queued, local, peer, *_ = line.split()
        if str(rendezvous_port) not in (local.rpartition(":")[2], peer.rpartition(":")[2]):
            total += _number("bytes_sent", line) - _number("bytes_retrans", line)
    return total


def _number(name: str, line: str) -> int:
    found = re.search(rf"\b{name}:(\d+)", line)
    return int(found[1]) if found else 0
