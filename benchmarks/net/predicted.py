"""Predict the step times of a link, from what its ranks measured without an exchange."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.net.prediction import has_our_hook, period_of
from torchcomp.advisor import (
    CollectiveTimes,
    Compute,
    Link,
    Recording,
    Times,
    simulate,
    simulate_alone,
)

_COPIED = ("date", "revision", "torch", "device", "cpus", "batch")
_SETUP = ("hosts", "ranks", "mbit", "delay_us")
# Between two ranks of a host, over TCP.
_LOOPBACK_GBIT = 8.0
_LABELS = ("model", "parameters", "method", "levels")


Levels = Mapping[str, Times]
"""The collectives "flat", among all ranks, and with two levels "between" and "inside"."""


@dataclass(frozen=True)
class _Compared:
    """The steps of a method in one round, and what was predicted, in seconds.

    Attributes:
        key: of the method and the model.
        times: seconds per step, each averaged over a few steps.
        predicted: from what was measured, without the cost of the hook.
        hook: the cost of the hook.
        computed: from the numbers of the link.
        alone: of a step without any exchange.
        others: cores that other processes kept busy.
    """

    key: tuple[str, str]
    times: list[float]
    predicted: float
    hook: float
    computed: float
    alone: float
    others: float


class Known:
    """What is known of a link and its models when a method's step is predicted."""

    def __init__(self) -> None:
        self._link: Sequence[Mapping[str, Any]] = ()
        self._compute: Sequence[Mapping[str, Any]] = ()
        self._recorded: Sequence[Mapping[str, Any]] = ()
        # Seconds of a step that its parts do not explain, from the probes: with a hook of PyTorch,
        # and with one of ours.
        self._hooks = {False: 0.0, True: 0.0}
        self._measured: list[_Compared] = []  # methods that have another round

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
            self._measured.append(self._compared(result))
            if not result.get("rounds_left"):
                return self._row(result)
        return None

    def _compared(self, result: Mapping[str, Any]) -> "_Compared":
        """Predict a method's step in one round."""
        predicted, computed = self._predicted(result)
        method = result["method"]
        alone = statistics.mean(rank["compute"]["total"] for rank in self._compute)
        cores = self._cores(result["cpus"] / len(result["ranks"]))
        return _Compared(
            _key(result),
            step_times(result["ranks"]),
            predicted,
            # Local steps have no hook.
            self._hooks[has_our_hook(method)] if period_of(method) == 1 else 0.0,
            computed,
            alone / min(1, cores),
            other_cores(result["ranks"]),
        )

    def _row(self, result: Mapping[str, Any]) -> dict[str, Any]:
        rounds = [each for each in self._measured if each.key == _key(result)]
        self._measured = [each for each in self._measured if each.key != _key(result)]
        times = [seconds for each in rounds for seconds in each.times]
        low, middle, high = (
            statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
        )

        def mean(name: str) -> float:
            return statistics.mean(getattr(each, name) for each in rounds)

        return {
            **{name: result[name] for name in (*_COPIED, *_LABELS)},
            **{name: result["setup"][name] for name in _SETUP},
            "steps": len(times) * result["ranks"][0]["length"],
            "step_ms": _ms(middle),
            "step_ms_low": _ms(low),
            "step_ms_high": _ms(high),
            "compute_ms": _ms(mean("alone")),
            "predicted_ms": _ms(mean("predicted") + mean("hook")),
            "hook_ms": _ms(mean("hook")),
            "formula_ms": _ms(mean("computed")),
            "other_cores": round(mean("others"), 2),
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
        self, rank: int, result: Mapping[str, Any], cores: float, link: Levels | None
    ) -> float:
        """The step time that this rank predicts, with the measured collectives or with others."""
        if link is None:
            measured = self._link[rank].items()
            link = {name: CollectiveTimes.from_dict(times) for name, times in measured}
        compute = Compute.from_dict(self._compute[rank]["compute"])
        recorded = Recording.from_dict(self._recorded[rank])
        period = period_of(result["method"])
        if period > 1:
            average = simulate_alone(recorded, link["flat"], cores=cores)
            return compute.total / min(1, cores) + average / period
        if result["levels"] == 1:
            return simulate(recorded, compute, link["flat"], cores=cores).seconds
        between, inside = link["between"], link["inside"]
        return simulate(recorded, compute, between, inside, cores=cores).seconds


def _key(result: Mapping[str, Any]) -> tuple[str, str]:
    return result["model"], result["method"]


def step_times(ranks: Sequence[Mapping[str, Any]]) -> list[float]:
    """The seconds of a step in each round, the mean over the ranks."""
    by_rank = [rank["times"] for rank in ranks]
    return [statistics.mean(step) for step in zip(*by_rank, strict=True)]


def _formulas(setup: Mapping[str, Any]) -> Levels:
    """The collectives of a link, from its bandwidth and latency."""
    world = setup["hosts"] * setup["ranks"]
    link = Link(
        setup["mbit"] / 1e3,
        latency_us=setup["delay_us"],
        ranks_per_node=setup["ranks"],
        inside_gbit=_LOOPBACK_GBIT,
        backend="gloo",
    )
    return {"flat": link.flat(world), "between": link.between(world), "inside": link.inside(world)}


def other_cores(ranks: Sequence[Mapping[str, Any]]) -> float:
    """The cores that other processes than the ranks kept busy: the switch, and other programs."""
    busy, wall = ranks[0]["busy"], ranks[0]["wall"]
    return round((busy - sum(rank["worked"] for rank in ranks)) / wall, 2)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
