"""Rounds: the optimizer steps and rounds of one rank, and their checkpoints."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor

from torchcomp.checkpoints import checkpoint
from torchcomp.engine.averager import Averager
from torchcomp.local_sgd.method import LocalMethod
from torchcomp.specs.errors import CheckpointError

_log = logging.getLogger(__package__)


@dataclass
class Clock:
    """The steps and rounds of one rank."""

    total_steps: int
    step: int = 0  # optimizer steps, including those that a GradScaler skipped
    # The current round, or between rounds the last one.
    start: int = 0  # steps of the run before the round
    end: int = 0  # the step, counted from 1, after which the ranks synchronise
    synced: int = 0  # the step after which they synchronised last
    lrs: list[float] = field(default_factory=list)  # by parameter group, at the first step
    lr_sum: float | Tensor = 0.0  # of each step's largest learning rate, since `synced`

    def __str__(self) -> str:
        return f"{self.start} to {self.end}"

    @property
    def next_sync(self) -> int | None:
        return self.end if self.step > self.synced else None

    def begin_round(self, lrs: list[float], method: LocalMethod) -> None:
        """Fix the length of the round that begins now; if this raises, nothing."""
        # Beyond the announced end, the run can stop after any step.
        end = self.step + 1
        if self.step < self.total_steps:
            # The paper has one learning rate. The largest gives the shortest round.
            end = method.schedule.round_end(self.step, max(lrs, default=0.0), method.horizon)
        self.start, self.end, self.lrs = self.step, end, lrs

    def warn_inside_round(self) -> None:
        """Log a warning if a round is in progress, because then every rank has its own model."""
        if self.next_sync is not None:
            _log.warning(
                "local steps ended at step %d of %d, inside the round from %s: the ranks' "
                "parameters differ",
                *(self.step, self.total_steps, self),
            )


_OTHER_RANKS = {"world_size": "use torchcomp.redistribute on states saved between rounds"}
_ROUND = {
    **dict.fromkeys(("start", "end", "synced"), checkpoint.count),
    "lrs": checkpoint.list_of(checkpoint.number),
    "lr_sum": checkpoint.number,
}
_SECTION = checkpoint.record(
    **dict.fromkeys(("schedule", "compress", "outer", "moments"), checkpoint.text),
    **dict.fromkeys(("total_steps", "warmup_steps", "step", "syncs", "weights"), checkpoint.count),
    saved_by=checkpoint.list_of(checkpoint.count, length=2),
    # One, with all parameters; the option that made several is gone.
    fragments=checkpoint.list_of(
        checkpoint.record(names=checkpoint.list_of(checkpoint.text), **_ROUND), length=1
    ),
)


def state_of(method: LocalMethod, clock: Clock, averager: Averager) -> dict[str, Any]:
    """Return the state of this rank: that of the averager, and the section of local steps."""
    saved = {key: getattr(clock, key) for key in _ROUND} | {"lr_sum": float(clock.lr_sum)}
    section = {
        **_fixed(method),
        "step": clock.step,
        "syncs": averager.step,
        "saved_by": [averager.exchange.rank, averager.exchange.world_size],
        "weights": checkpoint.digest_of(averager.parameters),
        "fragments": [{"names": list(chain.from_iterable(averager.groups)), **saved}],
    }
    return {**averager.state_dict(), "local_sgd": section}


def restore(state: Any, method: LocalMethod, clock: Clock, averager: Averager) -> int:
    """Restore clock and averager, and return the checksum of the parameters of the state."""
    section: Any = state.get("local_sgd") if isinstance(state, Mapping) else None
    _SECTION(section, "local_sgd")
    for name, value in _fixed(method).items():
        if section[name] != value:
            raise CheckpointError(
                f"the checkpoint was saved with {name}={section[name]}, but this run has "
                f"{name}={value}"
            )
    (saved,) = section["fragments"]
    step, synced, between = section["step"], saved["synced"], averager.exchange
    # Inside a round, the local steps of the other ranks are in their own checkpoints only.
    if step > synced and section["saved_by"] != [between.rank, between.world_size]:
        raise CheckpointError(
            "the checkpoint was saved by rank {} of {} inside a round: load it on that rank. Only "
            "states saved where sync.next_sync is None fit another number".format(
                *section["saved_by"]
            )
        )
    apply = averager.prepare(state, _OTHER_RANKS)
    consistent = saved["start"] <= step <= saved["end"] and synced <= step
    # Parameters have no loss scale, and every synchronisation is a step of the averager.
    consistent &= (section["syncs"], 1.0) == (state["step"], state["scale"])
    if not consistent or sorted(saved["names"]) != sorted(averager.parameters):
        raise CheckpointError(
            f"a damaged checkpoint: step {step} of local_sgd contradicts its {section['syncs']} "
            f"synchronisations, or its fragments: {saved}"
        )
    apply()
    clock.step = step
    for key in _ROUND:
        setattr(clock, key, saved[key])
    return int(section["weights"])


def _fixed(method: LocalMethod) -> dict[str, Any]:
    return {
        "schedule": str(method.schedule),
        "total_steps": method.horizon.total_steps,
        "warmup_steps": method.horizon.warmup_steps,
        "compress": str(method.aggregator),
        "outer": str(method.outer),
        "moments": method.moments,
    }
