"""Guard: compare what is applied with the dense mean every few steps, and say what is wrong."""

from torchcomp.guard.observer import Guard, GuardObserver, watch
from torchcomp.guard.replicas import Replicas
from torchcomp.guard.report import Alarm, Compared, Report

__all__ = ["Alarm", "Compared", "Guard", "GuardObserver", "Replicas", "Report", "watch"]
