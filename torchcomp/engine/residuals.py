"""The unit of a residual, and what becomes of it in its last step."""

from collections.abc import Iterable, Mapping
from functools import reduce

import torch
from torch import Tensor

from torchcomp.engine.bucket import Shard
from torchcomp.engine.state import State
from torchcomp.exchange import Exchange
from torchcomp.specs.checks import check_at_least_0

LR = float | Mapping[str, float] | None
"""Learning rate of a step: one for all parameters, or one by name. None: not given."""


class Units:
    """The units in which a state is kept: the loss scale, and maybe the learning rates."""

    def __init__(self) -> None:
        self.scale = 1.0  # loss scale of the gradients
        # The learning rates in the residual, by parameter name: its unit is then that of an update.
        self.lrs: dict[str, float] = {}
        self.before = self.scale, self.lrs  # before the step in flight, or before the last one

    def follow(
        self, state: State, scale: float, lrs: Mapping[str, float], names: Iterable[str]
    ) -> Mapping[str, float]:
        """Convert a state to the units of the step that begins, maybe without learning rates.

        Return the factors by which the residual of each of the `names` has changed, if any has.
        """
        ratio = scale / self.scale
        self.rescale(state, scale)
        changed = self._follow_lrs(state, lrs) if lrs or self.lrs else {}
        if ratio == 1:
            return changed
        return {name: ratio * changed.get(name, 1.0) for name in names}

    def go_back(self, state: State) -> None:
        """Convert a state to the units :attr:`before`."""
        scale, lrs = self.before
        self.rescale(state, scale)
        self._follow_lrs(state, lrs)
        self.lrs = lrs

    def rescale(self, state: State, scale: float) -> None:
        """Convert residuals and estimates, which have the unit of the scaled gradients."""
        if scale != self.scale:
            state.scale(scale / self.scale)
            self.scale = scale

    def _follow_lrs(self, state: State, lrs: Mapping[str, float]) -> Mapping[str, float]:
        nonzero = {name: lr for name, lr in lrs.items() if lr}
        ratios = {name: self.lrs.get(name, lr) / lr for name, lr in nonzero.items()}
        changed = {name: ratio for name, ratio in ratios.items() if ratio != 1}
        if changed:
            state.scale_debts(changed)
        # Without learning rates, what is unsent comes from steps whose learning rate is not known.
        self.lrs = self.lrs | nonzero if lrs else {}
        return changed


def by_name(lr: float | Mapping[str, float], parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the learning rate of each parameter."""
    lrs = lr if isinstance(lr, Mapping) else dict.fromkeys(parameters, lr)
    for name in parameters:
        check_at_least_0(f"lr of '{name}'", lrs.get(name))
    return {name: float(lrs[name]) for name in parameters}


def is_sent(state: State, exchange: Exchange, parameters: Mapping[str, Tensor]) -> bool:
    """Whether the step in flight sends the whole residual, on every rank, but for rounding errors.

    These are dropped.
    """
    after = dict(state.pending("error"))
    left = torch.zeros((), dtype=torch.bool, device=exchange.device)
    for name, before in state.items("error"):
        part, numbers = after.get(name, before), torch.finfo(parameters[name].dtype)
        # A part that did not change was not sent: no rank had a gradient for it. A part above any
        # rounding error was clipped to the range of the gradients' dtype.
        kept = (part == before).all() | (part.abs() > numbers.eps * numbers.max).any()
        part.masked_fill_(~kept, 0.0)
        left |= part.any().to(left.device)
    # All ranks must agree, or they would run different methods from the next step on.
    return not exchange.all_reduce_max(left.to(torch.uint8).reshape(1)).any()


def hand_over(
    state: State, exchange: Exchange, names: Iterable[str], owned: Iterable[Shard], leaving: bool
) -> None:
    """Add the residuals of the ranks that leave to those of the others, in equal parts.

    All ranks make this call before they commit the step. `owned` has this rank's shards.
    """
    if leaving:
        state.unshard(owned, exchange.world_size, pending=True)
    after = dict(state.pending("error"))
    parts = [after[name] for name in names if name in after]
    wide = reduce(torch.promote_types, (part.dtype for part in parts), torch.float32)
    # The last element counts the ranks that leave.
    one = torch.ones(1, dtype=wide, device=exchange.device)
    given = torch.cat([*(part.to(wide) for part in parts), one])
    if not leaving:
        given.zero_()
    exchange.all_reduce(given)
    *received, leavers = torch.split(given, [*(part.numel() for part in parts), 1])
    staying = exchange.world_size - round(float(leavers))
    for part, more in zip(parts, received, strict=True) if staying else ():
        if leaving:
            part.zero_()
        else:
            part.add_(more.to(part.dtype), alpha=1 / staying)
