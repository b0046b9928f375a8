"""Plan: the result of explain, and its table."""

from dataclasses import dataclass

from torchcomp.advisor.units import exact_size, wrapped
from torchcomp.exchange.traffic import compared


@dataclass(frozen=True)
class NodePlan:
    """What a method sends per step if several ranks share a network card, in two ways.

    Flat: all ranks exchange with all others, as ``register(model, spec)`` does. Two levels:
    ``register(model, spec, nodes=ranks)``.

    Attributes:
        ranks: number of ranks of a node.
        dense_card_bytes: bytes that plain DDP sends through the card of a node.
        flat_card_bytes: bytes that the flat method sends through it. On NCCL, those of an
            all-gather are an upper bound: NCCL sends around a ring what gloo copies to every rank.
        card_bytes: bytes that two levels send through it.
        bytes_sent: bytes that one rank of two levels sends between the nodes.
        inside_bytes_sent: bytes that it sends inside its node.
        memory_bytes: bytes of state that it stores in addition to the model.
    """

    ranks: int
    dense_card_bytes: int
    flat_card_bytes: int
    card_bytes: int
    bytes_sent: int
    inside_bytes_sent: int
    memory_bytes: int

    def rows(self, nodes: int) -> list[tuple[str, str]]:
        """Return the rows of the table, for this number of nodes."""
        sent = {"the flat method": self.flat_card_bytes, f"nodes={self.ranks}": self.card_bytes}
        (best, least), (other, most) = sorted(sent.items(), key=lambda item: item[1])
        better = f"{best} sends {compared(least, most, other)}" if least else "nothing is sent"
        return [
            ("nodes", f"{nodes:,} with a network card each; ranks per node: {self.ranks:,}"),
            ("card, plain DDP", exact_size(self.dense_card_bytes)),
            ("card, flat", exact_size(self.flat_card_bytes)),
            ("card, two levels", exact_size(self.card_bytes)),
            ("inside, per rank", exact_size(self.inside_bytes_sent)),
            ("state, two levels", exact_size(self.memory_bytes)),
            ("better", better),
        ]


@dataclass(frozen=True)
class Plan:
    """The cost of a method per rank and step. ``str(plan)`` is a table.

    Bytes are those of messages, as in :class:`torchcomp.Stats`. Control messages come on top: in
    most methods, four bytes to every other rank at the end of a step.

    Attributes:
        spec: the method or schedule, in canonical form.
        numel: number of gradient elements of the model.
        world_size: number of ranks.
        collective: "allreduce", "allgather" or "sharded" (all-to-all to the owners of shards, then
            all-gather). Joined by "and" if groups of parameters differ.
        message_bytes: size of one rank's encoded gradient.
        bytes_sent: bytes that a rank sends per step; for a schedule, on average.
        bytes_received: bytes that a rank receives per step; for a schedule, on average.
        dense_bytes_sent: bytes that a rank sends per step under plain DDP.
        memory_bytes: bytes of state that a rank stores in addition to the model.
        break_even_world_size: smallest number of ranks at which the method sends at least as much
            as plain DDP. None if there is none up to a million, or if all messages are all-reduced.
        warmup_steps: length of a method's warm-up in steps, else None. The other fields are those
            of the steps after it. A schedule has None: its averages include the warm-up.
        warmup_bytes_sent: bytes that a rank sends per step of the warm-up, on average.
        syncs: number of synchronisations of the whole run, for a schedule; else None.
        total_steps: number of optimizer steps of the whole run, for a schedule; else None.
        nodes: bytes through the network card of a node, for a method with `nodes`; else None. All
            other fields are those of the flat method.
    """

    spec: str
    numel: int
    world_size: int
    collective: str
    message_bytes: int
    bytes_sent: int
    bytes_received: int
    dense_bytes_sent: int
    memory_bytes: int
    break_even_world_size: int | None
    warmup_steps: int | None = None
    warmup_bytes_sent: int | None = None
    syncs: int | None = None
    total_steps: int | None = None
    nodes: NodePlan | None = None

    def __str__(self) -> str:
        traffic, even = "nothing is sent", "none (up to a million ranks)"
        # On one rank, DDP would send nothing either, so there is no ratio.
        if self.bytes_sent and self.dense_bytes_sent:
            traffic = compared(self.bytes_sent, self.dense_bytes_sent, "plain DDP")
        if self.collective == "allreduce":
            even = "none (the same ratio for any number of ranks)"
        if self.break_even_world_size is not None:
            even = f"{self.break_even_world_size:,} ranks (no saving from there on)"
        rows = [
            ("elements", f"{self.numel:,}"),
            ("ranks", f"{self.world_size:,}"),
            ("collective", _COLLECTIVES.get(self.collective, self.collective)),
            ("message", exact_size(self.message_bytes)),
        ]
        if self.syncs is not None and self.total_steps is not None:
            share = f"{self.syncs:,} of {self.total_steps:,} steps"
            rows.append(("synchronisations", f"{share} ({self.syncs / self.total_steps:.1%})"))
        if self.warmup_steps is not None and self.warmup_bytes_sent is not None:
            sent = f"{exact_size(self.warmup_bytes_sent)} sent per step"
            rows.append(("warm-up", f"{sent}, mean of the first {self.warmup_steps:,} steps"))
        rows += [
            ("sent per step", exact_size(self.bytes_sent)),
            ("received per step", exact_size(self.bytes_received)),
            ("plain DDP sends", exact_size(self.dense_bytes_sent)),
            ("traffic", traffic),
            ("break-even", even),
            ("state per rank", exact_size(self.memory_bytes)),
        ]
        if self.nodes is not None:
            rows += self.nodes.rows(self.world_size // self.nodes.ranks)
        # One column wider than "synchronisations", the longest name.
        lines = [wrapped(f"  {name:<17} ", value) for name, value in rows]
        return "\n".join([wrapped("", f"{self.spec}, per rank"), *lines])


# For the table. Joined names, of groups that differ, are printed unchanged.
_COLLECTIVES = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "sharded": "sharded (all-to-all, then all-gather)",
}
