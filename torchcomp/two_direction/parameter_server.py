"""A parameter server with n workers, and the messages between them.

Workers send *uplink messages* to the server, which sends *downlink messages* to all of them. Values
of the workers are tensors with one row per worker of this process, values of the server vectors.
:class:`Simulated` and :class:`Ranks` decode the same messages in the same order: equal bit for bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from torchcomp.compressors import Compressor, Identity
from torchcomp.compressors.base import Encoded, Vectors
from torchcomp.engine.keys import Key, check_seed
from torchcomp.exchange import Exchange, ProcessGroupExchange
from torchcomp.routes import wire
from torchcomp.routes.wire import Frames, Layout, Parts
from torchcomp.specs.checks import check_count
from torchcomp.specs.errors import NonFiniteError

DENSE = Identity()
_ADVICE = "No part of this iteration was applied. Verify that all ranks run the same code."


@dataclass
class ServerTraffic:
    """The traffic between the server and one worker. It is the same for every worker."""

    up_coordinates: int = 0  # values, without indices, scales and headers
    down_coordinates: int = 0
    up_bytes: int = 0  # of the frames, with all of these
    down_bytes: int = 0
    round_trips: int = 0  # how often a worker waited for the server

    @property
    def coordinates(self) -> int:
        """Values sent in both directions."""
        return self.up_coordinates + self.down_coordinates


@dataclass(frozen=True)
class Uplink:
    """One uplink message of every worker of this process."""

    compressor: Compressor
    call: int  # the number of the message, the same on all workers
    encoded: Encoded | None  # the message, if this process sends it; None in a simulation
    decoded: Tensor  # the values that the server decodes; (workers of this process, d)
    faulty: list[int]  # workers whose vector contains a NaN or an infinity

    @property
    def layout(self) -> Layout:
        return self.compressor.layout(self.decoded.shape[1], self.decoded.dtype)


Faults = dict[int, str]  # worker -> description of its fault
Decoded = Sequence[Iterable[Tensor]]  # for each message, the vectors of all n workers in order


class ParameterServer(ABC):
    """The messages of a method between a server and its n workers, `mine` in this process.

    All randomness of messages derives from `seed`. `traffic` is what has been sent.
    """

    def __init__(self, n: int, mine: range, seed: int) -> None:
        self.n, self.mine, self.seed = n, mine, check_seed(seed)
        self.traffic = ServerTraffic()
        self.explain: Callable[[], str] = lambda: ""  # describes a fault of these workers

    def encode(self, vectors: Tensor, compressor: Compressor, call: int) -> Uplink:
        """Compress one row per worker here; `call`, unique within the run, seeds the randomness."""
        encoded, decoded = self._encode(vectors, compressor, call)
        finite = vectors.isfinite().all(1).tolist()
        faulty = [worker for worker, good in zip(self.mine, finite, strict=True) if not good]
        return Uplink(compressor, call, encoded, decoded, faulty)

    def up(self, *messages: Uplink) -> list[Tensor]:
        """Send uplink messages in one frame. Return the mean of each over all n workers; 1-D.

        Raises NonFiniteError on all ranks if a worker's vector is not finite, or WireError.
        """
        nbytes = sum(wire.nbytes(message.layout) for message in messages)
        self.traffic.up_bytes += wire.framed(nbytes)
        for each in messages:
            self.traffic.up_coordinates += each.compressor.kept(each.decoded.shape[1])
        self.traffic.round_trips += 1
        faults = {worker: self.explain() for message in messages for worker in message.faulty}
        # Add one worker after another: a sum over an axis can add in another order on other
        # hardware, and all ranks must get the same bits.
        return [reduce(torch.add, rows) / self.n for rows in self._deliver(messages, faults)]

    def uplink(self, vectors: Tensor, compressor: Compressor, call: int) -> tuple[Tensor, Tensor]:
        """Send one uplink message. Return this process's decoded rows, and the mean of all n."""
        message = self.encode(vectors, compressor, call)
        return message.decoded, self.up(message)[0]

    def down(self, vector: Tensor, compressor: Compressor = DENSE, call: int = 0) -> Tensor:
        """Count a downlink message, and return what the workers decode; nothing is sent."""
        d, dtype = vector.numel(), vector.dtype
        self.traffic.down_coordinates += compressor.kept(d)
        self.traffic.down_bytes += wire.framed(wire.nbytes(compressor.layout(d, dtype)))
        return compressor.round_trips(vector[None], ["downlink"], [Key(self.seed, call)])[0]

    @abstractmethod
    def _encode(self, rows: Tensor, c: Compressor, call: int) -> tuple[Encoded | None, Tensor]:
        """Return the message if this process sends one, and what the server decodes; (mine, d)."""

    @abstractmethod
    def _deliver(self, messages: Sequence[Uplink], faults: Faults) -> Decoded:
        """Return the decoded vectors of all n workers. Raise on all ranks if any has a fault."""

    def _uplink(self, worker: int, call: int) -> tuple[str, Key]:
        # The name makes the workers' draws independent: RandK draws with `Key.shared`, which
        # ignores the rank.
        return f"uplink of worker {worker}", Key(self.seed, call, rank=worker)


