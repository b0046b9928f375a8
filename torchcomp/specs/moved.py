"""Moved: old names of what :mod:`torchcomp.advisor` has now. They go with the next release."""

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

GONE = ("TimeModel", "WallClock", "fit_time_model")
NAMES = ("Link", *GONE)
MODULES = {
    "doctor": "torchcomp.advisor.doctor",
    "named_models": "torchcomp.advisor.named_models",
    "step_model": "torchcomp.advisor",
    "torchvision_compat": "torchcomp.advisor.torchvision_compat",
}


class Moved(ModuleType):
    """A module under its old name: it has the names of the new one, with a DeprecationWarning."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the import system asks of a module
            raise AttributeError(name)
        return found(name, MODULES[self.__name__.rpartition(".")[2]])


def found(name: str, module: str = "torchcomp.advisor") -> Any:
    """Return a name from its new module, with a DeprecationWarning.

    Raises:
        AttributeError: if there is no such name.
    """
    if name in GONE:
        raise AttributeError(
            f"torchcomp.{name} is gone: torchcomp.advisor.plan(spec, run, link, ...) predicts the "
            "hours of a run, also with local steps"
        )
    value = getattr(importlib.import_module(module), name)
    message = f"use {module}.{name}: its old name goes with the next release of torchcomp"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return value


# With them, `from torchcomp.step_model import record` works without a file of that name.
sys.modules |= {f"torchcomp.{name}": Moved(f"torchcomp.{name}") for name in MODULES}
