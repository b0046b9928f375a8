"""What becomes of a residual in its last step: all of it was sent, or other ranks take it over."""

from collections.abc import Iterable, Mapping
from functools import reduce

import torch
from torch import Tensor

from torchcomp.engine.bucket import Shard
from torchcomp.engine.state import State
from torchcomp.exchange import Exchange


def is_sent(state: State, exchange: Exchange, parameters: Mapping[str, Tensor]) -> bool:
    """Whether the step in flight sends all that is left of the residual, on every rank.

    Drops the rounding errors that the step leaves in the residual.
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

    The sum over the ranks of what is unsent does not change. All ranks make this call before they
    commit the step, with the names of all parameters in the same order. `owned` has this rank's
    shard of each bucket.
    """
    if leaving:
        state.unshard_pending(owned, exchange.world_size)
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
