"""The old names of 2Direction, for one release; the methods that it is compared with have moved."""

import warnings
from typing import Any

from torchcomp import two_direction

_MOVED = {
    **{name: name for name in ("Ranks", "Simulated", "TwoDirection", "TwoDirectionMethod")},
    "parameters": "theory",
}
"""Old name -> name in torchcomp.two_direction."""

_BASELINES = {
    **dict.fromkeys(("AGD", "ConstantMomentumAGD", "FISTA"), "agd"),
    **{name: name.lower() for name in ("DIANA", "EF14", "EF21", "EF21P")},
    "EF21PDIANA": "ef21p_diana",
}
"""Old name -> file in recipes/two_direction/methods."""


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        new = _MOVED[name]
        warnings.warn(
            f"torchcomp.algorithms.{name} is now torchcomp.two_direction.{new}; the old name will "
            "be removed in the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(two_direction, new)
    if name in _BASELINES:
        # An ImportError: Python would replace the text of an AttributeError in `from ... import`.
        raise ImportError(
            f"torchcomp.algorithms.{name} is not part of torchcomp any more: it is in "
            f"recipes/two_direction/methods/{_BASELINES[name]}.py of the repository"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
