"""The methods that the experiments compare, and the texts that name them.

A method is written as the expression that builds it: ``dense``, ``topk(0.3)``, or
``jointspar(...)`` with the arguments of :class:`torchcomp.JointSpar`. The optimizer ``lars``
divides by a running norm of the gradients before their division by p, which keeps the mean update.
``lars-own`` divides by the norm of each gradient, which cancels 1 / p.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from torchcomp.jointspar import Baseline, Literal, SamplingOptions
from torchcomp.specs.component import Component

_BASELINE = Baseline()


@dataclass(frozen=True)
class Dense(Component):
    """``dense``: all gradients, as plain DDP."""

    name: ClassVar[str] = "dense"
    budget: ClassVar[float] = 1.0


@dataclass(frozen=True)
class TopK(Component):
    """``topk(0.3)``: TopK with error feedback. The budget is a share of dense DDP's bytes."""

    name: ClassVar[str] = "topk"

    budget: float


@dataclass(frozen=True)
class LayerSampling(Component):
    """``jointspar(0.6)``: a random set of layers, perhaps compressed by TopK (``topk``)."""

    name: ClassVar[str] = "jointspar"

    budget: float
    costs: str = "layers"  # or "bytes"
    selection: str = "shared"  # or "per-rank"
    rule: Baseline | Literal | None = _BASELINE
    p_min: float = 0.0125
    topk: float | None = None

    @property
    def options(self) -> SamplingOptions:
        return SamplingOptions(self.budget, self.costs, self.p_min, self.rule, self.selection)

    @property
    def shared(self) -> bool:
        """Whether all ranks keep the same layers."""
        return self.selection == "shared"


Method = Dense | TopK | LayerSampling

_NAMES: Mapping[str, Any] = {
    "dense": Dense,
    "topk": TopK,
    "jointspar": LayerSampling,
    "Baseline": Baseline,
    "Literal": Literal,
}


@cache
def parse_method(text: str) -> Method:
    """Return the method that a cell of a results file names. Nothing is evaluated."""
    method: Method = _value(ast.parse(text, mode="eval").body)
    return method


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name):
            return _NAMES[name]()
        case ast.Call(func=ast.Name(id=name)):
            options = {str(each.arg): _value(each.value) for each in node.keywords}
            return _NAMES[name](*map(_value, node.args), **options)
    return ast.literal_eval(node)
