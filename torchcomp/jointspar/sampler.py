"""Sampler: draws the layers of each step and learns from what came of them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcomp import checkpoint
from torchcomp.checkpoint import count, dict_of, list_of, number, optional, record, text
from torchcomp.checks import check_choice, check_fraction, is_whole
from torchcomp.errors import CheckpointError, SpecError
from torchcomp.exchange import Exchange
from torchcomp.jointspar.bandit import Bandit, Baseline, Literal, Mask, Vector, check_vector, sample
from torchcomp.jointspar.layers import Layers
from torchcomp.keys import Key

_NORM_MEMORY = 0.9
"""Share of the old average in the new one, of the norms that LARS uses."""

_VERIFY_EVERY = 100
"""Steps between two comparisons of p over the ranks: drift would end in a hang."""

_FORM = record(
    step=count,
    layers=dict_of(list_of(text)),
    costs=optional(list_of(number)),
    bandit=optional(record(p=list_of(number), largest=number, average=number, updates=count)),
    applied=list_of(number),
    averages=dict_of(list_of(number, 2)),
)


@dataclass(frozen=True)
class Law:
    """Options of JointSpar that say how layers are chosen; checkpoints compare their ``str``."""

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
        if not isinstance(self.rule, Baseline | Literal | None):
            given = type(self.rule).__name__
            raise SpecError(
                f"rule must be Baseline(), Literal(...) or None (uniform), not {given}", "rule"
            )
        least, steps = (2 if self.costs == "time" else 0), self.warmup_steps
        if not is_whole(steps) or steps < least:
            why = ' with costs="time", which are measured then' if least else ""
            raise SpecError(
                f"warmup_steps must be a whole number of at least {least}{why}, not {steps!r}",
                "warmup_steps",
            )

    def bandit(self, costs: Vector) -> Bandit:
        """The bandit of layers with these costs."""
        return Bandit(costs, self.budget * float(costs.sum()), self.p_min, self.rule)

    def __str__(self) -> str:
        return (
            # NumPy's numbers are numbers, too, but do not print as Python's.
            f'budget={float(self.budget)!r}, costs="{self.costs}", p_min={float(self.p_min)!r}, '
            f'rule={self.rule}, selection="{self.selection}", warmup_steps={self.warmup_steps}'
        )


class Sampler:
    """Algorithms 1 and 2 of JointSpar on the layers of one model.

    `kept` are the layers of the next step on this rank, drawn with `p`, and `last` and `applied`
    those of the last step that counted. `bandit` is None until costs that are measured are known.
    """

    def __init__(self, law: Law, layers: Layers, costs: Vector | None, key: Key) -> None:
        self.law = law
        self.layers = layers
        self.shared = law.selection == "shared"
        self.step = 0  # steps that counted so far
        # Whether the step that was exchanged last counts; None once that is dealt with.
        self.finished: bool | None = None
        self.last = np.zeros(len(layers), dtype=bool)
        self.applied = np.ones(len(layers))
        self.layer_of = {name: d for d, names in enumerate(layers.values()) for name in names}
        self.bandit = None if costs is None else law.bandit(costs)
        self._key = key
        self._averages: dict[str, list[float]] = {}
        self.draw()

    @property
    def costs(self) -> Vector:
        """Cost of each layer; ones as long as they are not known."""
        return np.ones(len(self.layers)) if self.bandit is None else self.bandit.costs

    @property
    def _learner(self) -> Bandit | None:
        """What p comes from, once the warm-up steps, which keep all layers, are over."""
        return None if self.step < self.law.warmup_steps else self.bandit

    def draw(self) -> None:
        """Draw the layers of the next step."""
        p = np.ones(len(self.layers)) if self._learner is None else self._learner.p
        key = Key(self._key.seed, self.step, rank=self._key.rank).of_tensor("jointspar")
        self.take(sample(p, key, shared=self.shared), p)

    def take(self, kept: Mask, p: Vector) -> None:
        """Keep these layers in the next step, drawn with these probabilities."""
        self.kept, self.p = kept, p
        self._verified = self.step % _VERIFY_EVERY != 0
        self.forget()

    def forget(self) -> None:
        """Forget what an exchange that does not count has learned."""
        # The layers that any rank keeps, once known.
        self._exchanged: Mask | None = self.kept if self.shared else None
        self._noted: dict[str, Tensor] = {}

    def names(self, mask: Mask) -> list[str]:
        """Parameters of the layers in `mask`, in the order of the layers."""
        return [name for name, d in self.layer_of.items() if mask[d]]

    # The exchange calls these, in another thread or on another stream.

    def union(self, exchange: Exchange) -> Mask:
        """Which layers the ranks exchange: all that any of them keeps. A collective."""
        if self.shared and not self._verified:
            facts = {"step": self.step, "kept": self.kept.nonzero()[0], "p": self.p.tolist()}
            exchange.verify("the layers of a step", facts, checkpoint.ONE_STEP)
            self._verified = True
        if self._exchanged is None:
            flags = torch.from_numpy(self.kept.astype(np.uint8)).to(exchange.device)
            self._exchanged = exchange.any_of(flags).cpu().numpy().astype(bool)
        return self._exchanged

    def note(self, parts: Mapping[str, Tensor]) -> None:
        """Keep the norms that p is learned from: of means, or of this rank's gradients."""
        for name, part in parts.items():
            # In float64, so that a finite gradient has a finite norm.
            self._noted[name] = torch.linalg.vector_norm(part, dtype=torch.float64)

    def finish(self, counts: bool) -> None:
        """All of a step has been exchanged; whether it `counts`, on all ranks."""
        self.finished = counts

    # After the exchange.

    def learn(self, scale: float) -> None:
        """A step counts; its gradients were multiplied by `scale`."""
        values = torch.stack(list(self._noted.values())).tolist() if self._noted else []
        norms = dict.fromkeys(self.layer_of, 0.0)
        keep, take = _NORM_MEMORY, 1 - _NORM_MEMORY
        for name, value in zip(self._noted, values, strict=True):
            # Means were divided by p.
            norms[name] = value * float(self.p[self.layer_of[name]] if self.shared else 1.0) / scale
            total, weight = self._averages.get(name, [0.0, 0.0])
            self._averages[name] = [keep * total + take * norms[name], keep * weight + take]
        if self._learner is not None and self.law.rule is not None:
            members = self.layers.values()
            by_layer = [math.hypot(*(norms[name] for name in names)) for names in members]
            self._learner.update(self.kept, by_layer)
        self.last, self.applied = self.kept, self.p
        self.step += 1

    def norm(self, name: str) -> float:
        """Running average of a parameter's |g|; 0.0 before any was seen."""
        total, weight = self._averages.get(name, [0.0, 0.0])
        return total / weight if weight else 0.0

    def state_dict(self) -> dict[str, Any]:
        """All that the next draw depends on but the seed, as plain numbers, lists and strings."""
        return {
            "step": self.step,
            "layers": {layer: list(names) for layer, names in self.layers.items()},
            "costs": self.bandit and self.bandit.costs.tolist(),
            "bandit": self.bandit and self.bandit.state_dict(),
            "applied": self.applied.tolist(),
            "averages": {name: list(held) for name, held in self._averages.items()},
        }

    def prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a checkpoint and change nothing; what comes back goes on from it."""
        size = len(self.layers)
        section: Any = state.get("jointspar")
        _FORM(section, "jointspar")
        theirs = {layer: tuple(names) for layer, names in section["layers"].items()}
        every = {**self.layers, **theirs}
        differing = [layer for layer in every if theirs.get(layer) != self.layers.get(layer)]
        if differing:
            raise CheckpointError(
                "the checkpoint groups parameters into other layers than this run "
                f"({', '.join(differing[:3])}): build JointSpar with the same layers={{...}}"
            )
        bandit = None
        try:
            applied = check_vector(section["applied"], "applied", size, self.law.p_min, 1.0)
            # Only costs that are measured may be missing yet.
            if section["costs"] is not None or self.law.costs != "time":
                bandit = self.law.bandit(check_vector(section["costs"], "costs", size))
                bandit.load_state_dict(section["bandit"] or {})
            averages = {
                name: check_vector(held, f"averages['{name}']", 2, 0.0).tolist()
                for name, held in section["averages"].items()
            }
        except SpecError as error:
            raise CheckpointError(f"a damaged checkpoint: jointspar: {error}") from error

        def restore() -> None:
            self.step, self.applied, self.bandit = section["step"], applied, bandit
            self._averages = averages
            self._key = Key(state["seed"], rank=self._key.rank)
            self.finished = None
            self.draw()
            # A rank alone may have loaded a state.
            self._verified = False

        return restore
