"""Rounds: the steps and rounds of one rank, its fragments out of phase, and their checkpoints."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import Any

from torch import Tensor

from torchcomp.checkpoints import checkpoint
from torchcomp.engine.averager import Averager
from torchcomp.engine.bucket import Caps, Group, merge, partition
from torchcomp.exchange import Exchange
from torchcomp.local_sgd.method import LocalMethod, Parameters
from torchcomp.specs.errors import CheckpointError

_log = logging.getLogger(__package__)


@dataclass
class Fragment:
    """Parameters that are averaged together, and their current or last round."""

    groups: tuple[Group, ...]  # each is averaged as one bucket
    phase: tuple[int, int]  # (p, P): the run's first round takes p/P of a full one
    start: int = 0  # steps of the run before the round
    end: int = 0  # the step, counted from 1, after which it synchronises
    synced: int = 0  # the step after which it synchronised last
    lrs: list[float] = field(default_factory=list)  # by parameter group, at the first step
    # Sum of each step's largest learning rate, over the steps since `synced`. A tensor if the
    # learning rate is on an accelerator.
    lr_sum: float | Tensor = 0.0

    def __str__(self) -> str:
        return f"{self.start} to {self.end}"

    @property
    def names(self) -> list[str]:
        return list(chain.from_iterable(self.groups))

    def begin_round(self, step: int, lrs: list[float], method: LocalMethod) -> None:
        """Fix the length of the round that begins after `step` steps; if this raises, nothing."""
        horizon = method.horizon
        # Beyond the announced end, the run can stop after any step.
        end = step + 1
        if step < horizon.total_steps:
            # The paper has one learning rate. The largest gives the shortest round.
            end = method.schedule.round_end(step, max(lrs, default=0.0), horizon)
        if step == 0:
            # Rounded up, so that the round has at least one step.
            numerator, denominator = self.phase
            end = -(-end * numerator // denominator)
        self.start, self.end, self.lrs = step, end, lrs

    def warn_if_long(self, total: int) -> None:
        """Log a warning if the round is more than half of a run of `total` steps."""
        # A warm-up learning rate of 1e-6 in the paper's rule makes one round of the whole run.
        if self.start < total < 2 * (self.end - self.start):
            _log.warning(
                "the ranks do not average from step %d to %d, more than half of the run (%d "
                "steps), because the learning rate is %g. If this is a warm-up learning rate, set "
                "warmup_steps. Otherwise compare the schedule's coefficient with the peak",
                *(self.start, self.end, total, max(self.lrs, default=0.0)),
            )


@dataclass
class Clock:
    """The optimizer steps and rounds of one rank, also when the script has dropped its model."""

    total_steps: int
    fragments: list[Fragment]
    step: int = 0  # optimizer steps, including those that a GradScaler skipped

    @property
    def next_sync(self) -> int | None:
        """The earliest end of the rounds in progress, or None if there are none."""
        return min((each.end for each in self.fragments if self.step > each.synced), default=None)

    def warn_inside_round(self) -> None:
        """Log a warning if a round is in progress, because then every rank has its own model."""
        if self.next_sync is not None:
            _log.warning(
                "local steps ended at step %d of %d, inside the round from %s: the ranks' "
                "parameters differ, so evaluating or saving on one rank uses only its own model",
                *(self.step, self.total_steps, " and ".join(map(str, self.fragments))),
            )


def fragments_of(method: LocalMethod, parameters: Parameters, caps: Caps) -> list[Fragment]:
    """Cut the parameters, in order, into fragments of about equal bytes with rounds out of phase.

    The first round of fragment p of P (from 0) takes (p + 1)/P of a full one: as in Streaming
    DiLoCo (Douillard et al., 2025, arXiv 2501.18512), but averages are applied without a delay.
    """
    pieces, names = int(method.fragments), list(parameters)
    sizes = [parameters[name].nbytes for name in names]
    # A parameter belongs to the piece that contains its middle byte.
    middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
    # max(..., 1), because all parameters can be empty.
    fair = [int(pieces * middle / max(sum(sizes), 1)) for middle in middles]
    found = []
    for index, (start, stop) in enumerate(pairwise(_bounds(fair, pieces))):
        groups = partition([(name, parameters[name]) for name in names[start:stop]], caps)
        if method.aggregator.whole_model:
            groups = merge(groups, parameters)
        found.append(Fragment(groups, (index + 1, pieces)))
    return found


def _bounds(fair: Sequence[int], pieces: int) -> list[int]:
    """The ``pieces + 1`` bounds of the pieces: parameter i in ``fair[i]``, but no piece empty."""
    bounds = [0]
    for index in range(1, pieces):
        before = sum(piece < index for piece in fair)
        # At least one parameter in the piece that ends here, and one left for each piece after it.
        bounds.append(min(max(before, bounds[-1] + 1), len(fair) - pieces + index))
    return [*bounds, len(fair)]


# --- Checkpoints ----------------------------------------------------------------------------------

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
    """Restore clock and averager, and return the checksum of the parameters of the state."""
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
