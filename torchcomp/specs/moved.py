"""Moved: the old names of what other modules have now. They go with the next release."""

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

NAMES = ("Link",)
MODULES = {
    "algorithms": "torchcomp.two_direction",
    "doctor": "torchcomp.advisor.doctor",
    "named_models": "torchcomp.advisor.named_models",
    "schedules": "torchcomp.local_sgd.schedules",
    "step_model": "torchcomp.advisor",
    "torchvision_compat": "torchcomp.advisor.torchvision_compat",
}
_RENAMED = {"parameters": "theory"}  # of 2Direction


class Moved(ModuleType):
    """A module under its old name: it has the names of the new one, with a DeprecationWarning."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the import system asks of a module
            raise AttributeError(name)
        return found(name, MODULES[self.__name__.rpartition(".")[2]])


def found(name: str, module: str = "torchcomp.advisor") -> Any:
    """Return a name from its new module, with a DeprecationWarning."""
    name = _RENAMED.get(name, name)
    value = getattr(importlib.import_module(module), name)
    message = f"use {module}.{name}: its old name goes with the next release of torchcomp"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return value


# With them, `from torchcomp.step_model import record` works without a file of that name.
sys.modules |= {f"torchcomp.{name}": Moved(f"torchcomp.{name}") for name in MODULES}
