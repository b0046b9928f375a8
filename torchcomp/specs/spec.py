"""Spec strings: parse a constructor expression such as ``"ef(topk(0.01))"``.

The walk over the tree of Python's ``ast`` accepts names, calls and literals. Nothing is evaluated.
"""

import ast
import difflib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from functools import partial
from itertools import zip_longest
from threading import Lock
from typing import Any

from torchcomp.aggregators import AGGREGATORS, Aggregator, Mean
from torchcomp.compressors import COMPRESSORS, Compressor
from torchcomp.local_sgd.outer_steps import OUTER_STEPS, OuterStep
from torchcomp.local_sgd.schedules import SCHEDULES, Schedule
from torchcomp.specs.auto import Auto
from torchcomp.specs.checks import shown
from torchcomp.specs.component import Component, choices_of, nearest
from torchcomp.specs.errors import SpecError

_ALL: tuple[type[Component], ...] = (*COMPRESSORS, *AGGREGATORS, Auto, *SCHEDULES, *OUTER_STEPS)
COMPONENTS: dict[str, type[Component]] = {component.name: component for component in _ALL}
_NUMBERS = {"nan": float("nan"), "inf": float("inf")}
_LONGEST = 1000
# CPython 3.11 has one recursion counter for ast.parse in all threads. Concurrent calls corrupt the
# counter and raise an error.
_PARSING = Lock()

Wanted = Mapping[str, tuple[type[Component], ...]]
"""The components accepted at one position, by plural name; errors suggest only these."""

_METHODS: Wanted = {"methods": (*AGGREGATORS, *COMPRESSORS)}
_COMPRESSORS: Wanted = {"compressors": COMPRESSORS}

_USES: Mapping[type[Component], tuple[Wanted, str, str, str]] = {
    Aggregator: (_METHODS, "a gradient method", "'ef(topk(0.01))'", "register(model, ...)"),
    Auto: ({"choices": (Auto,)}, "a choice of methods", "'auto'", "register(model, ...)"),
    Schedule: (
        {"schedules": SCHEDULES},
        "a schedule",
        "'every(4)' or 'qsr(alpha=0.0175, h_base=4)'",
        "LocalSGD(model, optimizer, ..., total_steps=...)",
    ),
    OuterStep: (
        {"outer steps": OUTER_STEPS},
        "an outer step",
        "'nesterov(lr=0.7, momentum=0.9)' or 'slowmo(beta=0.7)'",
        "LocalSGD(..., outer=...)",
    ),
}
"""By kind: what a spec may name; for errors, its name, an example, and the call that takes it."""


def _parse(kinds: Any, spec: str | Component) -> Any:
    wanted = {name: each for kind in kinds for name, each in _USES[kind][0].items()}
    built: object = _Parser(spec).build(wanted) if isinstance(spec, str) else spec
    if isinstance(built, Compressor):
        built = Mean(built)
    if isinstance(built, kinds):
        return built
    if not isinstance(built, Component):
        raise SpecError(f"a spec is a string such as {_USES[kinds[0]][2]}, not {shown(built)}")
    expected = " or ".join(f"{_USES[kind][1]} such as {_USES[kind][2]}" for kind in kinds)
    # Exactly one kind matches: compressors were wrapped above.
    _, found, _, call = next(use for kind, use in _USES.items() if isinstance(built, kind))
    raise SpecError(f"expected {expected}, but '{built}' is {found}: use it with torchcomp.{call}")


def parse(spec: str | Component) -> Aggregator | Schedule:
    """Build the component that a spec string describes.

    ``"ef(topk(0.01))"`` is an aggregator, ``"qsr(alpha=0.0175, h_base=4)"`` a schedule. A
    compressor, ``"topk(0.01)"``, means ``mean(topk(0.01))``. ``str()`` is the inverse.

    Args:
        spec: a spec string or a component.

    Raises:
        SpecError: if the spec is invalid. The message has a caret under the error and suggests
            the nearest known name.
    """
    built: Aggregator | Schedule = _parse((Aggregator, Schedule), spec)
    return built


# As `parse`, for other kinds. The candidates of ``auto`` are not parsed.
Spec = str | Component
parse_aggregator: Callable[[Spec], Aggregator] = partial(_parse, (Aggregator,))
parse_registered: Callable[[Spec], Aggregator | Auto] = partial(_parse, (Aggregator, Auto))
parse_any: Callable[[Spec], Aggregator | Schedule | Auto]
parse_any = partial(_parse, (Aggregator, Schedule, Auto))
parse_schedule: Callable[[Spec], Schedule] = partial(_parse, (Schedule,))
parse_outer_step: Callable[[Spec], OuterStep] = partial(_parse, (OuterStep,))


def parse_local(spec: str | Component) -> Schedule | Auto:
    """Parse a schedule, or ``auto`` without options: those are for gradients."""
    built: Schedule | Auto = _parse((Schedule, Auto), spec)
    if isinstance(built, Auto) and built != Auto():
        raise SpecError(f"'{spec}' has options for torchcomp.register; LocalSGD takes none", "spec")
    return built


