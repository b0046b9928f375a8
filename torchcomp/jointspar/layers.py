"""Layers: named groups of parameters that JointSpar keeps or drops together."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from torchcomp.specs.component import nearest
from torchcomp.specs.errors import SpecError

Layers = dict[str, tuple[str, ...]]
"""Maps the name of each layer to the names of its parameters, in the model's order."""

Patterns = Mapping[str, str | Sequence[str]]
"""Maps the name of each layer to shell-style patterns of parameter names: ``"blocks.0.*"``."""


def layers_of(trained: Mapping[str, nn.Parameter], patterns: Patterns | None) -> Layers:
    """Group the trained parameters by the user's patterns, or by default."""
    layers = default_layers(trained.items())
    if patterns is not None:
        layers = layers_by_pattern(patterns, list(trained))
    if len(layers) < 2:
        raise SpecError(
            f"JointSpar needs two layers or more, not {list(layers)}: define smaller ones with "
            "layers={...}, or compress the gradient instead",
            "layers",
        )
    return layers


def default_layers(parameters: Iterable[tuple[str, nn.Parameter]]) -> Layers:
    """Group parameters into one layer for each module with weights, with its bias and its norm.

    A module has weights if one of its own parameters has two dimensions or more. Any other joins
    the one with weights just before or after it that shares more of its path, or else the one
    before: ``bn1`` joins ``conv1``, ``blocks.3.norm1`` joins ``blocks.3.attn.qkv``.
    """
    # named_parameters() lists a shared parameter once, so it belongs to its first module's layer.
    modules: dict[str, list[str]] = {}
    weighted: set[str] = set()
    for name, parameter in parameters:
        module = name.rpartition(".")[0]
        modules.setdefault(module, []).append(name)
        if parameter.dim() >= 2:
            weighted.add(module)
    layers: Layers = {}
    for module, names in modules.items():
        # Parameters of the model itself, such as a class token, have the empty path.
        layer = _layer_of(module, list(modules), weighted) or "(model)"
        layers[layer] = (*layers.get(layer, ()), *names)
    return layers


def _layer_of(module: str, order: list[str], weighted: set[str]) -> str:
    if module in weighted:
        return module
    i = order.index(module)
    before = [other for other in order[:i] if other in weighted]
    after = [other for other in order[i:] if other in weighted]

    def shared(other: str) -> int:
        # Leading parts of the path. As a text, "layer1" is also the beginning of "layer10".
        same = [a == b for a, b in zip(module.split("."), other.split("."), strict=False)]
        return [*same, False].index(False)

    # max returns the first of equals: the module before, as norms follow their convolution.
    return max([*before[-1:], *after[:1]], key=shared, default=module)


def layers_by_pattern(patterns: Patterns, names: Sequence[str]) -> Layers:
    """Group the trained parameters, in `names`, by the first layer that has a pattern for each."""
    layers: Layers = {}
    left = list(names)
    for layer, entry in patterns.items() if isinstance(patterns, Mapping) else [(None, patterns)]:
        # A str is a sequence of one-letter patterns to the code below.
        listed = [entry] if isinstance(entry, str) else entry
        if not (isinstance(listed, Sequence) and all(isinstance(p, str) for p in (layer, *listed))):
            raise SpecError(
                "layers must map names of layers to patterns of parameter names, such as "
                f"{{'stem': 'conv1.*', 'rest': ['layer*', 'fc.*']}}, not {layer!r} to {entry!r}",
                "layers",
            )
        for pattern in listed:
            # fnmatchcase, because fnmatch ignores case on some systems.
            if not any(fnmatchcase(name, pattern) for name in names):
                hint = nearest(pattern, names)
                raise SpecError(
                    f"layer '{layer}': '{pattern}' matches no trained parameter; {hint}", "layers"
                )
        members = [n for n in left if any(fnmatchcase(n, pattern) for pattern in listed)]
        layers[str(layer)] = tuple(members)
        left = [name for name in left if name not in members]
    unused = [f"layer '{layer}' has no parameter" for layer in layers if not layers[layer]]
    unused += [f"parameter '{name}' is in no layer" for name in left]
    if unused:
        raise SpecError(f"{unused[0]}: change the patterns in layers={{...}}", "layers")
    return layers
