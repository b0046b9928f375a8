"""Sampler: draws the layers of each step, and learns their probabilities from gradient norms."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcomp import checkpoint, host
from torchcomp.checkpoint import count, dict_of, list_of, number, optional, record, text
from torchcomp.checks import check_choice, check_fraction, is_whole
from torchcomp.errors import CheckpointError, SpecError
from torchcomp.exchange import Exchange
from torchcomp.jointspar.bandit import Bandit, Baseline, Literal, Mask, Vector, check_vector, sample
from torchcomp.jointspar.layers import Layers
from torchcomp.keys import Key

_NORM_DECAY = 0.9
"""Weight of the old value in the moving average of the norms that LARS uses."""

_VERIFY_EVERY = 100
"""Steps between two verifications of p across ranks. Ranks whose p differ would soon hang."""

_FORM = record(
    step=count,
    layers=dict_of(list_of(text)),
    costs=optional(list_of(number)),
    bandit=optional(record(p=list_of(number), largest=number, average=number, updates=count)),
    applied=list_of(number),
    averages=dict_of(list_of(number, 2)),
)


@dataclass(frozen=True)
class SamplingOptions:
    """The options of JointSpar that decide how layers are chosen.

    Their ``str`` is compared across ranks and with checkpoints. :class:`torchcomp.JointSpar`
    documents each option.

    Raises:
        SpecError: if an option is out of its range.
    """

    budget: float
    costs: str
    p_min: float
    rule: Baseline | Literal | None
    selection: str
    warmup_steps: int

    def __post_init__(self) -> None:
        check_fraction("budget", self.budget)
        check_fraction("p_min", self.p_min)
        if self.p_min > self.budget:
            raise SpecError(
                f"p_min = {self.p_min:g} is infeasible with budget = {self.budget:g}: keeping "
                "every layer with probability p_min already exceeds the budget; lower p_min",
                "p_min",
            )
        check_choice("costs", self.costs, ("layers", "bytes", "time"))
        check_choice("selection", self.selection, ("shared", "per-rank"))
        if not isinstance(self.rule, Baseline | Literal | None):
            kind = type(self.rule).__name__
            raise SpecError(
                f"rule must be Baseline(), Literal(...) or None (uniform), not {kind}", "rule"
            )
        # The times of the first step are not used, so measuring takes a second one.
        least, steps = (2 if self.costs == "time" else 0), self.warmup_steps
        if not is_whole(steps) or steps < least:
            why = ' with costs="time", which is measured during the warm-up' if least else ""
            raise SpecError(
                f"warmup_steps must be an integer of at least {least}{why}, not {steps!r}",
                "warmup_steps",
            )

    def bandit(self, costs: Vector) -> Bandit:
        """Return a new bandit for layers with these costs."""
        return Bandit(costs, float(self.budget) * float(costs.sum()), self.p_min, self.rule)

    def __str__(self) -> str:
        return (
            # float(): NumPy's scalars are valid options, but their repr differs from Python's.
            f'budget={float(self.budget)!r}, costs="{self.costs}", p_min={float(self.p_min)!r}, '
            f'rule={self.rule}, selection="{self.selection}", warmup_steps={self.warmup_steps}'
        )


class Sampler:
    """Algorithms 1 and 2 of JointSpar on the layers of one model.

    Args:
        options: how layers are chosen.
        layers: the layers of the model.
        costs: the cost of each layer, or None if it has yet to be measured.
        key: seed and rank of the draws.

    Attributes:
        kept: the layers of the next step on this rank, as a mask.
        p: the probabilities that `kept` was drawn with.
        last: the layers of the last committed step.
        applied: the probabilities of the last committed step.
        step: number of committed steps.
        committed: whether the step that was just exchanged was committed (True) or rolled back
            (False). None once JointSpar has handled it.
        bandit: None until the costs are known.
    """

    def __init__(
        self, options: SamplingOptions, layers: Layers, costs: Vector | None, key: Key
    ) -> None:
        self.options = options
        self.layers = layers
        self.shared = options.selection == "shared"
        self.step = 0
        self.committed: bool | None = None
        self.last = np.zeros(len(layers), dtype=bool)
        self.applied = np.ones(len(layers))
        self.layer_of = {name: d for d, names in enumerate(layers.values()) for name in names}
        self.bandit = None if costs is None else options.bandit(costs)
        self._key = key
        self._averages: dict[str, list[float]] = {}
        self.draw()

    @property
    def costs(self) -> Vector:
        """The cost of each layer, or all ones until it is known."""
        return np.ones(len(self.layers)) if self.bandit is None else self.bandit.costs

    @property
    def _learner(self) -> Bandit | None:
        """The bandit, or None during the warm-up steps, which keep all layers."""
        return None if self.step < self.options.warmup_steps else self.bandit

    def draw(self) -> None:
        """Draw the layers of the next step."""
        p = np.ones(len(self.layers)) if self._learner is None else self._learner.p
        # A function of seed and step, so that a resumed run draws the same layers. The name makes
        # it independent of what compressors draw in the same step.
        key = Key(self._key.seed, self.step, rank=self._key.rank).of_tensor("jointspar")
        self.select(sample(p, key, shared=self.shared), p)

    def select(self, kept: Mask, p: Vector) -> None:
        """Keep these layers in the next step, drawn with these probabilities."""
        self.kept, self.p = kept, p
        self._verified = self.step % _VERIFY_EVERY != 0
        self.reset()

    def reset(self) -> None:
        """Discard what was recorded during an exchange that was rolled back."""
        # The layers that any rank keeps. With per-rank selection a collective has to find them.
        self._exchanged: Mask | None = self.kept if self.shared else None
        self._norms: dict[str, Tensor] = {}

    def names(self, mask: Mask) -> list[str]:
        """Return the parameters of the layers in `mask`, in the order of the layers."""
        return [name for name, d in self.layer_of.items() if mask[d]]

    # The following three are called during the exchange, in its thread or on its stream.

    def union(self, exchange: Exchange) -> Mask:
        """Return the layers to exchange: those that any rank keeps. A collective."""
        # Verify before the first exchange: ranks with different sets would pair unequal messages.
        if self.shared and not self._verified:
            values = {"step": self.step, "kept": self.kept.nonzero()[0], "p": self.p.tolist()}
            # What later probabilities and LARS depend on.
            values |= {"costs": self.costs.tolist(), "averages": sorted(self._averages.items())}
            values["bandit"] = self.bandit and self.bandit.state_dict()
            exchange.verify("the layers of a step", values, checkpoint.ONE_STEP)
            self._verified = True
        if self._exchanged is None:
            flags = host.copy_to(torch.from_numpy(self.kept.astype(np.uint8)), exchange.device)
            # The host has to know which messages to send: this is the only wait inside a step.
            self._exchanged = exchange.all_reduce_max(flags).cpu().numpy().astype(bool)
        return self._exchanged

    def record_norms(self, parts: Mapping[str, Tensor]) -> None:
        """Record the norms that p is learned from, of the means or of this rank's gradients."""
        if parts:
            # In float64 a finite float32 gradient has a finite norm. The norms stay on the device:
            # learn() fetches all of them together, and waits for the GPU only once.
            norms = torch._foreach_norm(list(parts.values()), 2, dtype=torch.float64)
            self._norms |= zip(parts, norms, strict=True)

    def finish(self, committed: bool) -> None:
        """End an exchange, which all ranks committed or all ranks rolled back."""
        self.committed = committed

    # The following are called after the exchange.

    def learn(self, scale: float) -> None:
        """Update the averages and p after a committed step.

        Args:
            scale: the loss scale, which the gradients were multiplied by.
        """
        # Empty if no layer was exchanged.
        held = list(self._norms.values())
        values = torch.stack(held).tolist() if held else []
        # Parameters of layers that were not exchanged have norm 0. The bandit ignores them.
        norms = dict.fromkeys(self.layer_of, 0.0)
        keep, take = _NORM_DECAY, 1 - _NORM_DECAY
        for name, value in zip(self._norms, values, strict=True):
            # Algorithm 1 takes norms before the division by p. The means were divided, so their
            # norms are multiplied by p again. A rank's own norms were recorded before the division.
            p = float(self.p[self.layer_of[name]]) if self.shared else 1.0
            norms[name] = value * p / scale
            # The weights sum to less than 1 at first. norm() divides by their sum.
            total, weight = self._averages.get(name, [0.0, 0.0])
            self._averages[name] = [keep * total + take * norms[name], keep * weight + take]
        # Warm-up steps teach p nothing: they keep every layer with probability 1.
        if self._learner is not None and self.options.rule is not None:
            members = self.layers.values()
            by_layer = [math.hypot(*(norms[name] for name in names)) for names in members]
            self._learner.update(self.kept, by_layer)
        self.last, self.applied = self.kept, self.p
        self.step += 1

    def norm(self, name: str) -> float:
        """Return the running average of a parameter's |g|, or 0.0 before its first gradient."""
        total, weight = self._averages.get(name, [0.0, 0.0])
        return total / weight if weight else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next draw depends on, except the seed.

        All values are plain numbers, lists and strings, for ``torch.load(..., weights_only=True)``.
        """
        return {
            "step": self.step,
            "layers": {layer: list(names) for layer, names in self.layers.items()},
            "costs": self.bandit and self.bandit.costs.tolist(),
            "bandit": self.bandit and self.bandit.state_dict(),
            "applied": self.applied.tolist(),
            "averages": {name: list(pair) for name, pair in self._averages.items()},
        }

    def prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a checkpoint without changing anything.

        Returns:
            A function that restores the checkpoint and draws the layers of the next step.

        Raises:
            CheckpointError: if the checkpoint is damaged or has other layers.
        """
        size = len(self.layers)
        section: Any = state.get("jointspar")
        _FORM(section, "jointspar")
        theirs = {layer: tuple(names) for layer, names in section["layers"].items()}
        known = {**self.layers, **theirs}
        differing = [layer for layer in known if theirs.get(layer) != self.layers.get(layer)]
        if differing:
            raise CheckpointError(
                "the checkpoint and this run group parameters into different layers "
                f"({', '.join(differing[:3])}): build JointSpar with the same layers={{...}}"
            )
        bandit = None
        try:
            applied = check_vector(section["applied"], "applied", size, self.options.p_min, 1.0)
            # Only measured costs can be missing, in a checkpoint of the warm-up. All others must be
            # there: check_vector reports their absence.
            if section["costs"] is not None or self.options.costs != "time":
                bandit = self.options.bandit(check_vector(section["costs"], "costs", size))
                bandit.load_state_dict(section["bandit"] or {})
            averages = {
                name: check_vector(pair, f"averages['{name}']", 2, 0.0).tolist()
                for name, pair in section["averages"].items()
            }
        except SpecError as error:
            raise CheckpointError(f"a damaged checkpoint: jointspar: {error}") from error

        def restore() -> None:
            self.step, self.applied, self.bandit = section["step"], applied, bandit
            self._averages = averages
            # The seed is the checkpoint's, so that the run continues with the layers it would have
            # drawn. The rank is this run's, because the number of ranks can have changed.
            self._key = Key(state["seed"], rank=self._key.rank)
            self.committed = None
            self.draw()
            # It is possible that only some ranks have loaded a checkpoint.
            self._verified = False

        return restore
