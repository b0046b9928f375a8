"""Moments: what a synchronisation does with the optimizers' state of the averaged parameters.

Algorithm 2 leaves it alone. Averaging it, or starting it anew, are the alternatives that are
published beside it, for SlowMo among others.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from numbers import Number
from typing import Protocol

import torch
from torch import Tensor, nn

from torchcomp.bucket import merge
from torchcomp.errors import SpecError
from torchcomp.exchange import Exchange
from torchcomp.local_sgd.averaging import PlainAverage
from torchcomp.local_sgd.weights import Weights

Parameters = Mapping[str, nn.Parameter]
Optimizers = Iterable[torch.optim.Optimizer]
Layout = dict[str, tuple[torch.Size, torch.dtype, torch.device]]


class Moments(Protocol):
    """Exchanges first, and changes the optimizers' state when the synchronisation counts."""

    def check(self, parameters: Parameters, optimizers: Optimizers) -> None:
        """Require state that this can be done with.

        Raises:
            SpecError: naming what cannot.
        """

    def exchange(self, parameters: Parameters, optimizers: Optimizers, step: int) -> None:
        """Exchange what the ranks' optimizers hold of `parameters` after `step` steps.

        Raises:
            NonFiniteError: on all ranks, if something is not finite.
        """

    def commit(self, parameters: Parameters, optimizers: Optimizers) -> None:
        """Give the optimizers their new state."""


class Local:
    """Every rank keeps its own. See :class:`Moments`."""

    def check(self, parameters: Parameters, optimizers: Optimizers) -> None:
        pass

    def exchange(self, parameters: Parameters, optimizers: Optimizers, step: int) -> None:
        pass

    def commit(self, parameters: Parameters, optimizers: Optimizers) -> None:
        pass


class Reset:
    """Every rank starts anew: the next step is as a parameter's first. See :class:`Moments`."""

    def check(self, parameters: Parameters, optimizers: Optimizers) -> None:
        pass

    def exchange(self, parameters: Parameters, optimizers: Optimizers, step: int) -> None:
        pass

    def commit(self, parameters: Parameters, optimizers: Optimizers) -> None:
        for optimizer in optimizers:
            for parameter in parameters.values():
                optimizer.state.pop(parameter, None)


class Average:
    """All floating-point tensors but step counts, averaged in float32. See :class:`Moments`.

    A rank whose optimizer holds nothing of a parameter (that it has not used, or whose steps a
    GradScaler has skipped so far) adds zeros to the mean, and goes on without.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def check(self, parameters: Parameters, optimizers: Optimizers) -> None:
        for name, value in _entries(parameters, optimizers):
            if not isinstance(value, Tensor | Number | str | None):
                raise SpecError(
                    f"moments='average' cannot average the optimizer's state '{name}', a "
                    f"{type(value).__name__} and no tensor or number, and state that is averaged "
                    "in part fits no rank: take moments='local' or 'reset'",
                    "moments",
                )

    def exchange(self, parameters: Parameters, optimizers: Optimizers, step: int) -> None:
        mine = held_of(parameters, optimizers)
        layout = self._everyones({name: (t.shape, t.dtype, t.device) for name, t in mine.items()})
        tensors = {
            name: mine[name] if name in mine else torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype, device) in sorted(layout.items())
        }
        shared = {name: nn.Parameter(t, requires_grad=False) for name, t in tensors.items()}
        groups = merge(((name,) for name in shared), shared)
        what = "the optimizers' state"
        self._average = PlainAverage(Weights(shared), groups, self._exchange, what)
        self._average.exchange(step)

    def commit(self, parameters: Parameters, optimizers: Optimizers) -> None:
        self._average.commit(rate=0.0)
        del self._average

    def _everyones(self, mine: Layout) -> Layout:
        """What some rank holds, on this rank's device."""
        text = repr(sorted((name, *kind[:2]) for name, kind in mine.items()))
        if self._exchange.same_everywhere(zlib.crc32(text.encode())):
            return mine
        union: Layout = {}
        for theirs in self._exchange.gather_objects(mine):
            union |= {n: (s, dtype, self._exchange.device) for n, (s, dtype, _) in theirs.items()}
        return union | mine


MOMENTS = ("local", "average", "reset")


def moments_of(policy: str, exchange: Exchange) -> Moments:
    """What does the policy, one of :data:`MOMENTS`."""
    if policy == "average":
        return Average(exchange)
    return Reset() if policy == "reset" else Local()


def held_of(parameters: Parameters, optimizers: Optimizers) -> dict[str, Tensor]:
    """The optimizers' floating-point tensors but step counts, by parameter and name."""
    return {
        name: value
        for name, value in _entries(parameters, optimizers)
        if isinstance(value, Tensor) and value.is_floating_point() and not name.endswith(" step")
    }


def _entries(parameters: Parameters, optimizers: Optimizers) -> Iterator[tuple[str, object]]:
    for place, optimizer in enumerate(optimizers):
        suffix = f" (optimizer {place})" if place else ""
        for name, parameter in parameters.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                yield f"{name}{suffix} {key}", value
