"""Options that are declared once: as the fields of a dataclass, with their limits and their help.

The command line's flags and a configuration file's keys are both read off the fields, so that
neither can know a name that the other does not.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

from recipes.errors import RecipeError, nearest

_Options = TypeVar("_Options")


def option(default: Any, text: str, **limits: Any) -> Any:
    """Declare a setting; ``limits`` are ``choices``, ``least``, ``above``, ``below``, ``most``."""
    return field(default=default, metadata={"help": text, **limits})


def read_options(cls: type[_Options], words: list[str]) -> _Options:
    """Resolve a command line and the configuration file that its ``--config`` names.

    Args:
        cls: a frozen dataclass whose fields are declared by :func:`option`.
        words: of the command line.

    Raises:
        RecipeError: of what is unknown, of another kind or out of its limits, by its name.
    """
    flags = _read_flags(cls, words)
    config = flags.pop("config", None)
    values = read_yaml(cls, Path(config)) if config is not None else {}
    kinds = _kinds(cls)
    values |= {name: convert(_flag(name), kinds[name], raw) for name, raw in flags.items()}
    return cls(**values)


def read_yaml(cls: type[Any], path: Path) -> dict[str, Any]:
    """Read a configuration file; every key must be an option.

    Raises:
        RecipeError: if it is no such file, naming it and the key.
    """
    if not path.is_file():
        raise RecipeError(f"no configuration file {path}: --config wants the path of a YAML file")
    try:
        raw = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise RecipeError(f"{path} holds no settings: expected lines of the form 'key: value'")
    kinds = _kinds(cls)
    for key in raw:
        if key not in kinds:
            hint = nearest(str(key), kinds)
            raise RecipeError(f"unknown key {key!r} in {path}; the nearest setting is {hint!r}")
    return {key: convert(f"{path}: {key}", kinds[key], value) for key, value in raw.items()}


def check_limits(options: Any) -> None:
    """Require every value to be within the limits of its declaration.

    Raises:
        RecipeError: naming the first that is not.
    """
    for spec in fields(options):
        _check_limits(spec.name, getattr(options, spec.name), spec.metadata)


def check_epochs(flag: str, epochs: Sequence[int], total: int) -> None:
    """Require epochs that rise and lie within a run of ``total``.

    Raises:
        RecipeError: naming the flag and both.
    """
    if list(epochs) != sorted(set(epochs)) or any(not 0 < epoch < total for epoch in epochs):
        raise RecipeError(
            f"{flag} must rise and lie between 1 and {total - 1} (--epochs {total}), found "
            f"{', '.join(map(str, epochs))}"
        )


def resolved(options: Any) -> dict[str, Any]:
    """Return plain values that a YAML or JSON file can hold."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(options).items()}


def convert(where: str, kind: Any, raw: Any) -> Any:
    """Turn a YAML value or a flag's text into a setting of ``kind``."""
    try:
        return _CONVERTERS[kind](raw)
    except (TypeError, ValueError):
        expected = _EXPECTED[kind]
        raise RecipeError(f"{where}: expected {expected}, found {raw!r}") from None


def _to_bool(raw: Any) -> bool:
    if not isinstance(raw, bool):
        raise TypeError
    return raw


def _to_int(raw: Any) -> int:
    if isinstance(raw, bool | float):
        raise TypeError
    return int(raw)


def _to_float(raw: Any) -> float:
    # YAML reads 1e-6 (no dot) as text, hence text is converted here as it is for flags.
    if isinstance(raw, bool) or not math.isfinite(float(raw)):
        raise TypeError
    return float(raw)


def _to_text(raw: Any) -> str:
    if not isinstance(raw, str):
        raise TypeError
    return raw


def _to_epochs(raw: Any) -> tuple[int, ...]:
    parts = [part for part in raw.split(",") if part.strip()] if isinstance(raw, str) else raw
    return tuple(_to_int(part) for part in parts)


_CONVERTERS: dict[Any, Any] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_text,
    tuple[int, ...]: _to_epochs,
}
_EXPECTED: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "text (quote it)",
    tuple[int, ...]: "a list of epochs such as 30,60,80",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RecipeError(message)


def _read_flags(cls: type[Any], words: list[str]) -> dict[str, Any]:
    flags, unknown = _parser(cls).parse_known_args(words)
    if unknown and not unknown[0].startswith("-"):
        raise RecipeError(
            f"{unknown[0]!r} is no flag; a configuration file is given as --config {unknown[0]}"
        )
    if unknown:
        known = ["--config", *map(_flag, _kinds(cls))]
        hint = nearest(unknown[0], known)
        raise RecipeError(f"unknown flag {unknown[0]!r}; the nearest flag is {hint}")
    return vars(flags)


def _parser(cls: type[Any]) -> _Parser:
    parser = _Parser(allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="YAML", help="read settings from this file first")
    for spec in fields(cls):
        text = f"{spec.metadata['help']} [{spec.default}]".replace("%", "%%")
        if spec.type is bool:
            action = argparse.BooleanOptionalAction
            parser.add_argument(_flag(spec.name), action=action, help=text)
        else:
            parser.add_argument(_flag(spec.name), metavar="VALUE", help=text)
    return parser


def _kinds(cls: type[Any]) -> dict[str, Any]:
    return {spec.name: spec.type for spec in fields(cls)}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_limits(name: str, value: Any, limits: Any) -> None:
    if "choices" in limits and value not in limits["choices"]:
        known = ", ".join(limits["choices"])
        hint = nearest(value, limits["choices"])
        raise RecipeError(f"{_flag(name)} {value!r} is not one of {known}; nearest: {hint}")
    if "least" in limits and value < limits["least"]:
        raise RecipeError(f"{_flag(name)} must be at least {limits['least']}, found {value}")
    if "above" in limits and value <= limits["above"]:
        raise RecipeError(f"{_flag(name)} must be above {limits['above']}, found {value}")
    if "most" in limits and value > limits["most"]:
        raise RecipeError(f"{_flag(name)} must be at most {limits['most']}, found {value}")
    if "below" in limits and value >= limits["below"]:
        raise RecipeError(f"{_flag(name)} must be below {limits['below']}, found {value}")
