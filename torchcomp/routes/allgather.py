"""AllGatherRoute: every rank receives and decodes all messages."""

from torch import Tensor
from torch.autograd import profiler

from torchcomp.engine.keys import Key
from torchcomp.engine.profiling import OFF, span
from torchcomp.exchange import Exchange
from torchcomp.routes.codec import Codec


class AllGatherRoute:
    """All-gather of framed messages. All routes have its methods.

    The order of a step: :meth:`send` or :meth:`send_sum`, then :meth:`sent` if needed, then
    :meth:`mean`.
    """

    def __init__(self, codec: Codec, exchange: Exchange) -> None:
        self._codec, self._exchange = codec, exchange
        self._ranks = range(exchange.world_size)

    def send(self, x: Tensor, key: Key) -> None:
        """Encode `x` (1-D, of the bucket's dtype) as this rank's message; can overwrite `x`."""
        with span("encode") if profiler._is_profiler_enabled else OFF:
            self._message, self._key = self._codec.encode(x, key), key

    def send_sum(self, g: Tensor, e: Tensor, rest: Tensor, key: Key) -> None:
        """Encode ``g + e`` as this rank's message, and write to `rest` what the message lacks.

        NaN and infinities of the sum stay in `rest`. This can overwrite `g`.
        """
        with span("encode") if profiler._is_profiler_enabled else OFF:
            self._message, self._key = self._codec.encode_sum(g, e, rest, key), key

    def sent(self, out: Tensor) -> None:
        """Add the decoded message of this rank to `out`, in place."""
        self._codec.subtract(self._message, out, self._key, -1.0)

    def mean(self, out: Tensor) -> None:
        """Exchange the messages and write their mean over the ranks to `out`."""
        codec, exchange = self._codec, self._exchange
        rows = exchange.all_gather_rows(codec.frames.outgoing)
        exchange.check(codec.frames, rows, self._ranks)
        with span("decode") if profiler._is_profiler_enabled else OFF:
            # Rank order on every rank: another order would round differently, and the replicas
            # would drift apart.
            codec.mean_of(rows, out, self._key, len(self._ranks))
