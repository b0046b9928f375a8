"""Models of torchvision and timm by name, as shapes without weights."""

import difflib
import importlib
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from torchcomp.advisor.torchvision_compat import import_torchvision
from torchcomp.specs.errors import SpecError


def build_named(name: str) -> nn.Module:
    """Build "torchvision/NAME" or "timm/NAME" on the meta device: shapes, but no values."""
    library, _, architecture = name.partition("/")
    if library not in _BUILDERS or not architecture:
        raise SpecError(
            f"unknown model '{name}': expected torchvision/NAME or timm/NAME, such as "
            "torchvision/resnet50"
        )
    hook = register_module_parameter_registration_hook(_hook())
    try:
        return _BUILDERS[library](architecture)
    finally:
        hook.remove()


def _hook() -> Any:
    # A parameter that has two names must stay one. Weak keys: the values can be freed.
    made = WeakIdKeyDictionary()

    # One by one, and not `with torch.device("meta")`: some constructors compute with other tensors.
    def without_values(module: nn.Module, name: str, parameter: Tensor | None) -> Tensor | None:
        if parameter is None or parameter.is_meta:
            return None
        if parameter not in made:
            made[parameter] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        shape_only: nn.Parameter = made[parameter]
        return shape_only

    return without_values


def _torchvision(architecture: str) -> nn.Module:
    models: Any = _library("torchvision").models
    _check_known("torchvision", architecture, models.list_models(module=models))
    return models.get_model(architecture, weights=None)  # type: ignore[no-any-return]


def _timm(architecture: str) -> nn.Module:
    timm: Any = _library("timm")
    _check_known("timm", architecture, timm.list_models())
    return timm.create_model(architecture, pretrained=False)  # type: ignore[no-any-return]


_BUILDERS = {"torchvision": _torchvision, "timm": _timm}


def _library(name: str) -> ModuleType:
    try:
        import_torchvision()  # timm imports it as well
        return importlib.import_module(name)
    # A build of torchvision for another torch raises RuntimeError or OSError.
    except (ImportError, RuntimeError, OSError) as error:
        raise SpecError(
            f"{name} cannot be imported ({error}): 'pip install {name}', in the build that goes "
            "with your torch, or pass --numel"
        ) from None


def _check_known(library: str, architecture: str, known: list[str]) -> None:
    if architecture not in known:
        close = difflib.get_close_matches(architecture.lower(), known, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"it has {len(known)} others"
        raise SpecError(f"{library} has no model '{architecture}'; {hint}")
