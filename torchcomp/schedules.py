"""Schedules of local steps, by their public names: see :mod:`torchcomp.local_sgd.schedules`."""

from torchcomp.local_sgd.schedules import (
    QSR,
    SCHEDULES,
    Every,
    Horizon,
    PostLocal,
    Power,
    Schedule,
    Swap,
    synchronisations,
)

__all__ = ["QSR", "SCHEDULES", "Every", "Horizon", "PostLocal", "Power"]
__all__ += ["Schedule", "Swap", "synchronisations"]
