"""LARS: a learning rate of its own for every layer."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchcomp.checks import check_at_least_0, check_flag, check_momentum, check_positive
from torchcomp.errors import SpecError, UnsupportedModelError


@runtime_checkable
class Sampling(Protocol):
    """What an optimizer has to know of gradients that are sampled and divided by p."""

    def probability(self, parameter: Tensor) -> float:
        """P of the last step that this parameter's gradient was computed; divides it."""

    def presence(self, parameter: Tensor) -> float:
        """Share of the steps in which the optimizer finds a gradient, zeros included."""

    def norm(self, parameter: Tensor) -> float:
        """Running average of |g|, before the division by p; 0.0 before the first."""


class LARS(Optimizer):
    """SGD with momentum, at an lr that is proportional to |x| / |g| in every parameter tensor.

    With x a tensor of parameters and g its gradient:

    1. trust = eta |x| / (|g| + wd |x|)     (eta where a norm is 0; 1 for excluded tensors)
    2. v <- momentum v + lr trust (g + wd x)
    3. x <- x - v

    A gradient that JointSpar sampled is g / p in a share p of the steps, and None or zeros in the
    others. Its own norm would cancel the 1 / p. So with `sampled`, where p < 1, |g| is the running
    norm before the division, and wd is divided by the share of the steps that have a gradient,
    which is p with None and 1 with zeros. The mean update on a fixed gradient is then the dense
    one. Without a gradient x and v stay. All arithmetic is in float32, or in float64 where x is.

    Source: You, Gitman, Ginsburg, "Large batch training of convolutional networks", 2017
    (arXiv 1708.03888), Algorithm 1, with the learning-rate schedule left to the user.

    Args:
        params: tensors or parameter groups.
        lr, momentum, weight_decay: at least 0, and the momentum below 1.
        trust_coefficient: eta, above 0.
        exclude_vectors: whether tensors of at most one dimension (biases, norms) get trust 1 and no
            weight decay.
        sampled: a :class:`torchcomp.JointSpar`, if it samples the gradients.

    Raises:
        SpecError: if an option is out of its range, also one of a group that is added later.
        UnsupportedModelError: from :meth:`step`, if a gradient is sparse; nothing moves then.
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
        defaults = dict[str, Any](lr=lr, momentum=momentum, weight_decay=weight_decay)
        defaults |= dict(trust_coefficient=trust_coefficient, exclude_vectors=exclude_vectors)
        if not isinstance(sampled, Sampling | None):
            raise SpecError(
                f"LARS: sampled must be a torchcomp.JointSpar or None, not {sampled!r}", "sampled"
            )
        super().__init__(params, defaults)
        self._sampled = sampled

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add tensors, with options of their own where they differ from the optimizer's."""
        options = {**self.defaults, **param_group}
        for name, check in _CHECKS.items():
            check(name, options[name], owner="LARS")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; what `closure`, which computes the loss again, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        held = [(x, group) for group in self.param_groups for x in group["params"]]
        found = [(x, x.grad, group) for x, group in held if x.grad is not None]
        for _, g, _ in found:
            if g.layout is not torch.strided:
                raise UnsupportedModelError(
                    f"LARS: a gradient of shape {tuple(g.shape)} is sparse ({g.layout}), and "
                    "weight decay and momentum are dense: build its embedding with sparse=False"
                )
        for x, g, group in found:
            self._update(x, g, group)
        return loss

    def _update(self, x: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        excluded = group["exclude_vectors"] and x.dim() <= 1
        decay = 0.0 if excluded else float(group["weight_decay"])
        presence = 1.0 if self._sampled is None else self._sampled.presence(x)
        # Half precision ends at 65504, which norms of many small elements pass, and their ratios.
        wide = torch.promote_types(x.dtype, torch.float32)
        direction = g.to(wide).add(x, alpha=decay / presence)
        if not excluded:
            size, norm = (torch.linalg.vector_norm(t, dtype=wide) for t in (x, g))
            if self._sampled is not None and self._sampled.probability(x) < 1:
                norm = torch.full_like(norm, self._sampled.norm(x))
            ratio = size / (norm + decay * size)
            trust = torch.where((size > 0) & (norm > 0), ratio, 1.0)
            direction.mul_(group["trust_coefficient"] * trust)
        v = self.state[x].setdefault("momentum", torch.zeros_like(x))
        v.mul_(group["momentum"]).add_(direction, alpha=group["lr"])
        x.sub_(v)


_CHECKS: dict[str, Callable[..., None]] = {
    "lr": check_at_least_0,
    "momentum": check_momentum,
    "weight_decay": check_at_least_0,
    "trust_coefficient": check_positive,
    "exclude_vectors": check_flag,
}
