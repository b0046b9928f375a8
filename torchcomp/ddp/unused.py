"""UnusedWatch: undo a step for parameters that no rank used (find_unused_parameters=True).

DDP does not change the gradient of such a parameter, whatever the hook writes to its bucket. If
error feedback sent its residual in that step, the residual would be lost. The step is therefore
undone for that parameter.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from torchcomp.bucket import Bucket
from torchcomp.exchange import Exchange
from torchcomp.state import State


class UnusedWatch:
    """Track which parameters are used in a step, and undo the step for those that no rank used.

    A parameter is used if a gradient was accumulated for it since the last exchange, including
    under ``no_sync``.

    Args:
        parameters: by name, in the same order on all ranks.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._names = list(parameters)
        self._used: set[str] = set()
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        # The gradients do not show it: a used parameter's can be zero, and without zero_grad an
        # unused parameter still has an old one.
        for name, parameter in parameters.items():
            record = _recorder(name, self._used)
            parameter.register_post_accumulate_grad_hook(record)  # type: ignore[no-untyped-call]

    def before(self, bucket: Bucket) -> None:
        """Copy one of DDP's buckets, for the parameters that this rank did not use."""
        # Other ranks can have used them. That is known only at the end of the step.
        for name, part in bucket.parts().items():
            if name not in self._used:
                self._before[name] = (part, part.clone())

    def undo(self, exchange: Exchange, state: State) -> None:
        """Restore buckets and state for every parameter that no rank used."""
        used = torch.tensor([name in self._used for name in self._names], dtype=torch.uint8)
        flags = exchange.any_of(used.to(exchange.device)).tolist()
        unused = [name for name, flag in zip(self._names, flags, strict=True) if not flag]
        for name in unused:
            part, before = self._before[name]
            part.copy_(before)
        state.undo(unused)

    def reset(self) -> None:
        """Start tracking for the next exchange."""
        self._used.clear()
        self._before.clear()


def _recorder(name: str, used: set[str]) -> Callable[[Tensor], None]:
    # Refers to the set only, so the hook does not keep the watch and its copies alive.
    def record(parameter: Tensor) -> None:
        used.add(name)

    return record
