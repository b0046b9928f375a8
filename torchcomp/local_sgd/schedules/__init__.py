"""Schedules, one rule per file. ``SCHEDULES`` lists those that spec strings can name."""

from torchcomp.local_sgd.schedules.base import Horizon, Schedule, synchronisations
from torchcomp.local_sgd.schedules.every import Every
from torchcomp.local_sgd.schedules.growing import QSR, Power
from torchcomp.local_sgd.schedules.two_phase import PostLocal, Swap

SCHEDULES: tuple[type[Schedule], ...] = (Every, QSR, Power, PostLocal, Swap)

__all__ = ["QSR", "SCHEDULES", "Every", "Horizon", "PostLocal", "Power"]
__all__ += ["Schedule", "Swap", "synchronisations"]
