"""Auto: time several methods in the first steps of a training run, and go on with the best."""

from torchcomp.auto.choice import Choice, chosen
from torchcomp.auto.marks import Mark, mark, seconds_between
from torchcomp.auto.options import MEAN, Auto
from torchcomp.auto.pace import Pace
from torchcomp.auto.trial import Timed, Trial

__all__ = [
    "MEAN",
    "Auto",
    "Choice",
    "Mark",
    "Pace",
    "Timed",
    "Trial",
    "chosen",
    "mark",
    "seconds_between",
]
