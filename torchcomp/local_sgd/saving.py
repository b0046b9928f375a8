"""Checkpoints of local steps: the rounds, and what must be the same in the run that loads them."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from torchcomp import checkpoint
from torchcomp.averager import Averager
from torchcomp.errors import CheckpointError
from torchcomp.exchange import Exchange
from torchcomp.local_sgd.options import LocalMethod
from torchcomp.local_sgd.rounds import Clock

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
    return {
        **averager.state_dict(),
        "local_sgd": {
            **_fixed(method),
            "step": clock.step,
            "syncs": averager.step,
            "saved_by": [averager.exchange.rank, averager.exchange.world_size],
            "weights": checkpoint.digest_of(averager.parameters),
            "fragments": [
                {
                    "names": each.names,
                    **{key: getattr(each, key) for key in _ROUND},
                    "lr_sum": float(each.lr_sum),
                }
                for each in clock.fragments
            ],
        },
    }


def restore(state: Any, method: LocalMethod, clock: Clock, averager: Averager) -> int:
    """Restore clock and averager from what :func:`state_of` returned; on error, nothing changes.

    Returns:
        The checksum of the parameters that belong to the state.

    Raises:
        CheckpointError: if the state is damaged, or belongs to another model, method or rank.
    """
    section: Any = state.get("local_sgd") if isinstance(state, Mapping) else None
    _SECTION(section, "local_sgd")
    # Check everything before applying anything, so that an error changes nothing.
    _check(section, {**_fixed(method), "fragments": len(clock.fragments)}, averager.exchange)
    apply = averager.prepare(state, _OTHER_RANKS)
    # Parameters have no loss scale, and every synchronisation is a step of the averager.
    if (section["syncs"], 1.0) != (state["step"], state["scale"]):
        raise CheckpointError(
            f"a damaged checkpoint: with {section['syncs']} synchronisations, 'step' must be "
            f"that number and 'scale' 1, not {state['step']} and {state['scale']}"
        )
    # Take the groups from the checkpoint. bucket_cap_mb can differ in this run, and a compressor
    # that selects per group would then select other entries.
    groups = [tuple(group) for group in state["groups"]]
    fragments = []
    for fragment, saved in zip(clock.fragments, section["fragments"], strict=True):
        own = tuple(group for group in groups if group[0] in saved["names"])
        fragments.append(replace(fragment, groups=own, **{key: saved[key] for key in _ROUND}))
    names = [sorted(fragment.names) for fragment in fragments]
    once = sorted(chain.from_iterable(names)) == sorted(averager.parameters)
    if not once or names != [sorted(saved["names"]) for saved in section["fragments"]]:
        raise CheckpointError(
            "a damaged checkpoint: local_sgd.fragments must contain every parameter once, and "
            "only whole groups"
        )
    apply()
    clock.fragments, clock.step = fragments, section["step"]
    return int(section["weights"])


def _fixed(method: LocalMethod) -> dict[str, Any]:
    """Return the settings that must be the same in a checkpoint and in the run that loads it."""
    return {
        "schedule": method.spec,
        "total_steps": method.horizon.total_steps,
        "warmup_steps": method.horizon.warmup_steps,
        "compress": str(method.aggregator),
        "outer": str(method.outer),
        "moments": method.moments,
    }


def _check(section: dict[str, Any], here: dict[str, Any], between: Exchange) -> None:
    """Require consistent rounds, this run's settings and, inside a round, this rank."""
    rounds = section["fragments"]
    there = {**section, "fragments": len(rounds)}
    for name, value in here.items():
        if there[name] != value:
            raise CheckpointError(
                f"the checkpoint was saved with {name}={there[name]}, but this run has "
                f"{name}={value}"
            )
    step, total = section["step"], section["total_steps"]
    last = max(total, step)  # a run that took more steps than it announced ends at any step
    for each in rounds:
        in_order = each["start"] <= step <= each["end"] <= last and each["synced"] <= step
        if not in_order or each["lr_sum"] < 0 or section["syncs"] > step:
            raise CheckpointError(
                f"a damaged checkpoint: its values contradict each other: step {step} of "
                f"{total}, {section['syncs']} synchronisations, the last one at step "
                f"{each['synced']}, and the round from {each['start']} to {each['end']}"
            )
    saver, mine = section["saved_by"], [between.rank, between.world_size]
    # Inside a round, the local steps of the other ranks are in their own checkpoints only.
    if any(step > each["synced"] for each in rounds) and saver != mine:
        raise CheckpointError(
            "the checkpoint was saved by rank {} of {} inside a round, and contains only that "
            "rank's local steps: load it on that rank. Only states saved between rounds "
            "(sync.next_sync is None) fit another number of ranks".format(*saver)
        )
