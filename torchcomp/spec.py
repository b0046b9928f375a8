"""Spec strings: the constructor expression as text, and back.

A restricted walk over Python's own syntax tree: names, calls and literals. Nothing is evaluated.
"""

import ast
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from threading import Lock
from typing import Any, get_args

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

Wanted = Mapping[str, tuple[type[Component], ...]]
"""What fits a place, by what it is called there: the names that an error may suggest."""

_METHODS: Wanted = {"methods": (*AGGREGATORS, *COMPRESSORS)}
_SCHEDULES: Wanted = {"schedules": SCHEDULES}
_OUTER_STEPS: Wanted = {"outer steps": OUTER_STEPS}
_COMPRESSORS: Wanted = {"compressors": COMPRESSORS}


def parse(spec: str | Component) -> Aggregator | Schedule:
    """Build what a spec string describes; ``str()`` of the result is the canonical string.

    ``"ef(topk(0.01))"`` and ``"mean"`` are aggregators, ``"qsr(alpha=0.0175, h_base=4)"`` is a
    schedule, and a bare compressor, ``"topk(0.01)"``, means ``mean(topk(0.01))``.

    Args:
        spec: a spec string, or a component, which is returned as it is (a compressor wrapped).

    Raises:
        SpecError: with a caret under what is wrong, and the nearest known name.
    """
    return _parse(spec, {**_METHODS, **_SCHEDULES})


def _parse(spec: str | Component, wanted: Wanted) -> Aggregator | Schedule:
    built = _build(spec, wanted)
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
    built = _parse(spec, _METHODS)
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
    built = _parse(spec, _SCHEDULES)
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
    built = _build(spec, _OUTER_STEPS)
    if isinstance(built, OuterStep):
        return built
    given = f"the {built.kind} '{built}'" if isinstance(built, Component) else repr(built)
    raise SpecError(
        f"an outer step is for example 'nesterov(lr=0.7, momentum=0.9)' or 'slowmo(beta=0.7)', not "
        f"{given}"
    )


def _build(spec: str | Component, wanted: Wanted) -> Any:
    return _Parser(spec, wanted).build() if isinstance(spec, str) else spec


class _Parser:
    def __init__(self, text: str, wanted: Wanted) -> None:
        self.text = " ".join(text.split())
        self.wanted = wanted

    def build(self) -> Any:
        if not self.text:
            raise SpecError("an empty spec; write for example 'mean' or 'ef(topk(0.01))'")
        if len(self.text) > _LONGEST:
            raise SpecError(f"a spec of {len(self.text)} characters; at most {_LONGEST} are read")
        try:
            with _PARSING:
                tree = ast.parse(self.text, mode="eval")
            return self._value(tree.body, self.wanted)
        except SpecError:
            raise
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            column = (getattr(error, "offset", None) or 1) - 1
            problem = _in_our_words(getattr(error, "msg", None) or str(error), self.text)
            raise self._error(f"not a spec: {problem}", column) from None

    def _value(self, node: ast.expr, wanted: Wanted) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id in _NUMBERS:
            return _NUMBERS[node.id]
        if isinstance(node, ast.Name):
            return self._component(node, self._class(node, wanted), [], [])
        if isinstance(node, ast.Call):
            cls = self._class(node.func, wanted)
            return self._component(node, cls, node.args, node.keywords)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._value(node.operand, wanted)
            if isinstance(value, int | float):
                return -value
        raise self._error("only names, calls and literals are read here", self._column(node))

    def _component(
        self,
        node: ast.expr,
        cls: type[Component],
        args: list[ast.expr],
        keywords: list[ast.keyword],
    ) -> Component:
        options = self._options(cls, args, keywords)
        known = {field.name: field for field in fields(cls)}
        values = {name: self._option(cls, known[name], value) for name, value in options.items()}
        missing = [f.name for f in fields(cls) if _required(f) and f.name not in values]
        if missing:
            needed = " and ".join(repr(option) for option in missing)
            problem = f"{cls.name} needs {needed}, as in {cls.example}"
            raise self._error(problem, self._column(node))
        return self._construct(cls, values, node, options)

    def _option(self, cls: type[Component], option: Field[Any], node: ast.expr) -> Any:
        """An option's value; a compressor may also stand in quotes: ``down="identity"``."""
        if isinstance(node, ast.Name) and str in (option.type, *get_args(option.type)):
            problem = (
                f"{cls.name}: {option.name} is a text and needs quotes, '{node.id}' (a shell takes "
                "away those of the kind that stands around the spec)"
            )
            raise self._error(problem, self._column(node))
        value = self._value(node, _COMPRESSORS)
        if option.type is not Compressor or not isinstance(value, str):
            return value
        try:
            return _Parser(value, _COMPRESSORS).build()
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

    def _class(self, name: ast.expr, wanted: Wanted) -> type[Component]:
        if not isinstance(name, ast.Name):
            raise self._error("a method's name is expected here", self._column(name))
        if name.id not in COMPONENTS:
            problem = f"unknown name '{name.id}'; {_nearest_component(name.id, wanted)}"
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


def _in_our_words(problem: str, text: str) -> str:
    """What Python says of a syntax error, as it concerns a spec."""
    if problem.startswith("leading zeros"):
        return "a number begins with a surplus 0; the decimal point is '.', as in 0.01"
    return f"{problem} (1 % is written 0.01)" if "%" in text else problem


def _nearest_component(word: str, wanted: Wanted) -> str:
    names = {kind: [component.name for component in wanted[kind]] for kind in wanted}
    hint = nearest(word, [name for kind in names.values() for name in kind])
    if hint.startswith("did you mean"):
        return hint
    return "; ".join(f"{kind}: {', '.join(sorted(each))}" for kind, each in names.items())


def _required(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _owners(option: str) -> str:
    owners = [
        component.name
        for component in COMPONENTS.values()
        if option in {field.name for field in fields(component)}
    ]
    return f" ('{option}' is an option of {', '.join(owners)})" if owners else ""
