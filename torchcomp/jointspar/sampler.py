"""Sampler: draws the layers of each step and learns from what came of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchcomp.algorithms.bandit import Bandit, Baseline, Literal, sample
from torchcomp.algorithms.kl_projection import Vector, check_vector
from torchcomp.checks import check_choice, check_fraction
from torchcomp.errors import CheckpointError, SpecError
from torchcomp.jointspar.selection import Selection
from torchcomp.keys import Key

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
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < least:
            why = ' with costs="time", which are measured then' if least else ""
            raise SpecError(
                f"warmup_steps must be a whole number of at least {least}{why}, not {steps!r}",
                "warmup_steps",
            )

    def __str__(self) -> str:
        return (
            f'budget={self.budget!r}, costs="{self.costs}", p_min={self.p_min!r}, '
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
        self.draw()

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

    def price(self, costs: Vector) -> None:
        """Set the costs of the layers, which must be the same on all ranks."""
        budget = self.law.budget * float(costs.sum())
        self._bandit = Bandit(costs, budget, self.law.p_min, self.law.rule)

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

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Require a state of these layers.

        Raises:
            CheckpointError: naming layers that differ.
        """
        mine = {layer: list(names) for layer, names in self._selection.layers.items()}
        if state["layers"] != mine:
            differing = [layer for layer in mine if state["layers"].get(layer) != mine[layer]]
            differing += [layer for layer in state["layers"] if layer not in mine]
            raise CheckpointError(
                "the checkpoint groups parameters into other layers than this run "
                f"({', '.join(differing[:3])}): build JointSpar with the same layers={{...}}"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, and draw again.

        Raises:
            CheckpointError: if it is of other layers; nothing changes then.
        """
        self.check_state(state)
        self._bandit = None
        if state["costs"] is not None:
            self.price(check_vector(state["costs"], "costs"))
            self._load_bandit(state["bandit"])
        self.step = state["step"]
        self._key = Key(state["seed"], rank=self._key.rank)
        self.applied = np.array(state["applied"])
        self._averages = {name: (held[0], held[1]) for name, held in state["averages"].items()}
        self.draw()
        self._selection.doubt()

    def _load_bandit(self, state: Mapping[str, Any]) -> None:
        if self._bandit is not None:
            self._bandit.load_state_dict(state)
