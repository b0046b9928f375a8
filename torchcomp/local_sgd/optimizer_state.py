"""Optimizer state: what a synchronisation does with the optimizers' state of averaged parameters.

Algorithm 2 leaves it alone. Averaging it, or starting it anew, are the alternatives that are
published beside it, for SlowMo among others.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from numbers import Number

import torch
from torch import Tensor

from torchcomp.averager import exact_mean
from torchcomp.errors import SpecError
from torchcomp.exchange import Exchange
from torchcomp.local_sgd.averages import UNCHANGED
from torchcomp.nonfinite import FiniteWatch

Tensors = Mapping[str, Tensor]
Optimizers = Iterable[torch.optim.Optimizer]
Layout = dict[str, tuple[torch.Size, torch.dtype, torch.device]]


class OptimizerState:
    """Exchanges first, and changes the optimizers' state when the synchronisation counts.

    * ``"local"``: every rank keeps its own.
    * ``"reset"``: every rank starts anew: the next step is as a parameter's first.
    * ``"average"``: all floating-point tensors but step counts, averaged in float32 or wider. A
      rank whose optimizer holds nothing of a parameter (that it has not used, or whose steps a
      GradScaler has skipped so far) adds zeros to the mean, and goes on without.

    Args:
        policy: which of these.
        exchange: the ranks.
    """

    def __init__(self, policy: str, exchange: Exchange) -> None:
        self._policy = policy
        self._exchange = exchange
        self._tensors: dict[str, Tensor] = {}
        self._means: dict[str, Tensor] = {}

    def check(self, parameters: Tensors, optimizers: Optimizers) -> None:
        """Require state that the policy can be followed with.

        Raises:
            SpecError: naming what cannot be averaged.
        """
        if self._policy != "average":
            return
        for name, value in _entries(parameters, optimizers):
            if not isinstance(value, Tensor | Number | str | None):
                raise SpecError(
                    f"moments='average' cannot average the optimizer's state '{name}', a "
                    f"{type(value).__name__} and no tensor or number, and state that is averaged "
                    "in part fits no rank: take moments='local' or 'reset'",
                    "moments",
                )

    def exchange(self, parameters: Tensors, optimizers: Optimizers, step: int) -> None:
        """Exchange what the ranks' optimizers hold of `parameters` after `step` steps.

        Raises:
            NonFiniteError: on all ranks, if something is not finite.
        """
        if self._policy != "average":
            return
        mine = {
            name: value
            for name, value in _entries(parameters, optimizers)
            if isinstance(value, Tensor)
            and value.is_floating_point()
            and not name.endswith(" step")
        }
        layout = {name: (t.shape, t.dtype, t.device) for name, t in mine.items()}
        self._tensors = {
            name: mine[name] if name in mine else torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype, device) in sorted(self._union(layout).items())
        }
        means = exact_mean(self._exchange, self._tensors)
        finite = [mean.isfinite().all().to(self._exchange.device) for mean in means.values()]
        where = f"the optimizers' state after step {step}"
        nothing = [torch.ones((), dtype=torch.bool, device=self._exchange.device)]
        if not self._exchange.conclude(torch.stack(finite or nothing).all(), where, UNCHANGED):
            raise FiniteWatch(self._exchange).error(where, UNCHANGED, self._tensors.items())
        self._means = means

    def commit(self, parameters: Tensors, optimizers: Optimizers) -> None:
        """Give the optimizers their new state."""
        for name, mean in self._means.items():
            self._tensors[name].copy_(mean)
        self._means, self._tensors = {}, {}
        if self._policy == "reset":
            for optimizer in optimizers:
                for parameter in parameters.values():
                    optimizer.state.pop(parameter, None)

    def _union(self, mine: Layout) -> Layout:
        """What some rank holds, on this rank's device."""
        text = repr(sorted((name, *kind[:2]) for name, kind in mine.items()))
        if self._exchange.same(zlib.crc32(text.encode())):
            return mine
        union: Layout = {}
        for theirs in self._exchange.gather_objects(mine):
            union |= {n: (s, dtype, self._exchange.device) for n, (s, dtype, _) in theirs.items()}
        return union | mine


def _entries(parameters: Tensors, optimizers: Optimizers) -> Iterator[tuple[str, object]]:
    for index, optimizer in enumerate(optimizers):
        suffix = f" (optimizer {index})" if index else ""
        for name, parameter in parameters.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                yield f"{name}{suffix} {key}", value
