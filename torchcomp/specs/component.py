"""Component: a frozen dataclass that prints as the expression that builds it.

Compressors, aggregators and schedules are all components. ``str(component)`` is the inverse of
:func:`torchcomp.parse`.
"""

import difflib
import json
from collections.abc import Iterable
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, get_args

from torchcomp.specs.checks import check_choice, is_number, is_whole, shown
from torchcomp.specs.errors import SpecError


class Choices(tuple[str, ...]):
    """The only values of an option, as a part of its type: ``Annotated[str, Choices(...)]``.

    With ``str | None`` instead of ``str``, None is a value as well.
    """


def choices_of(option: Field[Any]) -> Choices | None:
    """Return the choices that the type of an option declares, or None."""
    found = getattr(option.type, "__metadata__", ())
    return next((each for each in found if isinstance(each, Choices)), None)


@dataclass(frozen=True)
class Component:
    """Base class of everything that a spec string can name.

    The first line of a subclass's docstring has the form "``example``: what it does". The section
    "Attributes" explains each option. ``python -m torchcomp methods`` prints both.

    Class attributes:
        name: the name in spec strings.
        kind: what the component is, for error messages ("compressor", "schedule", ...).
        positional: how many leading options are printed without their names.
        example: a spec that builds one, shown in lists and in errors about missing options.
    """

    name: ClassVar[str]
    kind: ClassVar[str]
    positional: ClassVar[int] = 1
    example: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for option in fields(self):
            choices, value = choices_of(option), getattr(self, option.name)
            # The first argument of Annotated is the type itself: `str` or `str | None`.
            if choices and not (value is None and isinstance(value, get_args(option.type)[0])):
                check_choice(option.name, value, choices, owner=self.name)

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
    if isinstance(value, tuple):  # of specs, which need no quotes
        return f"[{', '.join(map(str, value))}]"
    # repr() of a NumPy number is np.float64(0.25), which parse() would reject.
    if is_whole(value):
        return repr(int(value))
    if is_number(value):
        return repr(float(value))
    # json.dumps always writes double quotes; repr() picks the quotes by the text's content.
    return json.dumps(value) if isinstance(value, str) else repr(value)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint: the known word that is spelled most like `word`, or all if none is."""
    names = sorted(known)
    (close,) = difflib.get_close_matches(word.lower(), names, n=1) or [""]
    return f"did you mean '{close}'?" if close else f"known: {', '.join(names)}"


def check_kind(owner: Component, field: str, wanted: type[Component]) -> None:
    """Require that the value of `field` is a component of the `wanted` kind."""
    value = getattr(owner, field)
    if not isinstance(value, wanted):
        found = f"the {value.kind} '{value}'" if isinstance(value, Component) else shown(value)
        text = f"{owner.name} takes a {wanted.kind} such as topk(0.01), not {found}"
        raise SpecError(text, field)
