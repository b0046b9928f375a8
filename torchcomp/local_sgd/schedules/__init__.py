"""Schedules: after which local steps the ranks synchronise.

``SCHEDULES`` lists those that spec strings can name.
"""

from torchcomp.local_sgd.schedules.base import Horizon, Schedule, synchronisations
from torchcomp.local_sgd.schedules.rules import QSR, Every, PostLocal, Power, Swap

SCHEDULES: tuple[type[Schedule], ...] = (Every, QSR, Power, PostLocal, Swap)

__all__ = ["QSR", "SCHEDULES", "Every", "Horizon", "PostLocal", "Power"]
__all__ += ["Schedule", "Swap", "synchronisations"]
