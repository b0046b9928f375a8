"""Ranks: one worker a rank of torch.distributed, and the server's part on every rank.

There is no server process. Every rank gathers all workers' messages, decodes them in the order of
the workers and then computes all that the server computes: the ranks agree because they do the same
arithmetic on the same bytes. What the server would send down never travels, and there is no second
trip; but n - 1 messages reach every rank. Of 2Direction with K values a message that is less than a
worker and a server exchange up to three ranks, and grows with n (docs/2direction.md has figures).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchcomp import wire
from torchcomp.algorithms.star import Message, Star, unusable
from torchcomp.errors import NonFiniteError
from torchcomp.exchange import Exchange
from torchcomp.wire import Layout, Parts

_ADVICE = "Nothing of this iteration was applied; all ranks must run the same code on sound links."


class Ranks(Star):
    """The star of one process group; the group's rank i is worker i.

    All ranks make the same calls in the same order. The frames of an iteration are gathered at
    once; a second, tiny collective makes sure that no rank received a damaged one.

    Args:
        group: the process group; None is the default group.
        seed: the run's seed, the same on all ranks.
        device: where messages live; "cuda" for NCCL.

    Attributes:
        exchange: the collectives, which count what crosses this rank's link.

    Raises:
        RankMismatchError: if the ranks have been given different seeds.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.exchange = Exchange(group, torch.device(device))
        rank = self.exchange.rank
        super().__init__(self.exchange.world_size, range(rank, rank + 1), seed)
        self.exchange.require_same("the seed of compressed messages", {"seed": seed})

    def _means(self, messages: Sequence[Message], layout: Layout) -> list[Tensor]:
        length = wire.nbytes(layout)
        frames = self.exchange.gather(self._frame(messages, layout))
        received = [self.exchange.receive(i, frame, length) for i, frame in enumerate(frames)]
        faulty = self._faulty(messages)
        if not self.exchange.conclude(torch.tensor(not faulty), "an uplink", _ADVICE):
            everyone = self.exchange.gather_objects(faulty)
            raise NonFiniteError(unusable({i: why for own in everyone for i, why in own.items()}))
        bundles = [wire.unpack(message, layout) for message in received]
        means, start = [], 0
        for message in messages:
            stop = start + len(message.layout)
            means.append(self._decoded_mean(message, [parts[start:stop] for parts in bundles]))
            start = stop
        return means

    def _frame(self, messages: Sequence[Message], layout: Layout) -> Tensor:
        length = wire.nbytes(layout)
        frame = torch.zeros(wire.framed(length), dtype=torch.uint8, device=self.exchange.device)
        parts = [part for message in messages for part in message.parts[0]]
        wire.pack(parts, layout, wire.payload(frame, length))
        wire.seal(frame, length)
        return frame

    def _decoded_mean(self, message: Message, everyone: list[Parts]) -> Tensor:
        d, dtype = message.decoded.shape[1], message.decoded.dtype
        return self._mean(
            message.compressor.decompress(parts, d, dtype, self._uplink_key(i, message.call))
            for i, parts in enumerate(everyone)
        )
