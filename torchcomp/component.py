"""Component: a frozen dataclass that prints as the expression that builds it.

Compressors, aggregators and schedules are all components. ``str(component)`` is the inverse of
:func:`torchcomp.parse`, and the checks below give every component the same wording of errors.
"""

import difflib
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torchcomp.errors import SpecError


@dataclass(frozen=True)
class Component:
    """Base of everything that a spec string can name.

    Class attributes:
        name: the name in spec strings.
        kind: what the component is, for error messages ("compressor", "schedule", ...).
        positional: how many leading options are printed without their name.
        example: a spec that builds one, for errors about missing options.
    """

    name: ClassVar[str]
    kind: ClassVar[str]
    positional: ClassVar[int] = 1
    example: ClassVar[str] = ""

    def __str__(self) -> str:
        arguments = []
        in_order = True
        for place, field in enumerate(fields(self)):
            value = getattr(self, field.name)
            if value == field.default:
                in_order = False
                continue
            bare = in_order and place < self.positional
            arguments.append(_literal(value) if bare else f"{field.name}={_literal(value)}")
        return f"{self.name}({', '.join(arguments)})" if arguments else self.name


def _literal(value: Any) -> str:
    if isinstance(value, Component):
        return str(value)
    if isinstance(value, float):
        # NumPy's floats are floats, too, but do not print as literals.
        return repr(float(value))
    return json.dumps(value) if isinstance(value, str) else repr(value)


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint: the known word most like `word`, or all known words where none is alike."""
    names = sorted(known)
    close = difflib.get_close_matches(word.lower(), names, n=1)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"known: {', '.join(names)}" if names else "it takes no options"


def check_choice(owner: Component, field: str, choices: Iterable[str]) -> None:
    """Require that a text option is one of `choices`.

    Raises:
        SpecError: naming the option, its value and the nearest choice.
    """
    value = getattr(owner, field)
    known = sorted(choices)
    if value not in known:
        listed = ", ".join(f'"{choice}"' for choice in known)
        raise SpecError(f"{owner.name}: {field} must be one of {listed}, not {value!r}", field)


def check_count(owner: Component, field: str, least: int = 1) -> None:
    """Require that an option is a whole number of at least `least`.

    Raises:
        SpecError: naming the option and its value.
    """
    value = getattr(owner, field)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(
            f"{owner.name}: {field} must be a whole number of at least {least}, not {value!r}",
            field,
        )


def check_positive(owner: Component, field: str) -> None:
    """Require that an option is a finite number above zero.

    Raises:
        SpecError: naming the option and its value.
    """
    value = getattr(owner, field)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= sys.float_info.max:
        raise SpecError(
            f"{owner.name}: {field} must be a finite number above 0, not {value!r}", field
        )


def check_flag(owner: Component, field: str) -> None:
    """Require that an option is True or False.

    Raises:
        SpecError: naming the option and its value.
    """
    value = getattr(owner, field)
    if not isinstance(value, bool):
        raise SpecError(f"{owner.name}: {field} must be True or False, not {value!r}", field)


def check_kind(owner: Component, field: str, wanted: type[Component]) -> None:
    """Require that an option is itself a component of the `wanted` kind.

    Raises:
        SpecError: saying what was given instead.
    """
    value = getattr(owner, field)
    if not isinstance(value, wanted):
        given = f"the {value.kind} '{value}'" if isinstance(value, Component) else repr(value)
        raise SpecError(
            f"{owner.name} takes a {wanted.kind} such as topk(0.01), not {given}", field
        )
