"""Links: the seconds of collectives among ranks that one does not have, by formula.

N ranks are on M = N / r nodes of r ranks, which share a network card. B and l are bandwidth and
latency between nodes, b and k those inside a node. The message has m bytes; see
:mod:`.collectives`.

    around     = (M - 1) l + (N - M) k                    (once around a ring of all ranks)
    all_reduce = 2 (N - 1)/N m / min(B, b) + 2 around
    all_gather = (N - 1) m / min(B, b) + around
    all_to_all = max(r (N - r)/(N - 1) m / B, (r - 1)/(N - 1) m / b) + l

- A ring crosses each card once, whatever the number of ranks of a node.
- gloo sends the small messages of an all-gather to every rank at once, as an all-to-all.
- NCCL has trees: the latency of its all-reduce is at most that of 2 log2 M + 2 log2 r hops.
- Each collective takes an overhead on top: launch and synchronisation.
- gloo agrees on every message before it sends it, which takes further latencies.
"""

import math
from dataclasses import dataclass

from torchcomp.advisor.collectives import ALL_GATHER, ALL_TO_ALL, sent_per_byte
from torchcomp.exchange.traffic import COPIED
from torchcomp.specs.checks import (
    check_at_least_0,
    check_choice,
    check_count,
    check_fraction,
    check_positive,
)
from torchcomp.specs.errors import SpecError

# Latencies that gloo takes for a hop, and seconds of a core to send and receive a byte over TCP.
# Fitted once on the shaped network of benchmarks/net, with messages of 64 bytes between 2 hosts:
# 1.3 ms for an all-to-all at a latency of 0.5 ms.
_GLOO_TRIPS, _GLOO_CPU = 2.6, 1.2e-9


@dataclass(frozen=True)
class Link:
    """The network of a cluster, as its data sheet has it.

    Attributes:
        gbit: Gbit/s of a node's network card, in each direction.
        latency_us: microseconds from one node to another, one way.
        ranks_per_node: ranks that share a card.
        inside_gbit: Gbit/s of a rank to the others of its node.
        inside_latency_us: microseconds from one rank of a node to another.
        efficiency: share of the bandwidth that collectives reach.
        overhead_us: microseconds that each collective takes on top.
        backend: "nccl" or "gloo".
    """

    gbit: float
    latency_us: float = 30.0
    ranks_per_node: int = 1
    inside_gbit: float = 1000.0
    inside_latency_us: float = 5.0
    efficiency: float = 0.9
    overhead_us: float = 20.0
    backend: str = "nccl"

    def __post_init__(self) -> None:
        check_positive("gbit", self.gbit)
        check_at_least_0("latency_us", self.latency_us)
        check_count("ranks_per_node", self.ranks_per_node)
        check_positive("inside_gbit", self.inside_gbit)
        check_at_least_0("inside_latency_us", self.inside_latency_us)
        check_fraction("efficiency", self.efficiency)
        check_at_least_0("overhead_us", self.overhead_us)
        check_choice("backend", self.backend, ("nccl", "gloo"))

    def __str__(self) -> str:
        ranks = f", {self.ranks_per_node} ranks per node" if self.ranks_per_node > 1 else ""
        return f"{self.gbit:g} Gbit/s, {self.latency_us:g} us{ranks}, {self.backend}"

    def nodes(self, world_size: int) -> int:
        """Return the number of nodes of `world_size` ranks, which must fill them."""
        if world_size > self.ranks_per_node and world_size % self.ranks_per_node:
            raise SpecError(
                f"world_size={world_size} is not a multiple of ranks_per_node="
                f"{self.ranks_per_node}: the model needs either one node or full nodes"
            )
        return max(1, world_size // self.ranks_per_node)

    def among(self, world_size: int) -> "LinkTimes":
        """Return the times of collectives among `world_size` ranks."""
        return LinkTimes(self, world_size, world_size // self.nodes(world_size))


@dataclass(frozen=True)
class LinkTimes:
    """The computed seconds of collectives; see the head of this file."""

    link: Link
    world_size: int  # N
    node: int  # r

    def seconds(self, kind: str, nbytes: float) -> float:
        """Return the seconds of one collective, for a message of this size."""
        if self.world_size == 1:
            return self.link.overhead_us * 1e-6
        at_once = kind == ALL_TO_ALL
        if kind == ALL_GATHER and self._gloo and nbytes <= COPIED:
            at_once, nbytes = True, nbytes * (self.world_size - 1)
        moving, latency = self._at_once(nbytes) if at_once else self._around(kind, nbytes)
        trips = _GLOO_TRIPS if self._gloo else 1.0
        return moving + trips * latency + self.link.overhead_us * 1e-6

    def cpu(self, kind: str, nbytes: float) -> float:
        """Return the seconds for which it keeps a core of each rank busy; 0 for NCCL."""
        if not self._gloo or self.world_size == 1:
            return 0.0
        moved = nbytes * sent_per_byte(kind, self.world_size)
        return min(self.seconds(kind, nbytes), _GLOO_CPU * moved)

    def _around(self, kind: str, nbytes: float) -> tuple[float, float]:
        """Return the seconds of moving bytes around a ring, and the latencies."""
        nodes, ranks = self.world_size // self.node, self.world_size
        slowest = self._inside if nodes == 1 else self._card
        if self.node > 1:
            slowest = min(slowest, self._inside)
        far, near = self.link.latency_us * 1e-6, self.link.inside_latency_us * 1e-6
        latency = (nodes - 1) * far + (ranks - nodes) * near
        if kind != ALL_GATHER:
            hops = math.log2(nodes) * far + math.log2(self.node) * near
            latency = 2 * (latency if self._gloo else min(latency, hops))
        return nbytes * sent_per_byte(kind, ranks) / slowest, latency

    def _at_once(self, nbytes: float) -> tuple[float, float]:
        """Return the seconds of sending to all others at once, and the latency."""
        others, node = self.world_size - 1, self.node
        between = node * (self.world_size - node) / others * nbytes / self._card
        inside = (node - 1) / others * nbytes / self._inside
        hop = self.link.inside_latency_us if node == self.world_size else self.link.latency_us
        return max(between, inside), hop * 1e-6

    @property
    def _card(self) -> float:  # B, bytes per second
        return self.link.gbit * 1e9 / 8 * self.link.efficiency

    @property
    def _inside(self) -> float:  # b
        return self.link.inside_gbit * 1e9 / 8 * self.link.efficiency

    @property
    def _gloo(self) -> bool:
        return self.link.backend == "gloo"
