"""Checkpoints of local steps."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from torchcomp.checkpoints import checkpoint
from torchcomp.engine.averager import Averager
from torchcomp.exchange import Exchange
from torchcomp.local_sgd.method import LocalMethod
from torchcomp.local_sgd.rounds import Clock
from torchcomp.specs.errors import CheckpointError

_OTHER_RANKS = {
    "world_size": "use torchcomp.redistribute(states, world_size) on states that were saved "
    "between rounds",
}
_ROUND = {
    **dict.fromkeys(("start", "end", "synced"), checkpoint.count),
    "lrs": checkpoint.list_of(checkpoint.number),
    "lr_sum": checkpoint.number,
}
_SECTION = checkpoint.record(
    **dict.fromkeys(("schedule", "compress", "outer", "moments"), checkpoint.text),
    **dict.fromkeys(("total_steps", "warmup_steps", "step", "syncs", "weights"), checkpoint.count),
    saved_by=checkpoint.list_of(checkpoint.count, length=2),
    fragments=checkpoint.list_of(
        checkpoint.record(names=checkpoint.list_of(checkpoint.text), **_ROUND)
    ),
)


def state_of(method: LocalMethod, clock: Clock, averager: Averager) -> dict[str, Any]:
    """Return the state of this rank: that of the averager, and the section of local steps."""
    rounds = []
    for each in clock.fragments:
        saved = {key: getattr(each, key) for key in _ROUND}
        rounds.append({"names": each.names, **saved, "lr_sum": float(each.lr_sum)})
    section = {
        **_fixed(method),
        "step": clock.step,
        "syncs": averager.step,
        "saved_by": [averager.exchange.rank, averager.exchange.world_size],
        "weights": checkpoint.digest_of(averager.parameters),
        "fragments": rounds,
    }
    return {**averager.state_dict(), "local_sgd": section}


def restore(state: Any, method: LocalMethod, clock: Clock, averager: Averager) -> int:
    """Restore clock and averager, and return the checksum of the parameters of the state.

    Raises CheckpointError, and changes nothing, if the state is damaged or of another run.
    """
    section: Any = state.get("local_sgd") if isinstance(state, Mapping) else None
    _SECTION(section, "local_sgd")
    rounds, own = section["fragments"], clock.fragments
    # Check everything before applying anything, so that an error changes nothing.
    for name, value in {**_fixed(method), "fragments": len(own)}.items():
        there = len(rounds) if name == "fragments" else section[name]
        if there != value:
            raise CheckpointError(
                f"the checkpoint was saved with {name}={there}, but this run has {name}={value}"
            )
    _check_rounds(section, averager.exchange)
    apply = averager.prepare(state, _OTHER_RANKS)
    # Take the groups from the checkpoint. bucket_cap_mb can differ in this run, and a compressor
    # that selects per group would then select other entries.
    fragments = []
    for fragment, saved in zip(own, rounds, strict=True):
        groups = tuple(tuple(group) for group in state["groups"] if group[0] in saved["names"])
        fragments.append(replace(fragment, groups=groups, **{key: saved[key] for key in _ROUND}))
    names = [sorted(fragment.names) for fragment in fragments]
    once = sorted(chain.from_iterable(names)) == sorted(averager.parameters)
    # Parameters have no loss scale, and every synchronisation is a step of the averager.
    counted = (section["syncs"], 1.0) == (state["step"], state["scale"])
    if not counted or not once or names != [sorted(saved["names"]) for saved in rounds]:
        raise CheckpointError(
            "a damaged checkpoint: local_sgd.fragments must contain every parameter once, and only "
            "whole groups; 'step' must be local_sgd.syncs, and 'scale' 1"
        )
    apply()
    clock.fragments, clock.step = fragments, section["step"]
    return int(section["weights"])


def _fixed(method: LocalMethod) -> dict[str, Any]:
    return {
        "schedule": method.spec,
        "total_steps": method.horizon.total_steps,
        "warmup_steps": method.horizon.warmup_steps,
        "compress": str(method.aggregator),
        "outer": str(method.outer),
        "moments": method.moments,
    }


def _check_rounds(section: dict[str, Any], between: Exchange) -> None:
    """Require consistent rounds and, inside a round, this rank."""
    step, rounds = section["step"], section["fragments"]
    last = max(section["total_steps"], step)  # a run can take more steps than it announced
    for each in rounds:
        in_order = each["start"] <= step <= each["end"] <= last and each["synced"] <= step
        if not in_order or each["lr_sum"] < 0 or section["syncs"] > step:
            raise CheckpointError(
                f"a damaged checkpoint: step {step} of {section['total_steps']} contradicts its "
                f"{section['syncs']} synchronisations or its round {each}"
            )
    saver, mine = section["saved_by"], [between.rank, between.world_size]
    # Inside a round, the local steps of the other ranks are in their own checkpoints only.
    if any(step > each["synced"] for each in rounds) and saver != mine:
        raise CheckpointError(
            "the checkpoint was saved by rank {} of {} inside a round, and contains only that "
            "rank's local steps: load it on that rank. Only states saved between rounds "
            "(sync.next_sync is None) fit another number of ranks".format(*saver)
        )
