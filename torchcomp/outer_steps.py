"""Outer steps: what turns the mean pseudo-gradient of a round into new shared parameters.

All ranks start a round from x, and their local steps add m to it in the mean: a plain average is
x + m. The steps below take -m for the gradient of an outer optimizer, whose momentum u (0 at the
start) is the same on all ranks.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from torchcomp.checks import check_momentum, check_positive
from torchcomp.component import Component


@dataclass(frozen=True)
class OuterStep(Component):
    """A step from the shared parameters of one round to those of the next.

    `reads_lr` says whether the learning rate of the local steps enters.
    """

    kind: ClassVar[str] = "outer step"
    positional: ClassVar[int] = 0
    reads_lr: ClassVar[bool] = False

    @abstractmethod
    def apply(self, x: Tensor, m: Tensor, u: Tensor, lr: float) -> None:
        """Take the step in place: `x` and `u` become those of the next round, `m` is overwritten.

        All are 1-D. `lr` is the mean over the round's local steps, or 0 if the class reads none.
        """


@dataclass(frozen=True)
class SlowMo(OuterStep):
    """Slow momentum: ``slowmo(beta=0.7, alpha=1.0)``.

    Algorithm 1 of Wang, Tantia, Ballas and Rabbat, "SlowMo", ICLR 2020 (arXiv 1910.00643), with
    gamma the learning rate of the local ("fast") steps:

    1. u <- beta u - m / gamma       (a round at gamma = 0 has no m)
    2. x <- x - alpha gamma u

    In the paper gamma is constant within a round; here it is the mean over the round's steps, so
    that a round that begins at a tiny warm-up rate does not blow u up. The largest rate serves for
    all parameter groups, because a factor common to all gammas cancels. beta = 0 and alpha = 1 are
    the plain average. The local momentum is left alone (the paper's "maintain").

    Attributes:
        beta: slow momentum, from 0 to below 1.
        alpha: slow learning rate.
    """

    name: ClassVar[str] = "slowmo"
    reads_lr: ClassVar[bool] = True

    beta: float = 0.7
    alpha: float = 1.0

    def __post_init__(self) -> None:
        check_momentum("beta", self.beta, owner=self.name)
        check_positive("alpha", self.alpha, owner=self.name)

    def apply(self, x: Tensor, m: Tensor, u: Tensor, lr: float) -> None:
        u.mul_(self.beta)
        if lr > 0:
            u.sub_(m, alpha=1 / lr)
        x.sub_(u, alpha=self.alpha * lr)


@dataclass(frozen=True)
class Nesterov(OuterStep):
    """DiLoCo's outer optimizer, SGD with Nesterov momentum: ``nesterov(lr=0.7, momentum=0.9)``.

    Algorithm 1 of Douillard et al., "DiLoCo", 2023 (arXiv 2311.08105), with Nesterov momentum in
    the form of :class:`torch.optim.SGD`:

    1. u <- momentum u - m
    2. x <- x - lr (momentum u - m)

    lr = 1 and momentum = 0 are the plain average.

    Attributes:
        lr: outer learning rate, constant.
        momentum: from 0 to below 1.
    """

    name: ClassVar[str] = "nesterov"

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_positive("lr", self.lr, owner=self.name)
        check_momentum("momentum", self.momentum, owner=self.name)

    def apply(self, x: Tensor, m: Tensor, u: Tensor, lr: float) -> None:
        u.mul_(self.momentum).sub_(m)
        x.sub_(m.neg_().add_(u, alpha=self.momentum), alpha=self.lr)


OUTER_STEPS: tuple[type[OuterStep], ...] = (SlowMo, Nesterov)
