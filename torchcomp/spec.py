"""Spec strings: the constructor expression as text, and back.

A restricted walk over Python's own syntax tree: names, calls and literals. Nothing is evaluated.
"""

import ast
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from threading import Lock
from typing import Any, TypeVar, get_args

from torchcomp.aggregators import AGGREGATORS, Aggregator, Mean
from torchcomp.component import Component, nearest
from torchcomp.compressors import COMPRESSORS, Compressor
from torchcomp.errors import SpecError
from torchcomp.outer_steps import OUTER_STEPS, OuterStep
from torchcomp.schedules import SCHEDULES, Schedule

COMPONENTS: dict[str, type[Component]] = {
    component.name: component
    for component in (*COMPRESSORS, *AGGREGATORS, *SCHEDULES, *OUTER_STEPS)
}
_NUMBERS = {"nan": float("nan"), "inf": float("inf")}
_LONGEST = 1000
# CPython 3.11 counts the depth of a syntax tree for all threads together, and finds it wrong.
_PARSING = Lock()

Built = TypeVar("Built", bound=Component)
Wanted = Mapping[str, tuple[type[Component], ...]]
"""What fits a place, by what it is called there: the names that an error may suggest."""

_METHODS: Wanted = {"methods": (*AGGREGATORS, *COMPRESSORS)}
_SCHEDULES: Wanted = {"schedules": SCHEDULES}
_OUTER_STEPS: Wanted = {"outer steps": OUTER_STEPS}
_COMPRESSORS: Wanted = {"compressors": COMPRESSORS}

_USES = {
    Aggregator: ("a gradient method", "'ef(topk(0.01))'", "register(model, ...)"),
    Schedule: (
        "a schedule",
        "'every(4)' or 'qsr(alpha=0.0175, h_base=4)'",
        "LocalSGD(model, optimizer, ..., total_steps=...)",
    ),
    OuterStep: (
        "an outer step",
        "'nesterov(lr=0.7, momentum=0.9)' or 'slowmo(beta=0.7)'",
        "LocalSGD(..., outer=...)",
    ),
}
"""By kind, for errors: its name, an example, and where it goes."""


def parse(spec: str | Component) -> Aggregator | Schedule:
    """Build what a spec string describes; ``str()`` of the result is the canonical string.

    ``"ef(topk(0.01))"`` and ``"mean"`` are aggregators, ``"qsr(alpha=0.0175, h_base=4)"`` is a
    schedule, and a bare compressor, ``"topk(0.01)"``, means ``mean(topk(0.01))``.

    Args:
        spec: a spec string, or a component, which is returned as it is (a compressor wrapped).

    Raises:
        SpecError: with a caret under what is wrong, and the nearest known name.
    """
    kinds: tuple[type[Aggregator | Schedule], ...] = (Aggregator, Schedule)
    return _parse(spec, {**_METHODS, **_SCHEDULES}, kinds)


def parse_aggregator(spec: str | Component) -> Aggregator:
    """Like :func:`parse`, where a method is needed: anything else is a SpecError."""
    return _parse(spec, _METHODS, (Aggregator,))


def parse_schedule(spec: str | Component) -> Schedule:
    """Like :func:`parse`, where a schedule is needed: anything else is a SpecError."""
    return _parse(spec, _SCHEDULES, (Schedule,))


def parse_outer_step(spec: str | OuterStep) -> OuterStep:
    """Like :func:`parse`, where an outer step is needed: anything else is a SpecError."""
    return _parse(spec, _OUTER_STEPS, (OuterStep,))


