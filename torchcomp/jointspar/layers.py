"""Layers: the named groups of parameters that JointSpar keeps or drops together."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from torchcomp.component import nearest
from torchcomp.errors import SpecError

Layers = dict[str, tuple[str, ...]]
"""Name of each layer -> names of its parameters, in the model's order."""

Patterns = Mapping[str, str | Sequence[str]]
"""Name of each layer -> shell-style patterns of parameter names, such as ``"blocks.0.*"``."""


def default_layers(parameters: Iterable[tuple[str, nn.Parameter]]) -> Layers:
    """One layer for each module that has weights, with its bias and its norm.

    A module has weights if one of its own parameters has two dimensions or more. Any other module,
    such as a norm, joins the one before it or after it that shares more of its path; if both share
    as much, the one before. So ``bn1`` joins ``conv1``, and a transformer's ``blocks.3.norm1``
    joins ``blocks.3.attn.qkv``.
    """
    modules: dict[str, list[str]] = {}
    weighted: set[str] = set()
    for name, parameter in parameters:
        module = name.rpartition(".")[0]
        modules.setdefault(module, []).append(name)
        if parameter.dim() >= 2:
            weighted.add(module)
    layers: Layers = {}
    for module, names in modules.items():
        home = _home(module, list(modules), weighted) or "(model)"
        layers[home] = (*layers.get(home, ()), *names)
    return layers


def layers_by_pattern(
    patterns: Patterns, names: Sequence[str], frozen: Sequence[str] = ()
) -> Layers:
    """The layers that a user describes; every parameter in exactly one.

    `names` are all trained parameters, in registration order; a pattern may match `frozen` ones
    beside those.

    Raises:
        SpecError: if a layer has no pattern, a pattern matches no parameter that is trained, or a
            parameter is in no layer or in several.
    """
    if not isinstance(patterns, Mapping):
        raise SpecError(
            "layers must map the name of each layer to patterns of its parameters, such as "
            f"{{'stem': 'conv1.*', 'rest': ['layer*', 'fc.*']}}, not {type(patterns).__name__}",
            "layers",
        )
    layers: Layers = {}
    for layer, given in patterns.items():
        if not isinstance(layer, str):
            raise SpecError(f"layers: the name of a layer must be a text, not {layer!r}", "layers")
        listed = [given] if isinstance(given, str) else given
        known = isinstance(listed, Sequence) and all(isinstance(p, str) for p in listed)
        if not (known and listed):
            raise SpecError(
                f"layer '{layer}' must have a pattern of parameter names, or a list of at least "
                f"one, such as 'conv1.*', not {listed!r}",
                "layers",
            )
        for pattern in listed:
            _check_matches(layer, pattern, names, frozen)
        layers[layer] = tuple(n for n in names if any(fnmatchcase(n, p) for p in listed))
    for name in names:
        owners = [f"'{layer}'" for layer, members in layers.items() if name in members]
        if len(owners) != 1:
            found = f"{len(owners)} layers, {' and '.join(owners[:2])}" if owners else "no layer"
            raise SpecError(
                f"parameter '{name}' is in {found}: every parameter that is trained belongs to "
                "exactly one; freeze it with requires_grad=False to leave it out"
            )
    return layers


def check_several(layers: Layers) -> None:
    """Require at least two layers, or raise SpecError."""
    if len(layers) < 2:
        named = f" ('{next(iter(layers))}')" if layers else ""
        raise SpecError(
            f"the model has {len(layers)} layer{named}, and choosing layers needs at least two: "
            "describe finer ones with layers={...}, or compress its gradient instead"
        )


def _home(module: str, order: list[str], weighted: set[str]) -> str:
    """The module with weights that one without them joins; itself if there is none."""
    if module in weighted:
        return module
    at = order.index(module)
    before = [other for other in order[:at] if other in weighted]
    after = [other for other in order[at:] if other in weighted]

    def shared(other: str) -> int:
        """How many leading parts of its path it has in common with `module`."""
        same = [a == b for a, b in zip(module.split("."), other.split("."), strict=False)]
        return [*same, False].index(False)

    # Of equals, the first.
    return max([*before[-1:], *after[:1]], key=shared, default=module)


def _check_matches(layer: str, pattern: str, names: Sequence[str], frozen: Sequence[str]) -> None:
    if any(fnmatchcase(name, pattern) for name in names):
        return
    if still := [name for name in frozen if fnmatchcase(name, pattern)]:
        why = f"matches only parameters that are not trained, such as '{still[0]}': leave it out"
    else:
        why = f"matches no parameter; {nearest(pattern, names)}"
    raise SpecError(f"layer '{layer}': the pattern '{pattern}' {why}", "layers")
