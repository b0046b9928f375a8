"""Layers: named groups of parameters that JointSpar keeps or drops together."""

from collections.abc import Iterable

from torch import nn

Layers = dict[str, tuple[str, ...]]
"""Maps the name of each layer to the names of its parameters, in the model's order."""


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