def _parse(spec: str | Component, wanted: Wanted, kinds: tuple[type[Built], ...]) -> Built:
    built: Any = _Parser(spec).build(wanted) if isinstance(spec, str) else spec
    if isinstance(built, Compressor):
        built = Mean(built)
    if isinstance(built, kinds):
        return built
    if not isinstance(built, Component):
        raise SpecError(f"a spec is a string such as {_USES[kinds[0]][1]}, not {built!r}")
    needed = " or ".join(f"{_USES[kind][0]} such as {_USES[kind][1]}" for kind in kinds)
    uses = [use for kind, use in _USES.items() if isinstance(built, kind)]
    goes = "".join(f"; {name} goes to torchcomp.{place}" for name, _, place in uses)
    raise SpecError(f"'{built}' is {uses[0][0]}, and here {needed} is needed{goes}")


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = " ".join(text.split())

    def build(self, wanted: Wanted) -> Any:
        if not self.text:
            raise SpecError("an empty spec; write for example 'mean' or 'ef(topk(0.01))'")
        if len(self.text) > _LONGEST:
            raise SpecError(f"a spec of {len(self.text)} characters; at most {_LONGEST} are read")
        try:
            with _PARSING:
                tree = ast.parse(self.text, mode="eval")
            return self._value(tree.body, wanted)
        except SpecError:
            raise
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            problem = getattr(error, "msg", None) or str(error)
            if problem.startswith("leading zeros"):
                problem = "a number begins with a surplus 0; the decimal point is '.', as in 0.01"
            elif "%" in self.text:
                problem += " (1 % is written 0.01)"
            column = (getattr(error, "offset", None) or 1) - 1
            raise self._error(f"not a spec: {problem}", column) from None

    def _value(self, node: ast.expr, wanted: Wanted) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in _NUMBERS:
                return _NUMBERS[name]
            case ast.Name():
                return self._component(node, ast.Call(node, [], []), wanted)
            case ast.Call():
                return self._component(node, node, wanted)
            case ast.UnaryOp(op=ast.USub()):
                value = self._value(node.operand, wanted)
                if isinstance(value, int | float):
                    return -value
        raise self._error("only names, calls and literals are read here", node)

    def _component(self, node: ast.expr, call: ast.Call, wanted: Wanted) -> Component:
        name = call.func
        if not isinstance(name, ast.Name):
            raise self._error("a method's name is expected here", name)
        if name.id not in COMPONENTS:
            raise self._error(f"unknown name '{name.id}'; {_nearest(name.id, wanted)}", name)
        cls = COMPONENTS[name.id]
        known = {field.name: field for field in fields(cls)}
        options = self._options(cls, list(known), call)
        values = {each: self._option(cls, known[each], value) for each, value in options.items()}
        # A default that is built anew for each component is none to dataclasses.
        required = [f for f in known.values() if f.default is f.default_factory is MISSING]
        missing = " and ".join(repr(f.name) for f in required if f.name not in values)
        if missing:
            raise self._error(f"{cls.name} needs {missing}, as in {cls.example}", node)
        try:
            return cls(**values)
        except SpecError as error:
            raise self._error(str(error), options.get(error.field or "", node)) from None

    def _option(self, cls: type[Component], option: Field[Any], node: ast.expr) -> Any:
        """An option's value; a compressor may also stand in quotes: ``down="identity"``."""
        if isinstance(node, ast.Name) and str in (option.type, *get_args(option.type)):
            problem = (
                f"{cls.name}: {option.name} is a text and needs quotes, '{node.id}' (a shell takes "
                "away those of the kind that stands around the spec)"
            )
            raise self._error(problem, node)
        value = self._value(node, _COMPRESSORS)
        if option.type is not Compressor or not isinstance(value, str):
            return value
        try:
            return _Parser(value).build(_COMPRESSORS)
        except SpecError as error:
            raise self._error(str(error).partition("\n")[0], node) from None

    def _options(
        self, cls: type[Component], known: list[str], call: ast.Call
    ) -> dict[str, ast.expr]:
        if len(call.args) > len(known):
            problem = f"{cls.name} takes at most {len(known)} options"
            raise self._error(problem, call.args[len(known)])
        options = dict(zip(known, call.args, strict=False))
        for keyword in call.keywords:
            if keyword.arg is None:
                raise self._error("** is not read here", keyword)
            if keyword.arg not in known:
                problem = f"{cls.name} has no option '{keyword.arg}'; {nearest(keyword.arg, known)}"
                raise self._error(problem + _owners(keyword.arg), keyword)
            if keyword.arg in options:
                raise self._error(f"{cls.name}: '{keyword.arg}' is given twice", keyword)
            options[keyword.arg] = keyword.value
        return options

    def _error(self, problem: str, at: ast.expr | ast.keyword | int) -> SpecError:
        # Syntax trees count columns in UTF-8 bytes.
        column = at if isinstance(at, int) else len(self.text.encode()[: at.col_offset].decode())
        return SpecError(f"{problem}\n  {self.text}\n  {' ' * column}^")


def _nearest(word: str, wanted: Wanted) -> str:
    names = {kind: sorted(component.name for component in wanted[kind]) for kind in wanted}
    hint = nearest(word, [name for kind in names.values() for name in kind])
    if hint.startswith("did you mean"):
        return hint
    return "; ".join(f"{kind}: {', '.join(each)}" for kind, each in names.items())


def _owners(option: str) -> str:
    owners = [
        name for name, cls in COMPONENTS.items() if option in {field.name for field in fields(cls)}
    ]
    return f" ('{option}' is an option of {', '.join(owners)})" if owners else ""
