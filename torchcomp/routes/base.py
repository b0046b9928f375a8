"""Route: send a bucket's messages and compute their mean over the ranks."""

from typing import Protocol

from torch import Tensor


class Route(Protocol):
    """The exchange of one bucket in one step.

    Call :meth:`send` or :meth:`send_sum` first, then :meth:`sent` if needed, and :meth:`mean` last.
    """

    def send(self, x: Tensor) -> None:
        """Encode `x` (1-D, of the bucket's dtype) as this rank's message; can overwrite `x`.

        A selection from a whole bucket also exchanges how many entries there are in each shard.
        """

    def send_sum(self, g: Tensor, e: Tensor, x: Tensor) -> None:
        """Write ``g + e`` to `x` and encode it as this rank's message; can overwrite `g`."""

    def sent(self, out: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the decoded message of this rank to `out`, in place.

        With weight -1 and the encoded `x` as `out`, `out` becomes the residual. NaN and infinities
        of `x` stay in the residual.
        """

    def mean(self, out: Tensor) -> None:
        """Exchange the messages and write their mean over the ranks to `out`."""
