"""Predict the step times of a link, from what its ranks measured without an exchange."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.net.prediction import has_our_hook, period_of
from benchmarks.net.rows import milliseconds, step_columns, step_times
from torchcomp.advisor import (
    CollectiveTimes,
    Compute,
    Link,
    Recording,
    simulate,
    simulate_alone,
)
from torchcomp.advisor.collectives import Point, Times
from torchcomp.advisor.simulation import Activity, Call, Submitted, Work

_COPIED = ("date", "revision", "torch", "device", "cpus", "batch")
_SETUP = ("hosts", "ranks", "mbit", "delay_us")
# Between two ranks of a host, over TCP.
_LOOPBACK_GBIT = 8.0
_LABELS = ("model", "parameters", "method", "levels")
_MEANS = ("compute", "predicted", "hook", "formula")


class Known:
    """What is known of a link and its models when a method's step is predicted."""

    def __init__(self) -> None:
        self._link: Sequence[Mapping[str, Any]] = ()
        self._compute: Sequence[Mapping[str, Any]] = ()
        self._recorded: Sequence[Mapping[str, Any]] = ()
        # Seconds of a step that its parts do not explain, from the probes: with a hook of PyTorch,
        # and with one of ours.
        self._hooks = {False: 0.0, True: 0.0}
        # The seconds of a method that has another round, by what they are of.
        self._rounds: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)

    def add(self, result: Mapping[str, Any]) -> dict[str, Any] | None:
        """Take a result of a job; return the row of a method, once it was measured."""
        ranks = result["ranks"]
        if result["what"] == "link":
            self._link = ranks
        elif result["what"] == "compute":
            self._compute = ranks
        elif result["what"] == "recording":
            self._recorded = ranks
        elif result["what"] == "probe":
            predicted, _ = self._predicted(result)
            cost = max(0.0, statistics.median(step_times(ranks)) - predicted)
            self._hooks[has_our_hook(result["method"])] = cost
        else:
            key = result["model"], result["method"]
            self._rounds[key].append(self._round(result))
            if not result.get("rounds_left"):
                return self._row(result, self._rounds.pop(key))
        return None

    def _round(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """The steps of a method in one round, and what was predicted."""
        predicted, computed = self._predicted(result)
        method = result["method"]
        # Local steps have no hook.
        hook = self._hooks[has_our_hook(method)] if period_of(method) == 1 else 0.0
        alone = statistics.mean(rank["compute"]["total"] for rank in self._compute)
        cores = self._cores(result["cpus"] / len(result["ranks"]))
        return {
            "times": step_times(result["ranks"]),
            "compute": alone / min(1, cores),
            "predicted": predicted + hook,
            "hook": hook,
            "formula": computed,
            "others": other_cores(result["ranks"]),
        }

    @staticmethod
    def _row(result: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        times = [seconds for each in rounds for seconds in each["times"]]
        mean = {
            name: statistics.mean(each[name] for each in rounds) for name in (*_MEANS, "others")
        }
        return {
            **{name: result[name] for name in (*_COPIED, *_LABELS)},
            **{name: result["setup"][name] for name in _SETUP},
            "steps": len(times) * result["ranks"][0]["length"],
            **step_columns(times),
            **{f"{name}_ms": milliseconds(mean[name]) for name in _MEANS},
            "other_cores": round(mean["others"], 2),
        }

    def _predicted(self, result: Mapping[str, Any]) -> tuple[float, float]:
        """The step time without the cost of the hook: with measured collectives, and computed."""
        world = len(result["ranks"])
        cores = self._cores(result["cpus"] / world)
        predicted, computed = (
            statistics.mean(self._seconds(rank, result, cores, known) for rank in range(world))
            for known in (None, _formulas(result["setup"]))
        )
        return predicted, computed

    def _cores(self, share: float) -> float:
        """The cores of a rank: no more than it got while all ranks computed."""
        # A rank that has more than one does not need all of them.
        if share > 1:
            return share
        return min(share, statistics.mean(r["worked"] / r["wall"] for r in self._compute))

    def _seconds(
        self, rank: int, result: Mapping[str, Any], cores: float, link: Times | None
    ) -> float:
        """The step time that this rank predicts, with the measured collectives or with others."""
        if link is None:
            link = _times(self._link[rank])
        compute = _computation(self._compute[rank]["compute"])
        recorded = _recording(self._recorded[rank])
        period = period_of(result["method"])
        if period > 1:
            average = simulate_alone(recorded, link, cores=cores)
            return compute.total / min(1, cores) + average / period
        return simulate(recorded, compute, link, cores=cores).seconds


def _times(values: Mapping[str, Any]) -> CollectiveTimes:
    """Return what JSON has made of measured collectives."""
    points = {kind: tuple(Point(*row) for row in rows) for kind, rows in values["points"].items()}
    return CollectiveTimes(values["world_size"], points)


def _computation(values: Mapping[str, Any]) -> Compute:
    """Return what JSON has made of a step without an exchange."""
    buckets = tuple(map(tuple, values["buckets"]))
    return Compute(buckets, tuple(values["ready"]), values["backward"], values["total"])


def _recording(values: Mapping[str, Any]) -> Recording:
    """Return what JSON has made of the exchange of a step."""

    def lane(plain: Sequence[Mapping[str, Any]]) -> tuple[Activity, ...]:
        return tuple(Call(**each) if "kind" in each else Work(**each) for each in plain)

    submitted = [
        Submitted(tuple(each["names"]), lane(each["activities"]), each["work"])
        for each in values["buckets"]
    ]
    return Recording(values["method"], tuple(submitted))


def _formulas(setup: Mapping[str, Any]) -> Times:
    """The collectives of a link, from its bandwidth and latency."""
    world = setup["hosts"] * setup["ranks"]
    link = Link(
        setup["mbit"] / 1e3,
        latency_us=setup["delay_us"],
        ranks_per_node=setup["ranks"],
        inside_gbit=_LOOPBACK_GBIT,
        backend="gloo",
    )
    return link.among(world)


def other_cores(ranks: Sequence[Mapping[str, Any]]) -> float:
    """The cores that other processes than the ranks kept busy: the switch, and other programs."""
    busy, wall = ranks[0]["busy"], ranks[0]["wall"]
    return round((busy - sum(rank["worked"] for rank in ranks)) / wall, 2)
