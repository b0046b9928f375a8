"""InsideExchange: the exchange inside a node, of large uncompressed messages."""

from collections.abc import Sequence

from torch import Tensor

from torchcomp.exchange.private import PrivateExchange
from torchcomp.exchange.process_group import ProcessGroupExchange
from torchcomp.scratch import Scratch


class InsideExchange(PrivateExchange):
    """The exchange inside a node, for one lane.

    Gathered values are valid until the next call, which uses their memory again.
    """

    def __init__(self, name: str, ranks: Sequence[int], beside: ProcessGroupExchange) -> None:
        super().__init__(name, ranks, beside)
        self._sending, self._receiving = Scratch(), Scratch()

    def _all_gather(self, mine: Tensor) -> Tensor:
        if mine.is_cuda:
            return super()._all_gather(mine)
        # Not gloo's all-gather, which copies what it has received once more, to fresh memory. Its
        # ring would spare a network card, but inside a node there is none.
        copies = self._sending.take(mine.numel() * self.world_size, mine.dtype, mine.device)
        copies.view(self.world_size, -1).copy_(mine)
        sizes = [mine.numel()] * self.world_size
        return self._all_to_all(copies, sizes, sizes)

    def _all_to_all(
        self, outgoing: Tensor, sizes: Sequence[int], arriving: Sequence[int]
    ) -> Tensor:
        received = self._receiving.take(sum(arriving), outgoing.dtype, outgoing.device)
        self._all_to_all_to(received, outgoing, list(arriving), list(sizes))
        return received
