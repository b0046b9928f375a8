"""Parameters that no rank used in a step (find_unused_parameters=True).

DDP leaves the gradient of such a parameter as it was, whatever the hook puts into its bucket. What
error feedback delivers for it in that step would be lost, so for that parameter the step is undone.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from torchcomp.bucket import Bucket
from torchcomp.exchange import Exchange
from torchcomp.state import State


class UnusedWatch:
    """Learns which parameters take part in a step, and undoes it for those that do on no rank.

    A parameter takes part if a gradient was accumulated for it since the last exchange, also under
    ``no_sync``. Its gradient being zero says nothing, nor does one that is left from before.

    Args:
        parameters: by name, in an order that is the same on all ranks.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._names = list(parameters)
        self._used: set[str] = set()
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        for name, parameter in parameters.items():
            note = _note(name, self._used)
            parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def before(self, bucket: Bucket) -> None:
        """Keep what one of DDP's buckets holds for parameters that this rank did not use."""
        for name, part in bucket.parts().items():
            if name not in self._used:
                self._before[name] = (part, part.clone())

    def undo(self, exchange: Exchange, state: State) -> None:
        """Put buckets and state back for every parameter that no rank used."""
        used = torch.tensor([name in self._used for name in self._names], dtype=torch.uint8)
        flags = exchange.any_of(used.to(exchange.device)).tolist()
        unused = [name for name, flag in zip(self._names, flags, strict=True) if not flag]
        for name in unused:
            part, before = self._before[name]
            part.copy_(before)
        state.keep(unused)

    def reset(self) -> None:
        """Begin to watch for the next exchange."""
        self._used.clear()
        self._before.clear()


def _note(name: str, used: set[str]) -> Callable[[Tensor], None]:
    def note(parameter: Tensor) -> None:
        used.add(name)

    return note
