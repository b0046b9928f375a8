"""Local steps: every rank steps its own optimizer, and each round ends in an average."""

from torchcomp.local_sgd.outer_steps import Nesterov, OuterStep, SlowMo

__all__ = ["Nesterov", "OuterStep", "SlowMo"]
