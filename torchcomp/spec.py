"""Spec strings: the constructor expression as text, and back.

A restricted walk over Python's own syntax tree: names, calls and literals. Nothing is evaluated.
"""

import ast
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar

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

Built = TypeVar("Built")


def parse(spec: str | Component) -> Aggregator | Schedule:
    """Build what a spec string describes; ``str()`` of the result is the canonical string.

    ``"ef(topk(0.01))"`` and ``"mean"`` are aggregators, ``"qsr(alpha=0.0175, h_base=4)"`` is a
    schedule, and a bare compressor, ``"topk(0.01)"``, means ``mean(topk(0.01))``.

    Args:
        spec: a spec string, or a component, which is returned as it is (a compressor wrapped).

    Raises:
        SpecError: with a caret under what is wrong, and the nearest known name.
    """
    built = _build(spec)
    if isinstance(built, Compressor):
        return Mean(built)
    if isinstance(built, Aggregator | Schedule):
        return built
    if isinstance(built, OuterStep):
        raise SpecError(
            f"'{built}' is an outer step, and here a method or a schedule is needed; an outer step "
            f"goes to torchcomp.LocalSGD(..., outer='{built}')"
        )
    raise SpecError(f"a spec is a string such as 'ef(topk(0.01))', not {built!r}")


def parse_aggregator(spec: str | Component) -> Aggregator:
    """Like :func:`parse`, for places that need an aggregator.

    Raises:
        SpecError: also if the spec describes a schedule.
    """
    built = parse(spec)
    if isinstance(built, Aggregator):
        return built
    raise SpecError(
        f"'{built}' is a schedule, and here a method such as 'ef(topk(0.01))' is needed; a "
        f"schedule goes to torchcomp.LocalSGD(model, optimizer, '{built}', total_steps=...)"
    )


def parse_schedule(spec: str | Component) -> Schedule:
    """Like :func:`parse`, for places that need a schedule.

    Raises:
        SpecError: also if the spec describes an aggregator.
    """
    built = parse(spec)
    if isinstance(built, Schedule):
        return built
    raise SpecError(
        f"'{built}' is a gradient method, and here a schedule such as 'every(4)' or "
        f"'qsr(alpha=0.0175, h_base=4)' is needed; a method goes to torchcomp.register(model, ...)"
    )


def parse_outer_step(spec: str | OuterStep) -> OuterStep:
    """Build the outer step that a spec string describes.

    Raises:
        SpecError: as :func:`parse` does, or if the spec describes something else.
    """
    built = _build(spec)
    if isinstance(built, OuterStep):
        return built
    given = f"the {built.kind} '{built}'" if isinstance(built, Component) else repr(built)
    raise SpecError(
        f"an outer step is for example 'nesterov(lr=0.7, momentum=0.9)' or 'slowmo(beta=0.7)', not "
        f"{given}"
    )


