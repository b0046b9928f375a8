"""Import a CUDA build of torchvision, as registries have it, with a CPU build of torch.

Its compiled operators do not load, and the import raises "operator torchvision::nms does not
exist". The Python parts (models, transforms, datasets) work once the operators are declared.
"""

import importlib
import sys
from types import ModuleType

import torch

_DECLARATIONS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
# A library object undeclares its operators when it is deleted.
_libraries: list[torch.library.Library] = []


def import_torchvision() -> ModuleType:
    """Return torchvision. Declare its missing operators if the plain import fails."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for declaration in _DECLARATIONS:
        library.define(declaration)  # type: ignore[no-untyped-call]
    _libraries.append(library)
    # Modules that were imported before the error would be reused, without their operators.
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    return importlib.import_module("torchvision")
