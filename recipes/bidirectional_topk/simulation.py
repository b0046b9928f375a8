"""Many workers in one process: torchcomp's own aggregators, over collectives of threads.

Nothing of a method is written a second time here. Every worker runs ``aggregate`` of the spec in a
thread of its own; only :class:`SimulatedExchange` is new, which hands tensors over in memory where
torchcomp.exchange calls a process group. All replicas of a synchronised run are equal, so one model
stands for all of them: the workers' gradients are computed on it one after another.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchcomp.bucket import Bucket, Caps, Group, merge, partition
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.spec import parse_aggregator
from torchcomp.state import State
from torchcomp.traffic import Load

_TIMEOUT_SECONDS = 60


class Meeting:
    """Where the workers hand each other values: everyone brings one and takes all.

    Attributes:
        size: number of workers.
        floor: who works holds it. A hundred threads that all want Python's interpreter lock, and
            hand it over at every small operation, take several times as long.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.floor = threading.Lock()
        self._barrier = threading.Barrier(size, timeout=_TIMEOUT_SECONDS)
        # Two boards in turn, so that one barrier a meeting is enough: nobody can be two ahead.
        self._boards: list[list[Any]] = [[None] * size, [None] * size]

    def share(self, turn: int, rank: int, value: Any) -> list[Any]:
        """Everybody's values in rank order; ``turn`` counts this worker's meetings."""
        board = self._boards[turn % 2]
        board[rank] = value
        self.floor.release()
        try:
            self._barrier.wait()
        finally:
            self.floor.acquire()
        return list(board)

    def abort(self) -> None:
        """Wake whoever waits for a worker that failed."""
        self._barrier.abort()


@dataclass(frozen=True)
class Received:
    """What one collective brought to one worker.

    Attributes:
        payload: whether it was a message; else counts, or candidates for a threshold.
        nbytes: from the other workers.
    """

    payload: bool
    nbytes: int


class SimulatedExchange(Exchange):
    """The collectives of one worker. Bytes are counted as torchcomp.exchange counts them."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        # Not the base's, which asks torch.distributed for rank and size.
        self.group = None
        self.device = torch.device("cpu")
        self.rank, self.world_size = rank, meeting.size
        self.log: list[Received] = []
        self._load = Load()
        self._found: list[tuple[int, Tensor]] = []
        self._meeting, self._turn = meeting, 0

    def sum(self, values: Tensor) -> None:
        values.copy_(_added(self._share(values.clone())))
        self._load.summed += values.nbytes

    def gather(self, message: Tensor) -> list[Tensor]:
        sizes = [message.numel()] * self.world_size
        return list(torch.split(self.gather_varied(message, sizes), sizes))

    def _all_to_all(
        self, received: Tensor, outgoing: Tensor, arriving: Sequence[int], sizes: Sequence[int]
    ) -> None:
        everyone = self._share(torch.split(outgoing, list(sizes)))
        mine = [parts[self.rank] for parts in everyone]
        if [part.numel() for part in mine] != list(arriving):
            raise ValueError(f"worker {self.rank} expected parts of {list(arriving)} elements")
        torch.cat(mine, out=received)

    def _share(self, value: Any) -> list[Any]:
        self._turn += 1
        return self._meeting.share(self._turn, self.rank, value)

    def _count(self, itemsize: int, sizes: Sequence[int], arriving: Sequence[int]) -> None:
        super()._count(itemsize, sizes, arriving)
        came = sum(arriving) - arriving[self.rank]
        self.log.append(Received(itemsize == 1, itemsize * came))


class Workers:
    """``count`` workers that train one model together by a method.

    Attributes:
        exchanges: one for each worker; their logs tell the bytes of the last step.
        supports: the entries that each worker sent in the last step, as a mask by worker and by
            group; kept only where ``watch`` is set, and only right for methods that send values
            as they are, so that what was sent leaves exactly 0 in the memory.
    """

    def __init__(self, model: nn.Module, spec: str, count: int, *, watch: bool = False) -> None:
        self.parameters = dict(model.named_parameters())
        self.method = parse_aggregator(spec)
        self.groups = _groups(self.parameters, self.method.whole_model)
        self.watch = watch
        meeting = Meeting(count)
        self._meeting = meeting
        self.exchanges = [SimulatedExchange(meeting, rank) for rank in range(count)]
        self.states = [State() for _ in range(count)]
        self.supports: list[list[Tensor]] = [[] for _ in range(count)]
        self._pool = ThreadPoolExecutor(max_workers=count)
        self._step = 0

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown()

    def backward(self, loss_of: Callable[[int], Tensor]) -> None:
        """Leave in every ``grad`` what the method makes of all workers' gradients.

        Args:
            loss_of: the loss of a worker's batch, by rank.
        """
        buckets = [self._gradient(loss_of(exchange.rank)) for exchange in self.exchanges]
        jobs = [
            self._pool.submit(self._aggregate, *place)
            for place in zip(self.exchanges, self.states, buckets, strict=True)
        ]
        wait(jobs)
        _raise_first(jobs)
        self._write(buckets)
        self._step += 1

    def _gradient(self, loss: Tensor) -> list[Bucket]:
        gradients = torch.autograd.grad(loss, list(self.parameters.values()))
        parts = {name: g.reshape(-1) for name, g in zip(self.parameters, gradients, strict=True)}
        return [
            Bucket(
                names, tuple(parts[n].numel() for n in names), torch.cat([parts[n] for n in names])
            )
            for names in self.groups
        ]

    def _aggregate(self, exchange: SimulatedExchange, state: State, buckets: list[Bucket]) -> None:
        try:
            with self._meeting.floor:
                self._work(exchange, state, buckets)
        except BaseException:
            self._meeting.abort()
            raise

    def _work(self, exchange: SimulatedExchange, state: State, buckets: list[Bucket]) -> None:
        exchange.log.clear()
        key = Key(0, self._step, rank=exchange.rank)
        before = [bucket.flat.clone() for bucket in buckets] if self.watch else []
        for bucket in buckets:
            self.method.aggregate(bucket, exchange, state, key)
        if self.watch:
            pairs = zip(buckets, before, strict=True)
            self.supports[exchange.rank] = [_sent(state, b, g) for b, g in pairs]
        exchange.conclude(torch.tensor(True), f"step {self._step + 1}", "This is a simulation.")
        state.commit()

    def _write(self, buckets: list[list[Bucket]]) -> None:
        first, *others = buckets
        for place, bucket in enumerate(first):
            for rank, theirs in enumerate(others, start=1):
                # As bytes: a NaN equals itself.
                if not torch.equal(_bits(bucket.flat), _bits(theirs[place].flat)):
                    raise AssertionError(f"workers 0 and {rank} differ at step {self._step + 1}")
            for name, part in bucket.parts().items():
                self.parameters[name].grad = part.view_as(self.parameters[name])


def _groups(parameters: dict[str, nn.Parameter], whole_model: bool) -> tuple[Group, ...]:
    """As torchcomp.register groups them."""
    groups = partition(parameters.items(), Caps())
    return merge(groups, parameters) if whole_model else groups


def _sent(state: State, bucket: Bucket, gradient: Tensor) -> Tensor:
    """Where error feedback had something to send, and nothing is left."""
    before, after = state.worker.open(bucket, torch.promote_types(gradient.dtype, torch.float32))
    return (after == 0) & (gradient + before != 0)


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.uint8)


def _added(values: list[Tensor]) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


def _raise_first(jobs: "list[Future[None]]") -> None:
    errors = [error for job in jobs if (error := job.exception()) is not None]
    # Whoever waited for the one that failed has a broken barrier, which explains nothing.
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
