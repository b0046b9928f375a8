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
from torchcomp.ddp.executors import Executor, executor_for
from torchcomp.ddp.reordering import Completed
from torchcomp.engine import host
from torchcomp.engine.averager import Averager
from torchcomp.engine.bucket import Bucket, BucketShape, Group, Names
from torchcomp.engine.nonfinite import FiniteWatch
from torchcomp.engine.scratch import Scratch
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
    """The exchanges of this rank: inside its node, and between the nodes.

    Attributes:
        everyone: exchange among all ranks, over the user's group, for between two steps.
        nodes: the ranks of every node.
        place: where this rank is.
        scatter, between, gather: for lanes 1, 2 and 3. The second is the upper level of two.
    """

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
        self._checks = PrivateExchange(f"{name}/checks/{inside[0]}", inside, everyone)
        # In lane 2, ranks also compare values and combine checks inside the node.
        Exchange.split(inside=self._checks, between=self.between)

    def close(self) -> None:
        """End the connections inside the node."""
        self.scatter.close()
        self.gather.close()

    def leave(self, error: BaseException) -> None:
        """End all connections of this rank after an error, so that no other rank waits for it."""
        for exchange in (self._checks, self.between, self.scatter, self.gather):
            exchange.leave(error)

    def count(self, nbytes: int) -> None:
        """Count bytes that this rank sends inside its node."""
        self._checks.count(Load(sent=nbytes))


class TwoLevel(Buckets):
    """Averages every bucket inside the nodes, and its pieces between them.

    Args:
        averager: averages pieces between the nodes.
        parameters: of the model, by name.
        levels: the exchanges of this rank.
        lanes: one for each step.
        inside: dtype of messages inside the node; None is that of the gradients.
    """

    def __init__(
        self,
        averager: Averager,
        parameters: Mapping[str, Tensor],
        levels: Levels,
        lanes: Sequence[Executor],
        inside: torch.dtype | None = None,
    ) -> None:
        super().__init__(averager, levels.everyone, levels.place, parameters, lanes)
        _, self._between, self._gather = lanes
        self._levels, self._inside, self._pieces = levels, inside, Scratch()
        nbytes = sum(parameter.nbytes for parameter in parameters.values())
        # This rank's share of what plain DDP would send through the card of its node.
        ranks = levels.nodes.size * len(levels.nodes.ranks)
        card = sum_bytes(nbytes, ranks) if len(levels.nodes.ranks) > 1 else 0
        self._dense_bytes = card // levels.nodes.size
        self._watch = FiniteWatch(levels.between)
        self._groups = Completed(None)

    @classmethod
    def of(
        cls,
        make: Callable[[Exchange, Mapping[str, Tensor], Sequence[Group]], Averager],
        parameters: Mapping[str, Tensor],
        groups: Sequence[Group],
        levels: Levels,
        inside: torch.dtype | None = None,
    ) -> "TwoLevel":
        """Return one with lanes, and an averager that `make` makes for pieces of the parameters."""
        # Views of the parameters, so they take no memory. Only their shapes have a meaning.
        pieces = {
            name: Pieces(BucketShape.of((name,), parameters), levels.nodes.size).like(parameter)
            for name, parameter in parameters.items()
        }
        averager = make(levels.between, pieces, groups)
        lanes = [executor_for(levels.everyone, levels.leave) for _ in range(3)]
        return cls(averager, parameters, levels, lanes, inside)

    def shape_of(self, names: Names) -> BucketShape:
        return BucketShape.of(names, self.parameters)

    def close(self, timeout: float | None = None) -> None:
        super().close(timeout)
        if timeout is None:
            self._levels.close()

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
        """Lane 1: reduce-scatter the groups that a bucket completes."""
        if self.averager.guarded:
            self._watch.before(bucket)
        for shape, parts in self._groups.add(bucket):
            pieces = _pieces(shape, self._levels.nodes.size)
            mine = self._reduce(pieces, parts)
            self._between.submit(partial(self._average, pieces, mine, parts))

    def finish(self, end: Callable[..., bool]) -> None:
        self._between.submit(partial(end, dense_bytes=self._dense_bytes))

    def _reduce(self, pieces: Pieces, parts: dict[str, Tensor]) -> Tensor:
        """Return this rank's piece of the mean over the node."""
        dtype, ranks = pieces.whole.dtype, pieces.ranks
        out = self._pieces.take(
            ranks * pieces.piece.numel, self._inside or dtype, self._levels.everyone.device
        )
        pieces.cut(parts, out)
        if out.dtype != torch.float16:
            return self._levels.scatter.reduce_scatter(out, dtype).div_(ranks)
        # As DDP: in this small range, the sum could overflow where the mean does not.
        return self._levels.scatter.reduce_scatter(out.div_(ranks), dtype)

    def _average(self, pieces: Pieces, mine: Tensor, parts: dict[str, Tensor]) -> None:
        """Lane 2: average this rank's piece between the nodes."""
        host.keep_for_this_stream(mine)
        # Lanes 1 and 3 move a piece to each rank of the node. Counted in this lane, which ends the
        # step.
        itemsize = (self._inside or mine.dtype).itemsize
        self._levels.count(2 * mine.numel() * itemsize * (pieces.ranks - 1))
        self.averager.average(Bucket(pieces.piece, mine))
        self._gather.submit(partial(self._join, pieces, mine, parts))

    def _join(self, pieces: Pieces, mine: Tensor, parts: dict[str, Tensor]) -> None:
        """Lane 3: collect the pieces of a group."""
        host.keep_for_this_stream(mine)
        # This rank takes its own piece from the others' dtype as well: replicas must be equal.
        rows = self._levels.gather.all_gather_rows(mine.to(self._inside or mine.dtype))
        pieces.join(rows.view(-1), parts)


@lru_cache(maxsize=1024)
def _pieces(shape: BucketShape, ranks: int) -> Pieces:
    return Pieces(shape, ranks)
