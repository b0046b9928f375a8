"""Optimizer state: what a synchronisation does with the optimizers' state of averaged parameters.

Algorithm 2 leaves it alone. Averaging it, or starting it anew, are the alternatives that are
published beside it, for SlowMo among others.
"""

import zlib
from collections.abc import Mapping, Sequence
from numbers import Number

import torch
from torch import Tensor

from torchcomp.averager import exact_mean
from torchcomp.errors import SpecError
from torchcomp.exchange import Exchange
from torchcomp.local_sgd.averages import UNCHANGED
from torchcomp.nonfinite import FiniteWatch

Layout = dict[str, tuple[torch.Size, torch.dtype]]


class OptimizerState:
    """Exchanges first, and changes the optimizers' state when the synchronisation counts.

    * ``"local"``: every rank keeps its own.
    * ``"reset"``: every rank starts anew: the next step is as a parameter's first.
    * ``"average"``: all floating-point tensors but step counts, averaged in float32 or wider. A
      rank whose optimizer holds nothing of a parameter (that it has not used, or whose steps a
      GradScaler has skipped so far) adds zeros to the mean, and goes on without.
    """

    def __init__(self, policy: str, exchange: Exchange) -> None:
        self._policy = policy
        self._exchange = exchange
        self._tensors: dict[str, Tensor] = {}
        self._means: dict[str, Tensor] = {}

    def read(
        self, parameters: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Collect what this rank averages of the state of `parameters`.

        Raises:
            SpecError: naming what cannot be averaged.
        """
        self._tensors = {}
        entries = {
            f"{name}{f' (optimizer {index})' if index else ''} {key}": value
            for index, optimizer in enumerate(optimizers if self._policy == "average" else ())
            for name, parameter in parameters.items()
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        for name, value in entries.items():
            if not isinstance(value, Tensor | Number | str | None):
                raise SpecError(
                    f"moments='average' cannot average the optimizer's state '{name}', a "
                    f"{type(value).__name__} and no tensor or number, and state that is averaged "
                    "in part fits no rank: take moments='local' or 'reset'",
                    "moments",
                )
            counts_steps = name.endswith(" step")
            if isinstance(value, Tensor) and value.is_floating_point() and not counts_steps:
                self._tensors[name] = value

    def exchange(self, step: int) -> None:
        """Exchange what was read after `step` steps.

        Raises:
            NonFiniteError: on all ranks, if something is not finite.
        """
        if self._policy != "average":
            return
        device, mine = self._exchange.device, self._tensors
        union = self._union({name: (tensor.shape, tensor.dtype) for name, tensor in mine.items()})
        self._tensors = {
            name: mine[name] if name in mine else torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in sorted(union.items())
        }
        means = exact_mean(self._exchange, self._tensors)
        finite = torch.ones((), dtype=torch.bool, device=device)
        for mean in means.values():
            finite &= mean.isfinite().all().to(device)
        where = f"the optimizers' state after step {step}"
        if not self._exchange.conclude(finite, where, UNCHANGED):
            raise FiniteWatch(self._exchange).error(where, UNCHANGED, self._tensors.items())
        self._means = means

    def commit(
        self, parameters: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Give the optimizers their new state."""
        for name, mean in self._means.items():
            self._tensors[name].copy_(mean)
        self._means, self._tensors = {}, {}
        for optimizer in optimizers if self._policy == "reset" else ():
            for parameter in parameters.values():
                optimizer.state.pop(parameter, None)

    def _union(self, mine: Layout) -> Layout:
        """What some rank holds."""
        if self._exchange.same(zlib.crc32(repr(sorted(mine.items())).encode())):
            return mine
        union: Layout = {}
        for theirs in self._exchange.gather_objects(mine):
            union |= theirs
        return union | mine