def _build(spec: str | Component) -> Any:
    return _Parser(spec).build() if isinstance(spec, str) else spec


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = " ".join(text.split())

    def build(self) -> Any:
        if not self.text:
            raise SpecError("an empty spec; write for example 'mean' or 'ef(topk(0.01))'")
        if len(self.text) > _LONGEST:
            raise SpecError(f"a spec of {len(self.text)} characters; at most {_LONGEST} are read")
        try:
            tree = ast.parse(self.text, mode="eval")
            return self._value(tree.body)
        except SpecError:
            raise
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            column = (getattr(error, "offset", None) or 1) - 1
            problem = getattr(error, "msg", None) or str(error)
            if "%" in self.text:
                problem += " (1 % is written 0.01)"
            raise self._error(f"not a spec: {problem}", column) from None

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return _NUMBERS[node.id] if node.id in _NUMBERS else self._component(node, node, [], [])
        if isinstance(node, ast.Call):
            return self._component(node, node.func, node.args, node.keywords)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._value(node.operand)
            if isinstance(value, int | float):
                return -value
        raise self._error("only names, calls and literals are read here", self._column(node))

    def _component(
        self, node: ast.expr, name: ast.expr, args: list[ast.expr], keywords: list[ast.keyword]
    ) -> Component:
        cls = self._class(name)
        options = self._options(cls, args, keywords)
        kinds = {field.name: field.type for field in fields(cls)}
        values = {
            option: self._quoted(self._value(value), kinds[option], value)
            for option, value in options.items()
        }
        missing = [f.name for f in fields(cls) if _required(f) and f.name not in values]
        if missing:
            needed = " and ".join(repr(option) for option in missing)
            problem = f"{cls.name} needs {needed}, as in {cls.example}"
            raise self._error(problem, self._column(node))
        return self._construct(cls, values, node, options)

    def _quoted(self, value: Any, kind: Any, node: ast.expr) -> Any:
        """A compressor may also stand in quotes: ``down="identity"``."""
        if kind is not Compressor or not isinstance(value, str):
            return value
        try:
            return _Parser(value).build()
        except SpecError as error:
            raise self._error(str(error).partition("\n")[0], self._column(node)) from None

    def _construct(
        self,
        cls: Callable[..., Component],
        values: dict[str, Any],
        node: ast.expr,
        options: dict[str, ast.expr],
    ) -> Component:
        try:
            return cls(**values)
        except SpecError as error:
            at = options.get(error.field or "", node)
            raise self._error(str(error), self._column(at)) from None

    def _class(self, name: ast.expr) -> type[Component]:
        if not isinstance(name, ast.Name):
            raise self._error("a method's name is expected here", self._column(name))
        if name.id not in COMPONENTS:
            problem = f"unknown name '{name.id}'; {_nearest_component(name.id)}"
            raise self._error(problem, self._column(name))
        return COMPONENTS[name.id]

    def _options(
        self, cls: type[Component], args: list[ast.expr], keywords: list[ast.keyword]
    ) -> dict[str, ast.expr]:
        known = [field.name for field in fields(cls)]
        if len(args) > len(known):
            problem = f"{cls.name} takes at most {len(known)} options"
            raise self._error(problem, self._column(args[len(known)]))
        options = dict(zip(known, args, strict=False))
        for keyword in keywords:
            self._check_keyword(cls, keyword, known, options)
            options[str(keyword.arg)] = keyword.value
        return options

    def _check_keyword(
        self, cls: type[Component], keyword: ast.keyword, known: list[str], given: dict[str, Any]
    ) -> None:
        column = self._column(keyword)
        if keyword.arg is None:
            raise self._error("** is not read here", column)
        if keyword.arg not in known:
            problem = f"{cls.name} has no option '{keyword.arg}'; {nearest(keyword.arg, known)}"
            raise self._error(problem + _owners(keyword.arg), column)
        if keyword.arg in given:
            raise self._error(f"{cls.name}: '{keyword.arg}' is given twice", column)

    def _column(self, node: ast.expr | ast.keyword) -> int:
        # Syntax trees count columns in UTF-8 bytes.
        return len(self.text.encode()[: node.col_offset].decode())

    def _error(self, problem: str, column: int) -> SpecError:
        return SpecError(f"{problem}\n  {self.text}\n  {' ' * column}^")


def _nearest_component(word: str) -> str:
    hint = nearest(word, COMPONENTS)
    if hint.startswith("did you mean"):
        return hint
    kinds = {
        "methods": [component.name for component in (*AGGREGATORS, *COMPRESSORS)],
        "schedules": [component.name for component in SCHEDULES],
        "outer steps": [component.name for component in OUTER_STEPS],
    }
    return "; ".join(f"{kind}: {', '.join(sorted(names))}" for kind, names in kinds.items())


def _required(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _owners(option: str) -> str:
    owners = [
        component.name
        for component in COMPONENTS.values()
        if option in {field.name for field in fields(component)}
    ]
    return f" ('{option}' is an option of {', '.join(owners)})" if owners else ""
