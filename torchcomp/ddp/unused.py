"""UnusedWatch: leave parameters alone that no rank used (find_unused_parameters=True).

DDP does not change the gradient of such a parameter, whatever the hook writes to its bucket. If
error feedback sent its residual in that step, the residual would be lost. The engine therefore
keeps the state of that parameter, and this class restores its part of DDP's bucket.
"""

from collections.abc import Iterable, Mapping
from functools import partial

from torch import Tensor

from torchcomp.engine.bucket import Bucket


class UnusedWatch:
    """Tracks which parameters a step uses, and restores the buckets of the others.

    Attributes:
        used: names of the parameters for which this rank has accumulated a gradient since the last
            exchange, including under ``no_sync``.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.used: set[str] = set()
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        # The gradients do not show it: a used parameter's can be zero, and without zero_grad an
        # unused parameter still has an old one.
        for name, parameter in parameters.items():
            # The hook refers to the set only, so it does not keep this object and its copies alive.
            note = partial(_note, self.used, name)
            parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def before(self, bucket: Bucket) -> None:
        """Copy one of DDP's buckets, for the parameters that this rank did not use."""
        # Other ranks can have used them. That is known only at the end of the step.
        for name, part in bucket.parts().items():
            if name not in self.used:
                self._before[name] = (part, part.clone())

    def end(self, unused: Iterable[str]) -> None:
        """Restore the buckets' parts of parameters that no rank used, and begin the next step."""
        # A step that failed before it began knows only what was unused in the last one.
        for name in self._before.keys() & unused:
            part, before = self._before[name]
            part.copy_(before)
        self.used.clear()
        self._before.clear()


def _note(used: set[str], name: str, parameter: Tensor) -> None:
    used.add(name)
