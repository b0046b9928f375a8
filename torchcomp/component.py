"""Component: a frozen dataclass that prints as the expression that builds it.

Compressors, aggregators and schedules are all components. ``str(component)`` is the inverse of
:func:`torchcomp.parse`.
"""

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torchcomp.checks import is_number, is_whole
from torchcomp.errors import SpecError


@dataclass(frozen=True)
class Component:
    """Base class of everything that a spec string can name.

    Class attributes:
        name: the name in spec strings.
        kind: what the component is, for error messages ("compressor", "schedule", ...).
        positional: how many leading options are printed without their names.
        example: a spec that builds one, shown in errors about missing options.
    """

    name: ClassVar[str]
    kind: ClassVar[str]
    positional: ClassVar[int] = 1
    example: ClassVar[str] = ""

    def __str__(self) -> str:
        arguments: list[str] = []
        for index, field in enumerate(fields(self)):
            value = getattr(self, field.name)
            # Leave out options with their default value: equal components print the same text.
            if value != field.default:
                # Once an option was left out, later ones need their names, as in a Python call.
                bare = index == len(arguments) < self.positional
                arguments.append(_literal(value) if bare else f"{field.name}={_literal(value)}")
        return f"{self.name}({', '.join(arguments)})" if arguments else self.name


def _literal(value: Any) -> str:
    if isinstance(value, Component):
        return str(value)
    # repr() of a NumPy number is np.float64(0.25), which parse() would reject.
    if is_whole(value):
        return repr(int(value))
    if is_number(value):
        return repr(float(value))
    # json.dumps always writes double quotes; repr() picks the quotes by the text's content.
    return json.dumps(value) if isinstance(value, str) else repr(value)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint: the known word closest to `word`, or a list of all if none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(word.lower(), names, n=1)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"known: {', '.join(names)}" if names else "it takes no options"


def check_kind(owner: Component, field: str, wanted: type[Component]) -> None:
    """Require that the value of `field` is a component of the `wanted` kind."""
    value = getattr(owner, field)
    if not isinstance(value, wanted):
        found = f"the {value.kind} '{value}'" if isinstance(value, Component) else repr(value)
        raise SpecError(
            f"{owner.name} takes a {wanted.kind} such as topk(0.01), not {found}", field
        )
