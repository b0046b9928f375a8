"""The law of conservation: no gradient is lost, whatever happens to the ranks.

    sum over steps of lr times the mean gradient of the ranks = applied + unsent

*Applied* is how far the weights have moved. *Unsent* is the mean residual of the ranks plus the
server residual. Every rank sums its own gradients, before anything is averaged or compressed. The
sums are part of the checkpoint, so a step that a kill undoes does not count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import torchcomp
from recipes.elastic.settings import Settings
from recipes.elastic.task import student
from torchcomp.local_sgd import Nesterov
from torchcomp.specs.spec import parse_outer_step

State = dict[str, Any]
Tensors = dict[str, Tensor]


class Account:
    """The sum of lr times gradient of this rank, by parameter.

    Args:
        module: its backward passes are counted.
        optimizer: has the learning rate.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._sums = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
        for name, parameter in module.named_parameters():
            # Called with the gradient of this rank, before DDP averages it.
            parameter.register_hook(lambda grad, name=name: self._add(name, grad))

    def _add(self, name: str, grad: Tensor) -> None:
        self._sums[name].add_(grad, alpha=self._optimizer.param_groups[0]["lr"])

    def state_dict(self) -> Tensors:
        """Return the sums."""
        return self._sums

    def load(self, own: Tensors) -> None:
        """Continue with these sums."""
        for name, total in self._sums.items():
            total.copy_(own[name])


def mean(states: Sequence[Tensors]) -> Tensors:
    """Return the mean of all ranks' sums. With it, every new rank continues."""
    return {name: torch.stack([each[name] for each in states]).mean(0) for name in states[0]}


@dataclass(frozen=True)
class Audit:
    """The result of a comparison of both sides.

    Attributes:
        deviation: largest difference between the two sides, relative to the largest sum.
        unsent: norm of what is unsent, relative to that of the sums.
    """

    deviation: float
    unsent: float


def audit(states: Sequence[State], settings: Settings) -> Audit:
    """Compare both sides of the law."""
    # The state of a single rank has the mean residual and the whole server residual.
    (joined,) = torchcomp.redistribute([state["method"] for state in states], 1)
    gradients = mean([state["account"] for state in states])
    weights = states[0]["model"]
    start = dict(student(settings.seed).named_parameters())
    worst = 0.0
    residuals = Tensors()
    for name, total in gradients.items():
        residuals[name] = _unsent(joined, name, total, settings)
        applied = _applied(joined, name, start[name].detach() - weights[name], settings)
        worst = max(worst, float((applied + residuals[name] - total).abs().max()))
    largest = max(float(total.abs().max()) for total in gradients.values())
    return Audit(worst / largest, _norm(residuals) / _norm(gradients))


def _unsent(joined: State, name: str, like: Tensor, settings: Settings) -> Tensor:
    """Return what is unsent, as a sum of lr times gradient."""
    # The residual of local steps is a change of weights, and the residual of gradients a gradient
    # of the last learning rate.
    unit = joined["lrs"][name] if settings.sync == "none" else -1.0
    slots = (joined["slots"].get(slot, {"tensors": {}}) for slot in ("error", "server_error"))
    found = (slot["tensors"].get(name) for slot in slots)
    parts = [part.view_as(like) for part in found if part is not None]
    return unit * sum(parts, torch.zeros_like(like))


def _applied(joined: State, name: str, moved: Tensor, settings: Settings) -> Tensor:
    """Return the sum of what the optimizer or the outer step was given."""
    if settings.outer == "none":
        return moved
    outer = parse_outer_step(settings.outer)
    assert isinstance(outer, Nesterov)
    # With d = -m, the outer step is u <- momentum u + d, x <- x - lr (d + momentum u). Summed over
    # the rounds: (1 - momentum) moved = lr (sum of d - momentum^2 u).
    u = joined["slots"]["outer_momentum"]["tensors"][name].view_as(moved)
    return moved * (1 - outer.momentum) / outer.lr + outer.momentum**2 * u


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.cat([each.flatten() for each in tensors.values()]).norm())
