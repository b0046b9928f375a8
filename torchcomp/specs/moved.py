"""Moved: the old names of what other modules have now. They go with the next release."""

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

GONE = ("TimeModel", "WallClock", "fit_time_model")
NAMES = ("Link", *GONE)
MODULES = {
    "algorithms": "torchcomp.two_direction",
    "doctor": "torchcomp.advisor.doctor",
    "named_models": "torchcomp.advisor.named_models",
    "schedules": "torchcomp.local_sgd.schedules",
    "step_model": "torchcomp.advisor",
    "torchvision_compat": "torchcomp.advisor.torchvision_compat",
}
_RENAMED = {("torchcomp.two_direction", "parameters"): "theory"}
_BASELINES = {
    **dict.fromkeys(("AGD", "ConstantMomentumAGD", "FISTA"), "agd"),
    **{name: name.lower() for name in ("DIANA", "EF14", "EF21", "EF21P")},
    "EF21PDIANA": "ef21p_diana",
}
"""Name in torchcomp.algorithms -> file in recipes/two_direction/methods."""


class Moved(ModuleType):
    """A module under its old name: it has the names of the new one, with a DeprecationWarning."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the import system asks of a module
            raise AttributeError(name)
        if self.__name__ == "torchcomp.algorithms" and name in _BASELINES:
            # An ImportError: Python would replace the text of an AttributeError in an import.
            raise ImportError(
                f"{self.__name__}.{name} is not part of torchcomp any more: it is in "
                f"recipes/two_direction/methods/{_BASELINES[name]}.py of the repository"
            )
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
    name = _RENAMED.get((module, name), name)
    value = getattr(importlib.import_module(module), name)
    message = f"use {module}.{name}: its old name goes with the next release of torchcomp"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return value


# With them, `from torchcomp.step_model import record` works without a file of that name.
sys.modules |= {f"torchcomp.{name}": Moved(f"torchcomp.{name}") for name in MODULES}
