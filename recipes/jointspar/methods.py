"""The methods that the experiments compare, and the texts that name them.

A method is written as the expression that builds it: ``dense``, ``topk(0.3)``, or
``jointspar(...)`` with the arguments of :class:`torchcomp.JointSpar`. The optimizer ``lars``
divides by a running norm of the gradients before their division by p, which keeps the mean update.
``lars-own`` divides by the norm of each gradient, which cancels 1 / p.
"""

import ast
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar

from recipes.errors import RecipeError, nearest
from torchcomp.jointspar import Baseline, Literal, SamplingOptions
from torchcomp.specs.checks import check_fraction
from torchcomp.specs.component import Choices, Component
from torchcomp.specs.errors import SpecError

_BASELINE = Baseline()


@dataclass(frozen=True)
class Dense(Component):
    """``dense``: all gradients, as plain DDP."""

    name: ClassVar[str] = "dense"
    kind: ClassVar[str] = "method"
    budget: ClassVar[float] = 1.0


@dataclass(frozen=True)
class TopK(Component):
    """``topk(0.3)``: TopK with error feedback. The budget is a share of dense DDP's bytes."""

    name: ClassVar[str] = "topk"
    kind: ClassVar[str] = "method"

    budget: float

    def __post_init__(self) -> None:
        check_fraction("budget", self.budget, owner=self.name)


@dataclass(frozen=True)
class LayerSampling(Component):
    """``jointspar(0.6)``: a random set of layers, perhaps compressed by TopK (``topk``)."""

    name: ClassVar[str] = "jointspar"
    kind: ClassVar[str] = "method"

    budget: float
    costs: Annotated[str, Choices(("layers", "bytes"))] = "layers"
    selection: Annotated[str, Choices(("shared", "per-rank"))] = "shared"
    rule: Baseline | Literal | None = _BASELINE
    p_min: float = 0.0125
    topk: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # Building them checks them, before anything runs.
        _ = self.options
        if self.topk is not None:
            check_fraction("topk", self.topk, owner=self.name)
        if isinstance(self.rule, Literal) and self.costs != "layers":
            raise SpecError(
                f'rule=Literal(...) counts layers, so costs="{self.costs}" cannot be used with it: '
                'use costs="layers", or rule=Baseline(...)'
            )

    @property
    def options(self) -> SamplingOptions:
        return SamplingOptions(self.budget, self.costs, self.p_min, self.rule, self.selection)

    @property
    def shared(self) -> bool:
        """Whether all ranks keep the same layers."""
        return self.selection == "shared"


Method = Dense | TopK | LayerSampling

_METHODS: Mapping[str, Any] = {each.name: each for each in (Dense, TopK, LayerSampling)}
_RULES: Mapping[str, Any] = {"Baseline": Baseline, "Literal": Literal}
_EXAMPLES = "'dense', 'topk(0.3)' or 'jointspar(0.6, costs=\"bytes\")'"


@cache
def parse_method(text: str) -> Method:
    """Return the method that a text names; raise RecipeError if it names none."""
    try:
        method: Method = _build(ast.parse(text.strip(), mode="eval").body, _METHODS)
    except (SyntaxError, ValueError, TypeError) as error:
        # Also SpecError, which is a ValueError. A SyntaxError's text would repeat its position.
        problem = error.msg if isinstance(error, SyntaxError) else error
        raise RecipeError(f"the method {text!r}: {problem}; expected {_EXAMPLES}") from None
    return method


def _build(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """Build what a name or a call describes. Nothing is evaluated."""
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name):
        raise ValueError("expected a name or a call")
    name = call.func.id
    if name not in known:
        raise ValueError(f"unknown name {name!r}, did you mean {nearest(name, known)!r}?")
    arguments = [_value(each) for each in call.args]
    options = {str(each.arg): _value(each.value) for each in call.keywords}
    # Unlike the error of a call, that of bind() does not name the class.
    bound = inspect.signature(known[name]).bind(*arguments, **options)
    return known[name](*bound.args, **bound.kwargs)


def _value(node: ast.expr) -> Any:
    return _build(node, _RULES) if isinstance(node, ast.Call) else ast.literal_eval(node)
