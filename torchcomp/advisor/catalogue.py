"""Catalogue: every name of a spec with one line, and the options of each.

Everything comes from the components: the first line of a docstring, its section "Attributes", and
the fields of the dataclass.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any

from torchcomp.advisor.units import wrapped
from torchcomp.aggregators import AGGREGATORS
from torchcomp.compressors import COMPRESSORS
from torchcomp.local_sgd.outer_steps import OUTER_STEPS
from torchcomp.local_sgd.schedules import SCHEDULES
from torchcomp.specs.auto import Auto
from torchcomp.specs.component import Component, choices_of
from torchcomp.specs.errors import SpecError
from torchcomp.specs.spec import COMPONENTS, Wanted, unknown_name

_GROUPS: Wanted = {
    "methods": AGGREGATORS,
    "choices": (Auto,),
    "compressors": COMPRESSORS,
    "schedules": SCHEDULES,
    "outer steps": OUTER_STEPS,
}
_PLACES = {
    "methods": "torchcomp.register(model, SPEC), and compress= of LocalSGD",
    "choices": "torchcomp.register(model, SPEC); as a schedule, it only proposes one",
    "compressors": "inside a method; alone, topk(0.01) means mean(topk(0.01))",
    "schedules": "torchcomp.LocalSGD(model, optimizer, SPEC, total_steps=...)",
    "outer steps": "outer= of LocalSGD",
}


def listed() -> str:
    """Return a table of all components, by kind, with an example and a summary of each."""
    blocks = []
    for kind, components in _GROUPS.items():
        lines = [f"{kind}: {_PLACES[kind]}"]
        lines += [
            wrapped(f"  {cls.example or cls.name:<38}  ", _summary(cls)) for cls in components
        ]
        blocks.append("\n".join(lines))
    blocks.append("Options of one: torchcomp methods NAME")
    return "\n\n".join(blocks)


def described(name: str) -> str:
    """Return the summary and the options of one component."""
    if name not in COMPONENTS:
        raise SpecError(unknown_name(name, _GROUPS))
    cls = COMPONENTS[name]
    lines = [cls.example or name, f"  {_summary(cls)}", ""]
    meanings = _meanings(cls)
    for option in fields(cls):
        lines += _described(option, meanings.get(option.name, ""))
    return "\n".join(lines if fields(cls) else [*lines, "It takes no options."])


def _described(option: Field[Any], meaning: str) -> Iterator[str]:
    default = option.default
    if default is MISSING and option.default_factory is not MISSING:
        default = option.default_factory()
    text = f"[{', '.join(map(str, default))}]" if isinstance(default, tuple) else default
    shown = {MISSING: "required", None: "optional"}.get(default, f"default: {text}")
    yield wrapped("  ", f"{option.name} ({shown})")
    if choices := choices_of(option):
        yield wrapped(" " * 6, f"one of {', '.join(choices)}")
    if meaning:
        yield wrapped(" " * 6, meaning)


def _summary(cls: type[Component]) -> str:
    line = (cls.__doc__ or "").partition("\n")[0]
    _, _, summary = line.rpartition("``: ")
    return summary.rstrip(".")


def _meanings(cls: type[Component]) -> dict[str, str]:
    """Return the text on each option, from its class or from the base that declares it."""
    found: dict[str, str] = {}
    for base in cls.__mro__:
        section = inspect.cleandoc(base.__doc__ or "").partition("\nAttributes:\n")[2]
        # An entry begins at four spaces, and its other lines at eight.
        for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
            plain = re.sub(r":\w+:(?=`)|`", "", text)  # without the marks of Sphinx
            found.setdefault(name, " ".join(plain.split()))
    return found
