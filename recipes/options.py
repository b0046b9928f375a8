"""Settings as the fields of a dataclass, which are both flags and keys of a YAML file.

A field is declared once, by :func:`option`, with its default, limits and help text. The command
line and the configuration file are both derived from the fields, so they cannot differ.
"""

import argparse
import math
import operator
import os
from collections.abc import Sequence
from dataclasses import asdict, field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

from recipes.errors import RecipeError, nearest

_Options = TypeVar("_Options")

# The key of a configuration file that names another file to begin from. It is not a setting.
_BASE = "base"


def option(default: Any, text: str, **limits: Any) -> Any:
    """Declare a setting, with limits: ``choices``, ``min``, ``max``, ``above`` or ``below``."""
    return field(default=default, metadata={"help": text, **limits})


def read_options(cls: type[_Options], argv: list[str]) -> _Options:
    """Read the file named by ``--config``, then the other flags, which override it."""
    flags = _read_flags(cls, argv)
    config = flags.pop("config", None)
    values = read_yaml(cls, Path(config)) if config is not None else {}
    types = _types(cls)
    values |= {name: convert(_flag(name), types[name], raw) for name, raw in flags.items()}
    return cls(**values)


def read_yaml(cls: type[Any], path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a configuration file and the file that its key ``base`` names, relative to it.

    A file overrides its base. ``above`` has the files that are based on this one.
    """
    raw, types = _load_yaml(path), _types(cls)
    base = raw.pop(_BASE, None)
    for key in raw:
        if key not in types:
            hint = nearest(str(key), [*types, _BASE])
            raise RecipeError(f"unknown key {key!r} in {path}; did you mean {hint!r}?")
    own = {key: convert(f"{path}: {key}", types[key], value) for key, value in raw.items()}
    if base is None:
        return own
    below = path.parent / convert(f"{path}: {_BASE}", str, base)
    chain = (*above, path.resolve())
    if below.resolve() in chain or not below.is_file():
        raise RecipeError(f"{path}: {_BASE}: {base}: expected another YAML file, which exists")
    return read_yaml(cls, below, chain) | own


def _load_yaml(path: Path) -> dict[Any, Any]:
    if not path.is_file():
        raise RecipeError(f"--config {path}: there is no such file; expected a YAML file")
    try:
        raw = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        # The parser's message has several lines.
        raise RecipeError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise RecipeError(f"--config {path} has no settings: expected lines such as 'key: value'")
    return raw


_LIMITS = {
    "min": (operator.ge, "at least"),
    "above": (operator.gt, "above"),
    "max": (operator.le, "at most"),
    "below": (operator.lt, "below"),
}


def check_limits(options: Any) -> None:
    """Raise RecipeError if a value is outside the limits of its declaration."""
    for spec in fields(options):
        flag, value, limits = _flag(spec.name), getattr(options, spec.name), spec.metadata
        choices = limits.get("choices", (value,))
        if value not in choices:
            raise RecipeError(
                f"{flag} {value!r} is not one of {', '.join(choices)}; did you mean "
                f"{nearest(value, choices)}?"
            )
        for name, (holds, words) in _LIMITS.items():
            if name in limits and not holds(value, limits[name]):
                raise RecipeError(f"{flag} must be {words} {limits[name]}, found {value}")


def check_epochs(flag: str, epochs: Sequence[int], total: int) -> None:
    """Raise RecipeError unless ``epochs`` are increasing and inside a run of ``total`` epochs."""
    if list(epochs) != sorted(set(epochs)) or any(not 0 < epoch < total for epoch in epochs):
        raise RecipeError(
            f"{flag} {','.join(map(str, epochs))}: expected increasing epochs between 1 and "
            f"{total - 1}, because of --epochs {total}"
        )


def as_plain_dict(options: Any) -> dict[str, Any]:
    """Return the values in types that YAML and JSON can represent."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(options).items()}


def convert(where: str, kind: Any, raw: Any) -> Any:
    """Convert a YAML value or the text of a flag; an error begins with ``where``."""
    read, expected = _CONVERTERS[kind]
    try:
        return read(raw)
    except (TypeError, ValueError):
        raise RecipeError(f"{where}: expected {expected}, found {raw!r}") from None


def _exactly(kind: type) -> Any:
    # bool("false") is True, and str(False) would hide that YAML reads `no` and `off` as booleans.

    def read(raw: Any) -> Any:
        if not isinstance(raw, kind):
            raise TypeError
        return raw

    return read


def _to_int(raw: Any) -> int:
    # int() would accept True, and truncate 2.5.
    if isinstance(raw, bool | float):
        raise TypeError
    return int(raw)


def _to_float(raw: Any) -> float:
    # A string is not an error: YAML reads 1e-6, without a dot, as a string.
    if isinstance(raw, bool) or not math.isfinite(float(raw)):
        raise TypeError
    return float(raw)


def _to_epochs(raw: Any) -> tuple[int, ...]:
    parts = [part for part in raw.split(",") if part.strip()] if isinstance(raw, str) else raw
    return tuple(_to_int(part) for part in parts)


_CONVERTERS: dict[Any, tuple[Any, str]] = {
    bool: (_exactly(bool), "true or false"),
    int: (_to_int, "an integer"),
    float: (_to_float, "a finite number"),
    str: (_exactly(str), "text (quote it)"),
    tuple[int, ...]: (_to_epochs, "a list of epochs such as 30,60,80"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse would print the usage, a page of flags, and exit.
        raise RecipeError(message)

    def print_help(self, file: Any = None) -> None:
        # Under torchrun, every rank would print it.
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)


def _read_flags(cls: type[Any], argv: list[str]) -> dict[str, Any]:
    flags, unknown = _parser(cls).parse_known_args(argv)
    if unknown and not unknown[0].startswith("-"):
        raise RecipeError(
            f"unexpected argument {unknown[0]!r}: all arguments are flags; pass a configuration "
            f"file as --config {unknown[0]}"
        )
    if unknown:
        hint = nearest(unknown[0], ["--config", *map(_flag, _types(cls))])
        raise RecipeError(f"unknown flag {unknown[0]!r}; did you mean {hint}?")
    return vars(flags)


def _parser(cls: type[Any]) -> _Parser:
    # SUPPRESS leaves out flags that are not on the command line: they must not override the file.
    parser = _Parser(allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="YAML", help="read settings from this file first")
    for spec in fields(cls):
        # argparse formats help texts with %.
        text = f"{spec.metadata['help']} [{spec.default}]".replace("%", "%%")
        # The metavar lists the choices; `check_limits` checks them, in files and flags.
        choices = spec.metadata.get("choices")
        how: dict[str, Any] = {"metavar": "{" + ",".join(choices) + "}" if choices else "VALUE"}
        if spec.type is bool:
            how = {"action": argparse.BooleanOptionalAction}
        parser.add_argument(_flag(spec.name), help=text, **how)
    return parser


def _types(cls: type[Any]) -> dict[str, Any]:
    return {spec.name: spec.type for spec in fields(cls)}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
