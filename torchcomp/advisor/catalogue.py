"""Catalogue: every name of a spec with one line, and the options of each, from the docstrings."""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from torchcomp.advisor.units import wrapped
from torchcomp.aggregators import AGGREGATORS
from torchcomp.compressors import COMPRESSORS
from torchcomp.local_sgd.outer_steps import OUTER_STEPS
from torchcomp.local_sgd.schedules import SCHEDULES
from torchcomp.specs.auto import Auto
from torchcomp.specs.component import Component, choices_of
from torchcomp.specs.errors import SpecError
from torchcomp.specs.spec import COMPONENTS, unknown_name

_GROUPS: Mapping[str, Sequence[type[Component]]] = {
    "methods: torchcomp.register(model, SPEC), and compress= of LocalSGD": AGGREGATORS,
    "choices: torchcomp.register(model, SPEC); as a schedule, it only proposes one": (Auto,),
    "compressors: inside a method; alone, topk(0.01) means mean(topk(0.01))": COMPRESSORS,
    "schedules: torchcomp.LocalSGD(model, optimizer, SPEC, total_steps=...)": SCHEDULES,
    "outer steps: outer= of LocalSGD": OUTER_STEPS,
}


def listed() -> str:
    """Return a table of all components, by kind, with an example and a summary of each."""
    blocks = []
    for title, components in _GROUPS.items():
        lines = [wrapped(f"  {cls.example or cls.name:<38}  ", _summary(cls)) for cls in components]
        blocks.append("\n".join([title, *lines]))
    return "\n\n".join([*blocks, "Options of one: torchcomp methods NAME"])


def described(name: str) -> str:
    """Return the summary and the options of one component."""
    if name not in COMPONENTS:
        raise SpecError(unknown_name(name, {"names": tuple(COMPONENTS.values())}))
    cls = COMPONENTS[name]
    lines = [cls.example or name, f"  {_summary(cls)}", ""]
    meanings = _meanings(cls)
    for option in fields(cls):
        default: Any = option.default
        if isinstance(default, tuple):
            default = f"[{', '.join(map(str, default))}]"
        shown = {MISSING: "required", None: "optional"}.get(default, f"default: {default}")
        lines.append(wrapped("  ", f"{option.name} ({shown})"))
        if choices := choices_of(option):
            lines.append(wrapped(" " * 6, f"one of {', '.join(choices)}"))
        lines.append(wrapped(" " * 6, meanings[option.name]))
    return "\n".join(lines if fields(cls) else [*lines, "It takes no options."])


def _summary(cls: type[Component]) -> str:
    return (cls.__doc__ or "").partition("\n")[0].rpartition("``: ")[2].rstrip(".")


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
