"""Activities: what the exchange of a step consists of, as numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torchcomp.engine.bucket import Group
from torchcomp.specs.checks import check_positive


@dataclass(frozen=True)
class Work:
    """Work of one thread, or of the device: it takes `seconds` if nothing else runs."""

    seconds: float


@dataclass(frozen=True)
class Call:
    """A collective.

    Attributes:
        kind: one of :data:`.KINDS`.
        nbytes: size of its message, as in :mod:`.collectives`.
        inside: whether it is among the ranks of a node.
    """

    kind: str
    nbytes: int
    inside: bool = False


Activity = Work | Call
Job = tuple[tuple[Activity, ...], ...]
"""What happens to a group of gradients, lane after lane. Each lane does its jobs in order."""


@dataclass(frozen=True)
class Submitted:
    """What DDP's hook does with one of its buckets.

    Attributes:
        names: parameters of the bucket.
        jobs: what it submits.
        work: seconds that the hook itself takes, in the thread of the backward pass.
    """

    names: Group
    jobs: tuple[Job, ...]
    work: float = 0.0

    def scaled(self, speedup: float) -> "Submitted":
        """Return the same with all work divided by `speedup`."""

        def lane(activities: Sequence[Activity]) -> tuple[Activity, ...]:
            return tuple(
                Work(each.seconds / speedup) if isinstance(each, Work) else each
                for each in activities
            )

        jobs = tuple(tuple(map(lane, job)) for job in self.jobs)
        return Submitted(self.names, jobs, self.work / speedup)


@dataclass(frozen=True)
class Recording:
    """The exchange of one step.

    Attributes:
        method: its name.
        buckets: by DDP's buckets, in the order in which they become ready.
    """

    method: str
    buckets: tuple[Submitted, ...]

    def calls(self, *, inside: bool = False) -> list[Call]:
        """Return the collectives of a step among all ranks, or those inside a node."""
        activities = [a for b in self.buckets for job in b.jobs for lane in job for a in lane]
        return [a for a in activities if isinstance(a, Call) and a.inside == inside]

    def scaled(self, speedup: float) -> "Recording":
        """Return the exchange of ranks that work `speedup` times as fast as this one."""
        check_positive("speedup", speedup)
        return Recording(self.method, tuple(bucket.scaled(speedup) for bucket in self.buckets))

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings and sequences, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Recording":
        """Return what :meth:`to_dict` was called on."""

        def lane(plain: Sequence[Mapping[str, Any]]) -> tuple[Activity, ...]:
            return tuple(Call(**each) if "kind" in each else Work(**each) for each in plain)

        buckets = tuple(
            Submitted(
                tuple(each["names"]),
                tuple(tuple(map(lane, job)) for job in each["jobs"]),
                each["work"],
            )
            for each in values["buckets"]
        )
        return cls(values["method"], buckets)
