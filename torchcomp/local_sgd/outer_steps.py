"""Outer steps: update the shared parameters x with the mean pseudo-gradient m of a round.

A plain average is x + m. An outer step uses -m as the gradient of an outer optimizer, whose
momentum u starts at 0.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from torchcomp.specs.checks import check_momentum, check_positive
from torchcomp.specs.component import Component


@dataclass(frozen=True)
class OuterStep(Component):
    """From the parameters of one round to those of the next."""

    kind: ClassVar[str] = "outer step"
    positional: ClassVar[int] = 0
    reads_lr: ClassVar[bool] = False  # whether it depends on the learning rate of the local steps

    @abstractmethod
    def apply(self, x: Tensor, m: Tensor, u: Tensor, lr: float) -> None:
        """Update `x` and `u`, 1-D, in place for the next round. `m` is overwritten.

        `lr` is the mean learning rate of the round's local steps.
        """


@dataclass(frozen=True)
class SlowMo(OuterStep):
    """``slowmo(beta=0.7)``: slow momentum over rounds.

    Algorithm 1 of Wang, Tantia, Ballas and Rabbat, "SlowMo", ICLR 2020 (arXiv 1910.00643), with
    gamma the learning rate of the local ("fast") steps:

    1. u <- beta u - m / gamma
    2. x <- x - alpha gamma u

    In the paper gamma is constant within a round. Here it is the mean learning rate of the round's
    steps, the largest of all parameter groups. beta = 0 and alpha = 1 give the plain average. The
    local momentum is not changed (the paper's "maintain").

    Attributes:
        beta: slow momentum, from 0 to below 1.
        alpha: slow learning rate.
    """

    name: ClassVar[str] = "slowmo"
    example: ClassVar[str] = "slowmo(beta=0.7)"
    reads_lr: ClassVar[bool] = True

    beta: float = 0.7
    alpha: float = 1.0

    def __post_init__(self) -> None:
        check_momentum("beta", self.beta, owner=self.name)
        check_positive("alpha", self.alpha, owner=self.name)

    def apply(self, x: Tensor, m: Tensor, u: Tensor, lr: float) -> None:
        u.mul_(self.beta)
        if lr > 0:  # otherwise no local step moved the parameters, and m = 0
            u.sub_(m, alpha=1 / lr)  # (1)
        x.sub_(u, alpha=self.alpha * lr)  # (2)


@dataclass(frozen=True)
class Nesterov(OuterStep):
    """``nesterov(lr=0.7, momentum=0.9)``: DiLoCo's outer step.

    Algorithm 1 of Douillard et al., "DiLoCo", 2023 (arXiv 2311.08105), with Nesterov momentum in
    the form of :class:`torch.optim.SGD`:

    1. u <- momentum u - m
    2. x <- x - lr (momentum u - m)

    lr = 1 and momentum = 0 give the plain average.

    Attributes:
        lr: outer learning rate, constant.
        momentum: from 0 to below 1.
    """

    name: ClassVar[str] = "nesterov"
    example: ClassVar[str] = "nesterov(lr=0.7, momentum=0.9)"

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_positive("lr", self.lr, owner=self.name)
        check_momentum("momentum", self.momentum, owner=self.name)

    def apply(self, x: Tensor, m: Tensor, u: Tensor, lr: float) -> None:
        u.mul_(self.momentum).sub_(m)  # (1)
        # m is scratch from here on, so no temporary the size of the model is allocated.
        x.sub_(m.neg_().add_(u, alpha=self.momentum), alpha=self.lr)  # (2)


OUTER_STEPS: tuple[type[OuterStep], ...] = (SlowMo, Nesterov)
