"""Local steps: rounds of optimizer steps, each rank on its own, that end in an average."""

from torchcomp.local_sgd.local_sgd import LocalSGD
from torchcomp.outer_steps import Nesterov, OuterStep, SlowMo

__all__ = ["LocalSGD", "Nesterov", "OuterStep", "SlowMo"]
