"""Local steps: every rank steps its own optimizer, and each round ends in an average."""

from typing import TYPE_CHECKING, Any

from torchcomp.local_sgd.outer_steps import Nesterov, OuterStep, SlowMo

if TYPE_CHECKING:
    from torchcomp.local_sgd.local_sgd import LocalSGD

__all__ = ["LocalSGD", "Nesterov", "OuterStep", "SlowMo"]


def __getattr__(name: str) -> Any:
    # Not above: LocalSGD parses specs, which contain the schedules and outer steps of this package.
    if name == "LocalSGD":
        from torchcomp.local_sgd.local_sgd import LocalSGD

        return LocalSGD
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
