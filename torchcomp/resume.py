"""Save and restore an averager, and compare those of all ranks before the first step."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from torchcomp import checkpoint
from torchcomp.aggregators import Aggregator
from torchcomp.exchange import Exchange
from torchcomp.method_in_use import FLUSH, MethodInUse
from torchcomp.saved_slots import load_slots, save_slots
from torchcomp.state import State
from torchcomp.stats import Meter
from torchcomp.units import Units


class Resumable(Protocol):
    """What is saved of an :class:`torchcomp.Averager`."""

    state: State
    step: int
    seed: int
    parameters: dict[str, Tensor]
    exchange: Exchange
    running: MethodInUse
    units: Units
    meter: Meter

    @property
    def aggregator(self) -> Aggregator: ...

    @property
    def flushing(self) -> bool: ...

    def replace(self, step: int, traffic: Mapping[str, int]) -> None: ...

    def continue_with(self, method: Aggregator, flushing: bool) -> None: ...


def compare_ranks(averager: Resumable, lrs: Mapping[str, float]) -> None:
    """Raise RankMismatchError if the ranks differ in what must be the same.

    Args:
        averager: that of this rank.
        lrs: learning rates of the step that begins.
    """
    values = {"spec": averager.aggregator, "step": averager.step, "seed": averager.seed}
    values |= {"groups": averager.running.groups, "buckets": averager.running.buckets}
    # The scale that the state has, before it follows that of this step.
    values |= {"flushing": averager.flushing, "lr": lrs, "scale": averager.units.scale}
    values |= {"checksum": averager.exchange.checksum}
    # Each rank's threshold search starts from the previous thresholds. If they differed, the ranks
    # would run different collectives.
    state, exchange = averager.state, averager.exchange
    found = [(name, t.tolist()) for name, t in state.items("thresholds")]
    names = {slot.name for slot in averager.running.slots(exchange) if slot.equal}
    equal = {f"{slot} {name}": part for slot in names for name, part in state.items(slot)}
    digest = checkpoint.digest_of(dict(sorted(equal.items())))
    on_level = {"thresholds": sorted(found), "checksum of equal slots": digest}
    exchange.verify("the first step", values, checkpoint.ONE_STEP, on_level)


def state_of(averager: Resumable) -> dict[str, Any]:
    """Return the state of this rank."""
    running, parameters = averager.running, averager.parameters
    return {
        **checkpoint.header(str(averager.aggregator), averager.exchange),
        "step": averager.step,
        "seed": averager.seed,
        "scale": averager.units.scale,
        "lrs": dict(averager.units.lrs),
        "flushing": averager.flushing,
        "groups": [list(group) for group in averager.running.groups],
        "buckets": [list(group) for group in averager.running.buckets],
        "parameters": checkpoint.layout_of(parameters),
        "traffic": averager.meter.state_dict(),
        "slots": save_slots(running.slots(averager.exchange), averager.state, parameters),
    }


def prepare(
    averager: Resumable, saved: Any, aggregator: Aggregator, advice: Mapping[str, str]
) -> Callable[[], None]:
    """Check what :func:`state_of` has returned; see :meth:`torchcomp.Averager.prepare`.

    Args:
        averager: that of this rank, which does not change.
        saved: what was saved.
        aggregator: the method that the user chose.
        advice: what to do if "spec" or "world_size" differs, for the error message.

    Returns:
        A function that restores it.
    """
    checkpoint.check_header(saved, str(aggregator), averager.exchange, advice)
    checkpoint.check_engine(saved, averager.parameters)
    running = averager.running
    groups, buckets = (checkpoint.groups_of(saved[name]) for name in ("groups", "buckets"))
    # During a flush, the checkpoint has the slots of FLUSH and the spec of the next method.
    method = FLUSH if saved["flushing"] else aggregator
    declared = running.slots(averager.exchange, method, buckets)
    slots = load_slots(declared, saved, averager.parameters, str(aggregator))

    def restore() -> None:
        running.groups, running.buckets = groups, buckets
        averager.seed, units = saved["seed"], averager.units
        units.scale, units.lrs = float(saved["scale"]), dict(saved["lrs"])
        averager.replace(saved["step"], saved["traffic"])
        for name, (kind, sharded, parts) in slots.items():
            averager.state.load(name, kind, sharded, parts)
        averager.continue_with(aggregator, saved["flushing"])

    return restore
