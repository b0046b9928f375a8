"""Route: send a bucket's messages and compute their mean over the ranks."""

from typing import Protocol

from torch import Tensor

from torchcomp.engine.keys import Key


class Route(Protocol):
    """The exchange of one bucket, prepared for its shape, its method and its ranks.

    In a step, call :meth:`send` or :meth:`send_sum` first, then :meth:`sent` if needed, and
    :meth:`mean` last.
    """

    def send(self, x: Tensor, key: Key) -> None:
        """Encode `x` (1-D, of the bucket's dtype) as this rank's message; can overwrite `x`.

        A selection from a whole bucket also exchanges how many entries there are in each shard.
        """

    def send_sum(self, g: Tensor, e: Tensor, rest: Tensor, key: Key) -> None:
        """Encode ``g + e`` as this rank's message, and write to `rest` what the message lacks.

        NaN and infinities of the sum stay in `rest`. This can overwrite `g`.
        """

    def sent(self, out: Tensor) -> None:
        """Add the decoded message of this rank to `out`, in place."""

    def mean(self, out: Tensor) -> None:
        """Exchange the messages and write their mean over the ranks to `out`."""
