"""Layers: named groups of parameters that JointSpar keeps or drops together."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchcomp.component import nearest
from torchcomp.ddp.checks import trained_parameters
from torchcomp.errors import SpecError

Layers = dict[str, tuple[str, ...]]
"""Maps the name of each layer to the names of its parameters, in the model's order."""

Patterns = Mapping[str, str | Sequence[str]]
"""Maps the name of each layer to shell-style patterns of parameter names: ``"blocks.0.*"``."""


def layers_of(model: DistributedDataParallel, patterns: Patterns | None) -> Layers:
    """Return the layers of a model, by `patterns` or by default: at least two.

    Raises:
        SpecError: as :func:`layers_by_pattern` and :func:`check_several`.
    """
    trained = trained_parameters(model)
    if patterns is None:
        layers = default_layers(trained)
    else:
        frozen = [name for name, p in model.module.named_parameters() if not p.requires_grad]
        layers = layers_by_pattern(patterns, [name for name, _ in trained], frozen)
    check_several(layers)
    return layers


def default_layers(parameters: Iterable[tuple[str, nn.Parameter]]) -> Layers:
    """Group parameters into one layer for each module with weights, with its bias and its norm.

    A module has weights if one of its own parameters has two dimensions or more. Any other module,
    such as a norm, joins the module with weights just before or just after it. Of the two it joins
    the one that shares more of its path, and the one before if both share as much. For example,
    ``bn1`` joins ``conv1``, and a transformer's ``blocks.3.norm1`` joins ``blocks.3.attn.qkv``.
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


def layers_by_pattern(
    patterns: Patterns, names: Sequence[str], frozen: Sequence[str] = ()
) -> Layers:
    """Group parameters into the layers that the user describes.

    Args:
        patterns: the patterns of each layer. Every trained parameter must match the patterns of
            exactly one layer.
        names: all trained parameters, in registration order.
        frozen: parameters with ``requires_grad=False``. A pattern must also match a trained one.

    Raises:
        SpecError: if a layer has no pattern, if a pattern matches no trained parameter, or if a
            parameter is in no layer or in several.
    """
    layers: Layers = {}
    for layer, entry in patterns.items() if isinstance(patterns, Mapping) else [(None, patterns)]:
        # A str is a sequence of one-letter patterns to the code below.
        listed = [entry] if isinstance(entry, str) else entry
        texts = isinstance(listed, Sequence) and all(isinstance(p, str) for p in (layer, *listed))
        if not (texts and listed):
            raise SpecError(
                "layers must map the name of each layer to a pattern of parameter names or to a "
                "non-empty list of patterns, such as {'stem': 'conv1.*', 'rest': ['layer*', "
                f"'fc.*']}}, not {layer!r} to {entry!r}",
                "layers",
            )
        for pattern in listed:
            _check_matches(str(layer), pattern, names, frozen)
        # fnmatchcase, because fnmatch ignores case on some systems.
        layers[str(layer)] = tuple(n for n in names if any(fnmatchcase(n, p) for p in listed))
    for name in names:
        # Of two layers, one could be kept and the other dropped in the same step.
        owners = [f"'{layer}'" for layer, members in layers.items() if name in members]
        if len(owners) != 1:
            found = f"{len(owners)} layers, {' and '.join(owners[:2])}" if owners else "no layer"
            raise SpecError(
                f"parameter '{name}' is in {found}, but every trained parameter must be in exactly "
                "one: change layers={...}, or freeze the parameter with requires_grad=False",
                "layers",
            )
    return layers


def check_several(layers: Layers) -> None:
    """Raise SpecError unless there are at least two layers."""
    if len(layers) < 2:
        named = f" ('{next(iter(layers))}')" if layers else ""
        raise SpecError(
            f"the model has {len(layers)} layer{named}, but JointSpar needs at least two: define "
            "smaller layers with layers={...}, or compress the gradient instead",
            "layers",
        )


def _layer_of(module: str, order: list[str], weighted: set[str]) -> str:
    """Return the module whose layer `module` belongs to: itself if it, or no module, has weights.

    `order` has the paths of all modules with parameters, and `weighted` those with weights.
    """
    if module in weighted:
        return module
    i = order.index(module)
    before = [other for other in order[:i] if other in weighted]
    after = [other for other in order[i:] if other in weighted]

    def shared(other: str) -> int:
        """Count the leading parts of its path that `other` shares with `module`."""
        # Part by part: as a text "layer1" is also the beginning of "layer10".
        same = [a == b for a, b in zip(module.split("."), other.split("."), strict=False)]
        return [*same, False].index(False)

    # max returns the first of equals: the module before, as norms follow their convolution.
    return max([*before[-1:], *after[:1]], key=shared, default=module)


def _check_matches(layer: str, pattern: str, names: Sequence[str], frozen: Sequence[str]) -> None:
    if any(fnmatchcase(name, pattern) for name in names):
        return
    why = f"matches no parameter; {nearest(pattern, names)}"
    if any(fnmatchcase(name, pattern) for name in frozen):
        why = "matches only frozen parameters: leave the pattern out"
    raise SpecError(f"layer '{layer}': the pattern '{pattern}' {why}", "layers")