class Simulated(ParameterServer):
    """All `n` workers in this process. Messages are not sent, but their traffic is counted."""

    def __init__(self, n: int, seed: int = 0) -> None:
        check_count("n", n)
        super().__init__(n, range(n), seed)

    def _encode(self, rows: Tensor, c: Compressor, call: int) -> tuple[None, Tensor]:
        names, keys = zip(*(self._uplink(worker, call) for worker in self.mine), strict=True)
        return None, c.round_trips(rows, names, keys)

    def _deliver(self, messages: Sequence[Uplink], faults: Faults) -> Decoded:
        if faults:
            raise _unusable(faults)
        return [message.decoded for message in messages]


class Ranks(ParameterServer):
    """One worker per rank. Every rank also computes the server's part.

    Every rank gathers and decodes all uplink messages, in the order of the workers. Downlink
    messages are never sent. All ranks must make the same calls.

    Args:
        group: the process group, in which rank i is worker i; None is the default group. Can also
            be an exchange, such as an :class:`torchcomp.InProcessExchange`.
        seed: the run's seed, the same on all ranks.
        device: device of the process group's messages; "cuda" for NCCL.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Exchange | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if not isinstance(group, Exchange):
            group = ProcessGroupExchange(group, device)
        self.exchange, rank = group, group.rank
        super().__init__(self.exchange.world_size, range(rank, rank + 1), seed)
        self.exchange.verify("the seed of compressed messages", {"seed": seed})

    def _encode(self, rows: Tensor, c: Compressor, call: int) -> tuple[Encoded, Tensor]:
        name, key = self._uplink(self.exchange.rank, call)
        own, decoded = _one(c, rows[0], name), torch.empty_like(rows)
        encoded = c.encode(rows[0], own, key)
        c.mean((encoded.parts,), decoded[0], own, key, 1)
        return encoded, decoded

    def _deliver(self, messages: Sequence[Uplink], faults: Faults) -> Decoded:
        layouts = [message.layout for message in messages]
        frames = Frames(layouts, self.exchange.device, self.exchange.checksum, [len(layouts)])
        parts = [own for message in messages if message.encoded for own in message.encoded.parts]
        received = self.exchange.all_gather_rows(frames.pack(parts))
        self.exchange.check(frames, received, range(self.n))
        # A rank with a fault has also sent its frame, so that no rank waits forever.
        if not self.exchange.conclude(torch.tensor(not faults), "the uplink", _ADVICE).wait():
            by_rank = self.exchange.gather_objects(faults)
            raise _unusable({i: why for own in by_rank for i, why in own.items()})
        by_message = zip(*frames.unpack(received), strict=True)
        return [self._decoded(*each) for each in zip(messages, by_message, strict=True)]

    def _decoded(self, message: Uplink, by_worker: Sequence[Parts]) -> Iterator[Tensor]:
        # A generator: only one worker's vector and the running sum are in memory.
        for worker, parts in enumerate(by_worker):
            out, compressor = torch.empty_like(message.decoded[0]), message.compressor
            name, key = self._uplink(worker, message.call)
            compressor.mean(((parts,),), out, _one(compressor, out, name), key, 1)
            yield out


def _one(compressor: Compressor, like: Tensor, name: str) -> Vectors:
    return Vectors.of(compressor, like.numel(), like.dtype, like.device, name)


def _unusable(faults: Faults) -> NonFiniteError:
    workers = [f"worker {i} ({why or 'NaN or infinity'})" for i, why in sorted(faults.items())]
    return NonFiniteError(
        f"cannot use the gradient of {', '.join(workers)}, so no part of this step was applied"
    )
