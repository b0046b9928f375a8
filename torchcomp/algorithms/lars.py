"""LARS: a learning rate of its own for every layer."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchcomp.checks import check_at_least_0, check_momentum, check_positive


class Sampling(Protocol):
    """What an optimizer has to know of gradients that are sampled and divided by p."""

    def probability(self, parameter: Tensor) -> float:
        """P that this parameter has a gradient in a step."""

    def norm(self, parameter: Tensor) -> float:
        """Running average of |g|, before the division by p; 0.0 before any was seen."""


class LARS(Optimizer):
    """SGD with momentum, at a rate that is proportional to |x| / |g| in every parameter tensor.

    With x a tensor of parameters and g its gradient:

    1. trust = eta |x| / (|g| + wd |x|)     (eta where a norm is 0; 1 for excluded tensors)
    2. v <- momentum v + lr trust (g + wd x)
    3. x <- x - v

    A gradient that JointSpar sampled is g / p in a share p of the steps and None in the others. Its
    own norm would cancel the 1 / p, and the mean update would be p times the dense one. So with
    `sampled`, where p < 1, |g| is the running norm before the division, and wd is divided by p: the
    mean update on a fixed gradient is then the dense one. Without a gradient x and v stay.

    Source: You, Gitman, Ginsburg, "Large batch training of convolutional networks", 2017
    (arXiv 1708.03888), Algorithm 1, with the learning-rate schedule left to the user.

    Args:
        params: tensors or parameter groups.
        lr: gamma, at least 0.
        momentum: m, from 0 to below 1.
        weight_decay: wd, at least 0.
        trust_coefficient: eta, above 0.
        exclude_vectors: whether tensors of at most one dimension, which are biases and the weights
            of norms, get trust 1 and no weight decay.
        sampled: a :class:`torchcomp.JointSpar`, if it samples the gradients.

    Raises:
        SpecError: if an option is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        exclude_vectors: bool = False,
        sampled: Sampling | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "exclude_vectors": exclude_vectors,
        }
        _check(defaults)
        super().__init__(params, defaults)
        for group in self.param_groups:
            _check(group)
        self._sampled = sampled

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step.

        Args:
            closure: computes the loss again; it is called with gradients enabled.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is not None:
                    self._update(x, x.grad, group)
        return loss

    def _update(self, x: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        excluded = group["exclude_vectors"] and x.dim() <= 1
        decay = 0.0 if excluded else float(group["weight_decay"])
        p = 1.0 if self._sampled is None else self._sampled.probability(x)
        direction = g.add(x, alpha=decay / p)
        if not excluded:
            direction.mul_(group["trust_coefficient"] * self._ratio(x, g, decay, p))
        v = self.state[x].setdefault("momentum", torch.zeros_like(x))
        v.mul_(group["momentum"]).add_(direction, alpha=group["lr"])
        x.sub_(v)

    def _ratio(self, x: Tensor, g: Tensor, decay: float, p: float) -> Tensor:
        size = torch.linalg.vector_norm(x)
        norm = torch.linalg.vector_norm(g)
        if self._sampled is not None and p < 1:
            norm = torch.full_like(norm, self._sampled.norm(x))
        ratio = size / (norm + decay * size)
        return torch.where((size > 0) & (norm > 0), ratio, 1.0)


def _check(options: dict[str, Any]) -> None:
    for name, check in (
        ("lr", check_at_least_0),
        ("momentum", check_momentum),
        ("weight_decay", check_at_least_0),
        ("trust_coefficient", check_positive),
    ):
        check(name, options[name], owner="LARS")