def candidates(auto: Auto) -> tuple[Aggregator, ...]:
    """Return the methods that ``auto`` times, ``mean`` first; SpecError as `Auto.methods`."""
    return auto.methods([parse_aggregator(each) for each in auto.candidates])


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = " ".join(text.split())

    def build(self, wanted: Wanted) -> Any:
        if not self.text:
            raise SpecError(
                "cannot parse an empty spec: write, for example, 'mean' or 'ef(topk(0.01))'"
            )
        # A deeply nested text can exhaust the interpreter's stack.
        if len(self.text) > _LONGEST:
            raise SpecError(f"the spec has {len(self.text)} characters; the limit is {_LONGEST}")
        try:
            # Python warns of texts such as "1if" before it refuses them; the error says it all.
            with _PARSING, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(self.text, mode="eval")
            return self._value(tree.body, wanted)
        except SpecError:  # a ValueError that already has its message and caret
            raise
        # ast.parse raises ValueError for text that it cannot encode, such as a lone surrogate.
        # Deep nesting can end in RecursionError or MemoryError.
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            problem = getattr(error, "msg", None) or str(error)
            column = (getattr(error, "offset", None) or 1) - 1
            text = f"cannot parse the spec: {problem}; numbers are written as 0.01"
            raise self._error(text, column) from None

    def _value(self, node: ast.expr, wanted: Wanted) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in _NUMBERS:
                return _NUMBERS[name]
            case ast.Name():  # "mean" is short for "mean()"
                return self._component(node, ast.Call(node, [], []), wanted)
            case ast.Call():
                return self._component(node, node, wanted)
            case ast.UnaryOp(op=ast.USub()):  # Python has no negative literals
                value = self._value(node.operand, wanted)
                if isinstance(value, int | float):
                    return -value
        raise self._error("expected a name, a call as in topk(0.01), or a literal as in 0.01", node)

    def _component(self, node: ast.expr, call: ast.Call, wanted: Wanted) -> Component:
        name = call.func
        if not isinstance(name, ast.Name):
            raise self._error("expected the name of a method or schedule", name)
        if name.id not in COMPONENTS:
            raise self._error(unknown_name(name.id, wanted), name)
        cls = COMPONENTS[name.id]
        known = {field.name: field for field in fields(cls)}
        options = self._options(cls, list(known), call)
        values = {each: self._option(known[each], value) for each, value in options.items()}
        # A field with a default_factory has no `default`, but it is optional all the same.
        required = [f for f in known.values() if f.default is f.default_factory is MISSING]
        missing = " and ".join(repr(f.name) for f in required if f.name not in values)
        if missing:
            raise self._error(f"{cls.name} needs {missing}, as in {cls.example}", node)
        try:
            return cls(**values)
        except SpecError as error:
            # Point the caret at the option at fault if the error names one.
            raise self._error(str(error), options.get(error.field or "", node)) from None

    def _option(self, option: Field[Any], node: ast.expr) -> Any:
        # ``cast(bf16)`` needs no quotes: the name cannot be that of a component.
        if isinstance(node, ast.Name) and choices_of(option):
            return node.id
        if isinstance(node, ast.List) and isinstance(option.default, tuple):
            return [self._value(each, _METHODS) for each in node.elts]
        return self._value(node, _COMPRESSORS)

    def _options(
        self, cls: type[Component], known: list[str], call: ast.Call
    ) -> dict[str, ast.expr]:
        more = "one more value"
        given = [(name or more, each, each) for name, each in zip_longest(known, call.args) if each]
        given += [(each.arg or "**", each, each.value) for each in call.keywords]
        options: dict[str, ast.expr] = {}
        for name, at, value in given:
            if name not in known or name in options:
                hint = nearest(name, known) if known else "it takes no options"
                problem = "appears twice" if name in options else f"is no option; {hint}"
                raise self._error(f"{cls.name}: '{name}' {problem}", at)
            options[name] = value
        return options

    def _error(self, problem: str, at: ast.expr | ast.keyword | int) -> SpecError:
        # ast counts columns in UTF-8 bytes, a caret in characters.
        column = at if isinstance(at, int) else len(self.text.encode()[: at.col_offset].decode())
        return SpecError(f"{problem}\n  {self.text}\n  {' ' * column}^")


def unknown_name(word: str, wanted: Wanted) -> str:
    """Return the message for an unknown name: what is meant, or what is known."""
    known = {name: sorted(cls.name for cls in each) for name, each in wanted.items()}
    plain = {_plain(name): name for name in COMPONENTS}
    (close,) = difflib.get_close_matches(_plain(word), plain, n=1) or [""]
    if any(plain.get(close) in names for names in known.values()):
        return f"unknown name '{word}'; did you mean '{plain[close]}'?"
    listed = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in known.items())
    others = "names of papers and other libraries: docs/methods/README.md#other-names"
    return f"unknown name '{word}'; {listed}; {others}"


def _plain(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")
