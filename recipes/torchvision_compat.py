"""Import torchvision beside a torch that its compiled operators were not built for.

The registry's torchvision is built for CUDA. Beside a CPU build of torch its compiled operators do
not load, and the import stops at the first of them that torchvision describes to the compiler.
The recipes need the Python parts alone (models, datasets), which work once the names exist.
"""

import importlib
import sys
from types import ModuleType

import torch

_DECLARATIONS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
# Operators stay declared for as long as the library object lives.
_libraries: list[torch.library.Library] = []


def import_torchvision() -> ModuleType:
    """Return torchvision, declaring its missing operators if the plain import fails for them."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    _declare_operators()
    _forget_partial_import()
    return importlib.import_module("torchvision")


def _declare_operators() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for declaration in _DECLARATIONS:
        library.define(declaration)
    _libraries.append(library)


def _forget_partial_import() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
