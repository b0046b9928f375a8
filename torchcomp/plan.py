"""Plan: the answer of explain, and the table that it prints as."""

from dataclasses import dataclass

from torchcomp.time_model import WallClock


@dataclass(frozen=True)
class Plan:
    """Cost of a method, per rank and step. ``str(plan)`` is the table.

    Attributes:
        spec: the method or schedule, in canonical form.
        numel: gradient elements of the model.
        world_size: number of ranks.
        collective: "allreduce", "allgather" or "sharded" (to the owners of shards and back); joined
            by "and" if groups of parameters differ.
        message_bytes: size of one rank's encoded gradient.
        bytes_sent: payload bytes that a rank sends per step; for a schedule, on average.
        bytes_received: payload bytes that a rank receives per step; for a schedule, on average.
        dense_bytes_sent: payload bytes that a rank sends per step under plain DDP.
        memory_bytes: bytes of state that a rank keeps beside the model.
        break_even_world_size: number of ranks from which on the method sends at least as much as
            plain DDP; None on one rank, and unless all groups are all-gathered, whose traffic
            alone grows with the ranks.
        syncs: synchronisations of the whole run, for a schedule; else None.
        total_steps: optimizer steps of the whole run, for a schedule; else None.
        wall_clock: of the whole run, for a schedule with a time model; else None.
        parallel_wall_clock: what plain DDP would take instead; else None.
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
    syncs: int | None = None
    total_steps: int | None = None
    wall_clock: WallClock | None = None
    parallel_wall_clock: WallClock | None = None

    def __str__(self) -> str:
        saving, even = "nothing is sent", "none: it does not grow with the number of ranks"
        if self.bytes_sent:
            saving = f"{_three_digits(self.dense_bytes_sent / self.bytes_sent)}x"
        if self.break_even_world_size is not None:
            even = f"{self.break_even_world_size:,} ranks (from there, plain DDP sends no more)"
        rows = [
            ("elements", f"{self.numel:,}"),
            ("ranks", f"{self.world_size:,}"),
            ("collective", _COLLECTIVES.get(self.collective, self.collective)),
            ("message", _bytes(self.message_bytes)),
        ]
        if self.syncs is not None and self.total_steps is not None:
            share = f"{self.syncs:,} of {self.total_steps:,} steps"
            rows.append(("synchronisations", f"{share} ({self.syncs / self.total_steps:.1%})"))
        rows += [
            ("sent per step", _bytes(self.bytes_sent)),
            ("received per step", _bytes(self.bytes_received)),
            ("plain DDP sends", _bytes(self.dense_bytes_sent)),
            ("less traffic", saving),
            ("break-even", even),
            ("state per rank", _bytes(self.memory_bytes)),
        ]
        clocks = {"wall clock": self.wall_clock, "plain DDP takes": self.parallel_wall_clock}
        rows += [(name, str(clock)) for name, clock in clocks.items() if clock is not None]
        lines = [f"  {name:<17} {value}" for name, value in rows]
        return "\n".join([f"{self.spec}, per rank", *lines])


_COLLECTIVES = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "sharded": "sharded (all-to-all, then all-gather)",
}


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{_three_digits(count / size)} {unit} ({count:,} bytes)"
    return f"{count:,} bytes"


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
