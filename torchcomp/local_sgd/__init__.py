"""Local steps: every rank steps its own optimizer, and each round ends in an average."""

from torchcomp.local_sgd.local_sgd import LocalSGD
from torchcomp.outer_steps import Nesterov, OuterStep, SlowMo

__all__ = ["LocalSGD", "Nesterov", "OuterStep", "SlowMo"]
