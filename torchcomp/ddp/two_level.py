"""TwoLevel: average inside each node first, and exchange compressed messages between the nodes.

A bucket is cut into equal pieces, one for each rank of a node. Each of three steps runs in a lane
(an executor) with a process group of its own, and takes the buckets in DDP's order:

1. inside: reduce-scatter. Each rank gets the mean of its piece over the node, uncompressed.
2. between: the averager compresses the piece, and averages it with those of the other nodes.
3. inside: all-gather. Each rank gets the other pieces.

The result is that of the method among nodes, each as one rank with the mean gradient of its ranks,
with a separate selection in each piece.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from torchcomp.checkpoints.pieces import Pieces
from torchcomp.checkpoints.redistribution import Place
from torchcomp.ddp.buckets import Buckets
from torchcomp.ddp.executors import executor_for
from torchcomp.ddp.reordering import Completed
from torchcomp.engine import host
from torchcomp.engine.averager import Averager
from torchcomp.engine.bucket import Bucket, BucketShape, Group
from torchcomp.engine.nonfinite import FiniteWatch
from torchcomp.exchange import (
    Exchange,
    InsideExchange,
    PrivateExchange,
    ProcessGroupExchange,
    new_name,
)
from torchcomp.exchange.nodes import Nodes
from torchcomp.exchange.traffic import Load, sum_bytes


class TwoLevel(Buckets):
    """Averages every bucket inside the nodes, and its pieces between them.

    `inside` is the dtype of messages inside the node, None that of the gradients.
    """

    def __init__(
        self,
        make: Callable[[Exchange, Mapping[str, Tensor], Sequence[Group]], Averager],
        parameters: Mapping[str, Tensor],
        groups: Sequence[Group],
        nodes: Nodes,
        everyone: ProcessGroupExchange,
        inside: torch.dtype | None,
    ) -> None:
        rank, size, name = dist.get_rank(), nodes.size, new_name(everyone)
        mine, across = nodes.inside(rank), nodes.between(rank)
        scatter, gather = (
            InsideExchange(f"{name}/{lane}/{mine[0]}", mine, everyone)
            for lane in ("scatter", "gather")
        )
        between = PrivateExchange(f"{name}/between/{across[0]}", across, everyone)
        between.members = nodes.ranks
        checks = PrivateExchange(f"{name}/checks/{mine[0]}", mine, everyone)
        # In lane 2, ranks also compare values and combine checks inside the node.
        Exchange.split(inside=checks, between=between)

        def leave(error: BaseException) -> None:
            for exchange in (checks, between, scatter, gather):
                exchange.leave(error)

        # Views of the parameters: they take no memory, and only their shapes have a meaning.
        pieces = {
            name: Pieces(BucketShape.of((name,), parameters), size).like(parameter)
            for name, parameter in parameters.items()
        }
        lanes = [executor_for(everyone, leave) for _ in range(3)]
        place = Place(everyone.rank, across.index(rank), mine.index(rank), size)
        super().__init__(make(between, pieces, groups), everyone, place, parameters, lanes)
        self._scatter, self._checks, self._gather = scatter, checks, gather
        self._inside, self._pieces = inside, host.Scratch()
        nbytes, count = sum(parameter.nbytes for parameter in parameters.values()), len(across)
        # This rank's share of what plain DDP would send through the card of its node.
        self._dense_bytes = sum_bytes(nbytes, size * count) // size if count > 1 else 0
        self._watch = FiniteWatch(between)
        self._groups = Completed(None)

    def close(self, timeout: float | None = None) -> None:
        super().close(timeout)
        if timeout is None:
            self._scatter.close()
            self._gather.close()

    # Each job submits what follows it to the next lane, in the same order.
    def begin(self, scale: float, lrs: dict[str, float] | None) -> None:
        averager = self.averager
        self._watch = FiniteWatch(averager.exchange)
        averager.settle()  # the end of a flush changes the groups
        if averager.changes != self._changes:
            shapes = [BucketShape.of(group, self.parameters) for group in averager.buckets]
            self._groups = Completed(shapes if averager.grouped else None)
            self._changes = averager.changes
        self._groups.pending.clear()
        self.executors[1].submit(partial(averager.begin, scale, lrs, self._watch))

    def average(self, bucket: Bucket) -> None:
        if self.averager.guarded:
            self._watch.before(bucket)
        for shape, parts in self._groups.add(bucket):
            pieces = _pieces(shape, self.place.node_size)
            mine = self._reduce(pieces, parts)
            self.executors[1].submit(partial(self._average, pieces, mine, parts))

    def finish(self, end: Callable[..., bool]) -> None:
        self.executors[1].submit(partial(end, dense_bytes=self._dense_bytes))

    def _reduce(self, pieces: Pieces, parts: dict[str, Tensor]) -> Tensor:
        dtype, ranks, device = pieces.whole.dtype, pieces.ranks, self.everyone.device
        out = self._pieces.take(ranks * pieces.piece.numel, self._inside or dtype, device)
        pieces.cut(parts, out)
        if out.dtype != torch.float16:
            return self._scatter.reduce_scatter(out, dtype).div_(ranks)
        # As DDP: in this small range, the sum could overflow where the mean does not.
        return self._scatter.reduce_scatter(out.div_(ranks), dtype)

    def _average(self, pieces: Pieces, mine: Tensor, parts: dict[str, Tensor]) -> None:
        host.keep_for_this_stream(mine)
        # Lanes 1 and 3 move a piece to each rank of the node. Counted here, where the step ends.
        sent = 2 * mine.numel() * (self._inside or mine.dtype).itemsize
        self._checks.count(Load(sent=sent * (pieces.ranks - 1)))
        self.averager.average(Bucket(pieces.piece, mine))
        self.executors[2].submit(partial(self._join, pieces, mine, parts))

    def _join(self, pieces: Pieces, mine: Tensor, parts: dict[str, Tensor]) -> None:
        host.keep_for_this_stream(mine)
        # This rank takes its own piece from the others' dtype as well: replicas must be equal.
        rows = self._gather.all_gather_rows(mine.to(self._inside or mine.dtype))
        pieces.join(rows.view(-1), parts)


_pieces = lru_cache(maxsize=1024)(Pieces)
