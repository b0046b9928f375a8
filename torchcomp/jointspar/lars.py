"""LARS: SGD with momentum and a separate learning rate for every layer."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchcomp.engine import host
from torchcomp.specs.checks import check_at_least_0, check_flag, check_momentum, check_positive
from torchcomp.specs.errors import SpecError, UnsupportedModelError

_CHECKS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("lr", "weight_decay"), check_at_least_0),
    "momentum": check_momentum,
    "trust_coefficient": check_positive,
    "exclude_vectors": check_flag,
}


@runtime_checkable
class Sampling(Protocol):
    """What LARS reads from JointSpar: the p that divided g in the last step, and the mean |g|."""

    def probability(self, parameter: Tensor) -> float: ...
    def norm(self, parameter: Tensor) -> float: ...


class LARS(Optimizer):
    """SGD with momentum, with a learning rate proportional to |x| / |g| for every parameter tensor.

    With x a tensor of parameters and g its gradient:

    1. trust = eta |x| / (|g| + wd |x|)     (eta where a norm is 0; 1 for excluded tensors)
    2. v <- momentum v + lr trust (g + wd x)
    3. x <- x - v

    JointSpar gives the optimizer g / p in a share p of the steps, and None in the others. The norm
    of g / p would cancel the factor 1 / p. With `sampled`, tensors with p < 1 take as |g| the
    running average of the norm before the division by p, and wd is divided by p. The mean update on
    a fixed gradient then equals the dense one. A tensor without a gradient keeps its x and v. Norms
    are computed in float32 or wider.

    Source: You, Gitman, Ginsburg, "Large batch training of convolutional networks", 2017
    (arXiv 1708.03888), Algorithm 1, without its learning-rate schedule.

    Args:
        params: tensors or parameter groups.
        lr: learning rate, at least 0.
        momentum: momentum factor, at least 0 and below 1.
        weight_decay: wd, at least 0.
        trust_coefficient: eta, above 0.
        exclude_vectors: whether biases and norms (at most one dimension) have trust 1 and wd 0.
        sampled: the :class:`torchcomp.JointSpar` that samples the gradients, if there is one.

    Raises:
        SpecError: if an option is out of its range, here or in a group that is added later.
        UnsupportedModelError: from :meth:`step`, if a gradient is sparse; nothing has changed then.
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
        if not isinstance(sampled, Sampling | None):
            raise SpecError(f"sampled must be a JointSpar or None, not {sampled!r}", "sampled")
        defaults = dict[str, Any](lr=lr, momentum=momentum, weight_decay=weight_decay)
        defaults |= dict(trust_coefficient=trust_coefficient, exclude_vectors=exclude_vectors)
        super().__init__(params, defaults)
        self._sampled = sampled

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. Options that it does not set take the optimizer's defaults."""
        # Optimizer.__init__ calls this for its own groups.
        options = {**self.defaults, **param_group}
        for name, check in _CHECKS.items():
            check(name, options[name], owner="LARS")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform one step, and return what `closure`, which recomputes the gradients, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        kinds: dict[Any, list[Tensor]] = defaultdict(list)
        for number, group in enumerate(self.param_groups):
            for x in group["params"]:
                if (g := x.grad) is None:
                    continue
                if g.layout is not torch.strided:
                    raise UnsupportedModelError(
                        f"LARS: a gradient of shape {tuple(g.shape)} is sparse: use sparse=False"
                    )
                excluded = group["exclude_vectors"] and x.dim() <= 1
                kinds[number, excluded, x.device, x.dtype, g.dtype].append(x)
        for (number, excluded, *_), xs in kinds.items():
            self._update(xs, self.param_groups[number], excluded)
        return loss

    def _update(self, xs: list[Tensor], group: dict[str, Any], excluded: bool) -> None:
        # Half precision ends at 65504. Norms of many small elements exceed it, and so do ratios.
        wide = torch.promote_types(xs[0].dtype, torch.float32)
        gs = [x.grad for x in xs if x.grad is not None]
        sampled, decay = self._sampled, 0.0 if excluded else float(group["weight_decay"])
        ps = [1.0 if sampled is None else sampled.probability(x) for x in xs]
        # The direction g + wd x. wd is divided because it is applied in a share p of the steps.
        alike: dict[float, list[int]] = defaultdict(list)
        for i, p in enumerate(ps):
            alike[decay / p].append(i)
        found: dict[int, Tensor] = {}
        for alpha, some in alike.items():
            wides, weights = [gs[i].to(wide) for i in some], [xs[i] for i in some]
            found |= zip(some, torch._foreach_add(wides, weights, alpha=alpha), strict=True)
        directions = [found[i] for i in range(len(xs))]
        # 1. The trust ratio, in which wd is not divided: it is that of the dense update.
        if not excluded:
            size, norm = (torch.stack(torch._foreach_norm(ts, 2, dtype=wide)) for ts in (xs, gs))
            if sampled is not None:
                known = [sampled.norm(x) if p < 1 else 0.0 for x, p in zip(xs, ps, strict=True)]
                averages = host.copy_to(torch.tensor(known, dtype=wide), norm.device)
                divided = host.copy_to(torch.tensor([p < 1 for p in ps]), norm.device)
                norm = averages.where(divided, norm)
            ratio = torch.where((size > 0) & (norm > 0), size / (norm + decay * size), 1.0)
            trust = group["trust_coefficient"] * ratio
            torch._foreach_mul_(directions, list(trust.unbind()))
        # 2. and 3. v contains lr, as in the paper. torch.optim.SGD multiplies by lr afterwards.
        for x in (x for x in xs if "momentum" not in self.state[x]):
            self.state[x]["momentum"] = torch.zeros_like(x)
        vs = [self.state[x]["momentum"] for x in xs]
        torch._foreach_mul_(vs, group["momentum"])
        torch._foreach_add_(vs, directions, alpha=group["lr"])
        torch._foreach_sub_(xs, vs)
