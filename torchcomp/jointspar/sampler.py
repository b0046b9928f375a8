"""Sampler: draws the layers of each step and learns from what came of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchcomp.algorithms.bandit import Bandit, Baseline, Literal, sample
from torchcomp.algorithms.kl_projection import Vector, check_vector
from torchcomp.checks import check_choice, check_count, check_fraction, is_whole
from torchcomp.errors import CheckpointError, SpecError
from torchcomp.jointspar.selection import Selection
from torchcomp.keys import Key, check_seed

_NORM_MEMORY = 0.9
"""Share of the old average in the new one, of the norms that feed trust ratios."""


@dataclass(frozen=True)
class Law:
    """How layers are chosen; the same on all ranks. ``str`` is what checkpoints compare.

    Attributes:
        budget: expected cost of a step as a share of the cost of all layers, above 0 and at most 1.
        costs: "layers", "bytes" or "time".
        p_min: least probability of a layer, above 0 and at most `budget`.
        rule: how p is learned; None leaves it uniform.
        selection: "shared" or "per-rank".
        warmup_steps: steps in which all layers are kept first.
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
                f"p_min = {self.p_min:g} is infeasible with budget = {self.budget:g}: every layer "
                "is kept with at least p_min, so that alone costs more; lower p_min",
                "p_min",
            )
        check_choice("costs", self.costs, ("layers", "bytes", "time"))
        check_choice("selection", self.selection, ("shared", "per-rank"))
        if self.rule is not None and not isinstance(self.rule, Baseline | Literal):
            raise SpecError(
                "rule must be Baseline(), Literal(...) or None (uniform), not "
                f"{type(self.rule).__name__}",
                "rule",
            )
        least = 2 if self.costs == "time" else 0
        steps = self.warmup_steps
        if not is_whole(steps) or steps < least:
            why = ' with costs="time", which are measured then' if least else ""
            raise SpecError(
                f"warmup_steps must be a whole number of at least {least}{why}, not {steps!r}",
                "warmup_steps",
            )

    def __str__(self) -> str:
        return (
            # NumPy's numbers are numbers, too, but do not print as Python's.
            f'budget={float(self.budget)!r}, costs="{self.costs}", p_min={float(self.p_min)!r}, '
            f'rule={self.rule}, selection="{self.selection}", warmup_steps={self.warmup_steps}'
        )


class Sampler:
    """Algorithms 1 and 2 of JointSpar on the layers of one model.

    Args:
        law: how layers are chosen.
        selection: receives the sets.
        costs: of each layer, 1-D; None if they are still to be measured, see :meth:`price`.
        key: seed and rank.

    Attributes:
        step: steps that counted so far.
        applied: the probabilities of the last step that counted, 1-D.
    """

    def __init__(self, law: Law, selection: Selection, costs: Vector | None, key: Key) -> None:
        self.law = law
        self._selection = selection
        self._key = key
        self.step = 0
        self.applied = np.ones(len(selection.layers))
        self._bandit: Bandit | None = None
        self._averages: dict[str, tuple[float, float]] = {}
        if costs is not None:
            self.price(costs)

    @property
    def warming_up(self) -> bool:
        """Whether the next step keeps all layers."""
        return self.step < self.law.warmup_steps

    @property
    def measuring(self) -> bool:
        """Whether the costs are still to be measured."""
        return self._bandit is None

    @property
    def p(self) -> Vector:
        """Probabilities of the next step."""
        if self.warming_up or self._bandit is None:
            return np.ones(len(self._selection.layers))
        return self._bandit.p

    @property
    def costs(self) -> Vector:
        """Cost of each layer; ones as long as they are not known."""
        if self._bandit is None:
            return np.ones(len(self._selection.layers))
        return self._bandit.costs

    def price(self, costs: Vector) -> Bandit:
        """Set the costs of the layers, which must be the same on all ranks, and learn anew."""
        budget = self.law.budget * float(costs.sum())
        self._bandit = Bandit(costs, budget, self.law.p_min, self.law.rule)
        return self._bandit

    def draw(self) -> None:
        """Draw the layers of the next step."""
        p = self.p
        key = Key(self._key.seed, self.step, rank=self._key.rank)
        kept = sample(p, key.of_tensor("jointspar"), shared=self._selection.shared)
        self._selection.draw(kept, p, self.step)

    def learn(self, norms: Mapping[str, float]) -> None:
        """A step counts.

        Args:
            norms: |g| of each parameter that was kept, before the division by p, all finite.
        """
        selection = self._selection
        for name, norm in norms.items():
            total, weight = self._averages.get(name, (0.0, 0.0))
            keep, take = _NORM_MEMORY, 1 - _NORM_MEMORY
            self._averages[name] = (keep * total + take * norm, keep * weight + take)
        if self._bandit is not None and self.law.rule is not None and not self.warming_up:
            by_layer = [
                math.hypot(*(norms.get(name, 0.0) for name in names))
                for names in selection.layers.values()
            ]
            self._bandit.update(selection.kept, by_layer)
        self.applied = selection.p
        self.step += 1

    def norm(self, name: str) -> float:
        """Running average of a parameter's |g|; 0.0 before any was seen."""
        total, weight = self._averages.get(name, (0.0, 0.0))
        return total / weight if weight else 0.0

    def state_dict(self) -> dict[str, Any]:
        """All that the next draw depends on, as plain numbers, lists and strings."""
        return {
            "step": self.step,
            "seed": self._key.seed,
            "layers": {layer: list(names) for layer, names in self._selection.layers.items()},
            "costs": None if self._bandit is None else self._bandit.costs.tolist(),
            "bandit": None if self._bandit is None else self._bandit.state_dict(),
            "applied": self.applied.tolist(),
            "averages": {name: list(held) for name, held in self._averages.items()},
        }

    def restored(self, state: Mapping[str, Any]) -> "Sampler":
        """A sampler of the same layers that goes on from a state dict; it has not drawn yet.

        Raises:
            CheckpointError: if the state is of other layers or damaged.
        """
        self._check_layers(state["layers"])
        try:
            check_seed(state["seed"])
            key = Key(state["seed"], rank=self._key.rank)
            sampler = Sampler(self.law, self._selection, None, key)
            sampler._load(state)
        except SpecError as error:
            raise CheckpointError(f"the state dict of JointSpar is damaged: {error}") from error
        return sampler

    def _check_layers(self, saved: Any) -> None:
        mine = {layer: list(names) for layer, names in self._selection.layers.items()}
        theirs = _mapping(saved, "layers")
        if theirs != mine:
            differing = [layer for layer in mine if theirs.get(layer) != mine[layer]]
            differing += [layer for layer in theirs if layer not in mine]
            raise CheckpointError(
                "the checkpoint groups parameters into other layers than this run "
                f"({', '.join(differing[:3])}): build JointSpar with the same layers={{...}}"
            )

    def _load(self, state: Mapping[str, Any]) -> None:
        size = len(self._selection.layers)
        check_count("step", state["step"], least=0)
        self.step = state["step"]
        self.applied = check_vector(state["applied"], "applied", size, self.law.p_min, 1.0)
        if state["costs"] is not None:
            bandit = self.price(check_vector(state["costs"], "costs", size))
            bandit.load_state_dict(_mapping(state["bandit"], "bandit"))
        for name, held in _mapping(state["averages"], "averages").items():
            total, weight = check_vector(held, f"the average of '{name}'", 2, 0.0).tolist()
            self._averages[name] = (total, weight)


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(
            f"the state dict of JointSpar is damaged: {name} is a {type(value).__name__}"
        )
    return value
