"""Schedules, one rule per file. ``SCHEDULES`` lists those that spec strings can name."""

from torchcomp.schedules.base import Horizon, Schedule, synchronisations
from torchcomp.schedules.every import Every
from torchcomp.schedules.power import Power
from torchcomp.schedules.qsr import QSR
from torchcomp.schedules.two_phase import PostLocal, Swap

SCHEDULES: tuple[type[Schedule], ...] = (Every, QSR, Power, PostLocal, Swap)

__all__ = [
    "QSR",
    "SCHEDULES",
    "Every",
    "Horizon",
    "PostLocal",
    "Power",
    "Schedule",
    "Swap",
    "synchronisations",
]
