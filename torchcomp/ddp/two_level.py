"""TwoLevel: average inside each node first, and exchange compressed messages between the nodes.

A bucket is cut into equal pieces, one for each rank of a node. Three steps follow, each in a lane
(an executor) of its own, so that one bucket's run beside another's:

1. inside: reduce-scatter. Each rank gets the mean of its piece over the node, uncompressed.
2. between: the averager compresses the piece, and averages it with the ranks of equal place in the
   other nodes.
3. inside: all-gather. Each rank gets the other pieces.

The result is that of the method among nodes, as if each were one rank with the mean gradient of its
ranks, with a separate selection in each piece. Each lane has a process group of its own, and takes
its jobs in the order of DDP's buckets, so the ranks make the same calls.
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
from torchcomp.engine.bucket import Bucket, BucketShape, Group, Names
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


class Levels:
    """The exchanges of this rank: inside its node for lanes 1 and 3, and between the nodes."""

    def __init__(self, nodes: Nodes, everyone: ProcessGroupExchange) -> None:
        rank = dist.get_rank()
        inside, across = nodes.inside(rank), nodes.between(rank)
        name = new_name(everyone)
        self.everyone, self.nodes = everyone, nodes
        self.place = Place(everyone.rank, across.index(rank), inside.index(rank), nodes.size)
        self.scatter, self.gather = (
            InsideExchange(f"{name}/{lane}/{inside[0]}", inside, everyone)
            for lane in ("scatter", "gather")
        )
        self.between = PrivateExchange(f"{name}/between/{across[0]}", across, everyone)
        self.between.members = nodes.ranks
        self.checks = PrivateExchange(f"{name}/checks/{inside[0]}", inside, everyone)
        # In lane 2, ranks also compare values and combine checks inside the node.
        Exchange.split(inside=self.checks, between=self.between)

    def leave(self, error: BaseException) -> None:
        """End all connections of this rank after an error, so that no other rank waits for it."""
        for exchange in (self.checks, self.between, self.scatter, self.gather):
            exchange.leave(error)


class TwoLevel(Buckets):
    """Averages every bucket inside the nodes, and its pieces between them.

    `make` makes the averager of an exchange, pieces and groups. `inside` is the dtype of messages
    inside the node, None that of the gradients.
    """

    def __init__(
        self,
        make: Callable[[Exchange, Mapping[str, Tensor], Sequence[Group]], Averager],
        parameters: Mapping[str, Tensor],
        groups: Sequence[Group],
        levels: Levels,
        inside: torch.dtype | None,
    ) -> None:
        size, nodes = levels.nodes.size, len(levels.nodes.ranks)
        # Views of the parameters, so they take no memory. Only their shapes have a meaning.
        pieces = {
            name: Pieces(BucketShape.of((name,), parameters), size).like(parameter)
            for name, parameter in parameters.items()
        }
        averager = make(levels.between, pieces, groups)
        lanes = [executor_for(levels.everyone, levels.leave) for _ in range(3)]
        super().__init__(averager, levels.everyone, levels.place, parameters, lanes)
        _, self._between, self._gather = lanes
        self._levels, self._inside, self._pieces = levels, inside, host.Scratch()
        nbytes = sum(parameter.nbytes for parameter in parameters.values())
        # This rank's share of what plain DDP would send through the card of its node.
        self._dense_bytes = sum_bytes(nbytes, size * nodes) // size if nodes > 1 else 0
        self._watch = FiniteWatch(levels.between)
        self._groups = Completed(None)

    def shape_of(self, names: Names) -> BucketShape:
        return BucketShape.of(names, self.parameters)

    def close(self, timeout: float | None = None) -> None:
        super().close(timeout)
        if timeout is None:
            self._levels.scatter.close()
            self._levels.gather.close()

    # Each job submits what follows it to the next lane, in the same order.

    def begin(self, scale: float, lrs: dict[str, float] | None) -> None:
        self._watch = FiniteWatch(self._levels.between)
        averager = self.averager
        averager.settle()  # the end of a flush changes the groups
        if averager.changes != self._changes:
            shapes = [self.shape_of(group) for group in averager.buckets]
            self._groups = Completed(shapes if averager.grouped else None)
            self._changes = averager.changes
        self._groups.pending.clear()
        self._between.submit(partial(averager.begin, scale, lrs, self._watch))

    def average(self, bucket: Bucket) -> None:
        if self.averager.guarded:
            self._watch.before(bucket)
        for shape, parts in self._groups.add(bucket):
            pieces = _pieces(shape, self._levels.nodes.size)
            mine = self._reduce(pieces, parts)
            self._between.submit(partial(self._average, pieces, mine, parts))

    def finish(self, end: Callable[..., bool]) -> None:
        self._between.submit(partial(end, dense_bytes=self._dense_bytes))

    def _reduce(self, pieces: Pieces, parts: dict[str, Tensor]) -> Tensor:
        dtype, ranks = pieces.whole.dtype, pieces.ranks
        numel, device = ranks * pieces.piece.numel, self._levels.everyone.device
        out = self._pieces.take(numel, self._inside or dtype, device)
        pieces.cut(parts, out)
        if out.dtype != torch.float16:
            return self._levels.scatter.reduce_scatter(out, dtype).div_(ranks)
        # As DDP: in this small range, the sum could overflow where the mean does not.
        return self._levels.scatter.reduce_scatter(out.div_(ranks), dtype)

    def _average(self, pieces: Pieces, mine: Tensor, parts: dict[str, Tensor]) -> None:
        host.keep_for_this_stream(mine)
        # Lanes 1 and 3 move a piece to each rank of the node. Counted here, where the step ends.
        itemsize = (self._inside or mine.dtype).itemsize
        sent = 2 * mine.numel() * itemsize * (pieces.ranks - 1)
        self._levels.checks.count(Load(sent=sent))
        self.averager.average(Bucket(pieces.piece, mine))
        self._gather.submit(partial(self._join, pieces, mine, parts))

    def _join(self, pieces: Pieces, mine: Tensor, parts: dict[str, Tensor]) -> None:
        host.keep_for_this_stream(mine)
        # This rank takes its own piece from the others' dtype as well: replicas must be equal.
        rows = self._levels.gather.all_gather_rows(mine.to(self._inside or mine.dtype))
        pieces.join(rows.view(-1), parts)


@lru_cache(maxsize=1024)
def _pieces(shape: BucketShape, ranks: int) -> Pieces:
    return Pieces(shape, ranks)
