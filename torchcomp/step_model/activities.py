"""Activities: what the exchange of a step consists of, as numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchcomp.bucket import Group
from torchcomp.checks import check_positive


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

        def scale(activity: Activity) -> Activity:
            return Work(activity.seconds / speedup) if isinstance(activity, Work) else activity

        buckets = tuple(
            Submitted(
                bucket.names,
                tuple(tuple(tuple(map(scale, lane)) for lane in job) for job in bucket.jobs),
                bucket.work / speedup,
            )
            for bucket in self.buckets
        )
        return Recording(self.method, buckets)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings and lists, for JSON."""
        buckets = [
            {
                "names": list(bucket.names),
                "work": bucket.work,
                "jobs": [[[_plain(each) for each in lane] for lane in job] for job in bucket.jobs],
            }
            for bucket in self.buckets
        ]
        return {"method": self.method, "buckets": buckets}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Recording":
        """Return what :meth:`to_dict` was called on."""
        buckets = tuple(
            Submitted(
                tuple(bucket["names"]),
                tuple(
                    tuple(tuple(_activity(each) for each in lane) for lane in job)
                    for job in bucket["jobs"]
                ),
                bucket["work"],
            )
            for bucket in values["buckets"]
        )
        return cls(values["method"], buckets)


def _plain(activity: Activity) -> list[Any]:
    if isinstance(activity, Work):
        return [activity.seconds]
    return [activity.kind, activity.nbytes, activity.inside]


def _activity(plain: Sequence[Any]) -> Activity:
    return Work(*plain) if len(plain) == 1 else Call(*plain)
