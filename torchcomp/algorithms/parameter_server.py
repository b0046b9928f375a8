"""A parameter server with n workers, and everything that travels between them.

A method is written once, against :class:`ParameterServer`: what workers compute is a row for each
worker of this process, what the server computes is a vector. :class:`Simulated` holds all workers
in one process, :class:`Ranks` has one worker per rank. Both decode the same messages in the same
order, so they agree bit for bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from torchcomp import wire
from torchcomp.checks import check_count
from torchcomp.codec import Codec, Vector
from torchcomp.compressors import Compressor, Identity
from torchcomp.compressors.base import Encoded
from torchcomp.errors import NonFiniteError
from torchcomp.exchange import Exchange, ProcessGroupExchange
from torchcomp.keys import Key, check_seed, tensor_id
from torchcomp.wire import Parts

DENSE = Identity()

_ADVICE = "Nothing of this iteration was applied; all ranks must run the same code on sound links."


@dataclass
class ServerTraffic:
    """What one worker and the server have sent each other; the same for every worker.

    Attributes:
        up_coordinates, down_coordinates: values sent by the worker, and to it; indices, scales and
            headers are not counted.
        up_bytes, down_bytes: bytes of the frames that held them, all included.
        round_trips: how often a worker waited for the server.
    """

    up_coordinates: int = 0
    down_coordinates: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    round_trips: int = 0

    @property
    def coordinates(self) -> int:
        """Values sent in both directions."""
        return self.up_coordinates + self.down_coordinates

    @property
    def nbytes(self) -> int:
        """Bytes sent in both directions."""
        return self.up_bytes + self.down_bytes


@dataclass(frozen=True)
class Uplink:
    """One message from every worker of this process to the server."""

    compressor: Compressor
    call: int  # the number of the message, the same on all workers
    encoded: list[Encoded]  # each worker's message
    decoded: Tensor  # the messages' values; (workers of this process, d)
    faulty: list[int]  # workers whose vector held a NaN or an infinity


Messages = tuple[Uplink, ...]
Faults = dict[int, str]
Decoded = Sequence[Iterable[Tensor]]


class ParameterServer(ABC):
    """The communication of a method between a server and its workers.

    Attributes:
        n: number of workers, all together.
        mine: those of this process.
        seed: the run's seed, the same everywhere; all randomness of messages comes from it.
        traffic: what has been sent since the start.
        explain: says what is known about a fault of this process's workers; "" is nothing.
    """

    def __init__(self, n: int, mine: range, seed: int) -> None:
        check_seed(seed)
        self.n, self.mine, self.seed = n, mine, seed
        self.traffic = ServerTraffic()
        self.explain: Callable[[], str] = lambda: ""

    def encode(self, vectors: Tensor, compressor: Compressor, call: int) -> Uplink:
        """Compress a row for every worker of this process; nothing is sent yet.

        `call` is the number of the message: two messages of a run must not share it.
        """
        encoded, decoded = [], torch.empty_like(vectors)
        for row, vector, worker in zip(decoded, vectors, self.mine, strict=True):
            key = self._uplink_key(worker, call)
            encoded.append(compressor.encode(vector, key))
            compressor.decode(encoded[-1].parts, row, key)
        finite = vectors.isfinite().all(1).tolist()
        faulty = [worker for worker, good in zip(self.mine, finite, strict=True) if not good]
        return Uplink(compressor, call, encoded, decoded, faulty)

    def up(self, *messages: Uplink) -> list[Tensor]:
        """Send messages together; of each, the mean over all n workers, 1-D.

        Raises:
            NonFiniteError: on all ranks, if a worker's vector held a NaN or an infinity; names it.
            WireError: on all ranks, if a frame was damaged on the way.
        """
        vectors = []
        for message in messages:
            d, compressor = message.decoded.shape[1], message.compressor
            layout = compressor.layout(d, message.decoded.dtype)
            vectors.append(Vector("uplink", slice(d), compressor, layout))
            self.traffic.up_coordinates += compressor.kept(d)
        codec = Codec(tuple(vectors))
        self.traffic.up_bytes += codec.framed
        self.traffic.round_trips += 1
        faults = {worker: self.explain() for message in messages for worker in message.faulty}
        delivered = self._deliver(messages, codec, faults)
        # One at a time, by worker: a sum along an axis may add in another order elsewhere.
        return [reduce(torch.add, rows) / self.n for rows in delivered]

    def uplink(self, vectors: Tensor, compressor: Compressor, call: int) -> tuple[Tensor, Tensor]:
        """Encode and send one message: what this process's workers sent, and the mean of all."""
        message = self.encode(vectors, compressor, call)
        return message.decoded, self.up(message)[0]

    def down(self, vector: Tensor, compressor: Compressor = DENSE, call: int = 0) -> Tensor:
        """Send the server's vector to all workers; 1-D, as they decode it."""
        d, dtype = vector.numel(), vector.dtype
        self.traffic.down_coordinates += compressor.kept(d)
        self.traffic.down_bytes += wire.framed(wire.nbytes(compressor.layout(d, dtype)))
        key = Key(self.seed, call, tensor_id("downlink"))
        parts = compressor.encode(vector, key).parts
        return compressor.decode(parts, torch.empty_like(vector), key)

    @abstractmethod
    def _deliver(self, messages: Messages, codec: Codec, faults: Faults) -> Decoded:
        """For each message the vectors of all n workers; raises if any worker has a fault."""

    def _uplink_key(self, worker: int, call: int) -> Key:
        # RandK draws are shared by all who hold the key: workers differ in the vector's name.
        return Key(self.seed, call, tensor_id(f"uplink of worker {worker}"), worker)


class Simulated(ParameterServer):
    """All `n` workers in this process: nothing is sent, everything is counted.

    Workers are rows of one tensor, which is faster than a thread for each
    (``Ranks(exchange)`` in :func:`torchcomp.run_in_process`).

    Raises:
        SpecError: if n or the seed is not a whole number in its range.
    """

    def __init__(self, n: int, seed: int = 0) -> None:
        check_count("n", n)
        super().__init__(n, range(n), seed)

    def _deliver(self, messages: Messages, codec: Codec, faults: Faults) -> Decoded:
        if faults:
            raise _unusable(faults)
        return [message.decoded for message in messages]


class Ranks(ParameterServer):
    """One worker per rank, and the server's part on every rank.

    Every rank gathers all workers' messages, decodes them in the order of the workers and computes
    what the server computes. Downlink messages never travel, but n - 1 messages reach every rank.

    All ranks make the same calls in the same order. A second, tiny collective finds damaged frames.

    Args:
        group: the process group, whose rank i is worker i; None is the default group. Or an
            exchange, such as an :class:`torchcomp.InProcessExchange`.
        seed: the run's seed, the same on all ranks.
        device: where the process group's messages live; "cuda" for NCCL.

    Raises:
        SpecError: if the seed is not a whole number in its range.
        RankMismatchError: if the ranks have been given different seeds.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Exchange | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.exchange: Exchange = (
            group if isinstance(group, Exchange) else ProcessGroupExchange(group, device)
        )
        rank = self.exchange.rank
        super().__init__(self.exchange.world_size, range(rank, rank + 1), seed)
        self.exchange.verify("the seed of compressed messages", {"seed": seed})

    def _deliver(self, messages: Messages, codec: Codec, faults: Faults) -> Decoded:
        frame = torch.empty(codec.framed, dtype=torch.uint8, device=self.exchange.device)
        codec.pack([message.encoded[0] for message in messages], frame)
        frames = enumerate(self.exchange.all_gather(frame))
        received = [self.exchange.receive(i, each, codec.nbytes) for i, each in frames]
        if not self.exchange.conclude(torch.tensor(not faults), "an uplink", _ADVICE):
            everyone = self.exchange.gather_objects(faults)
            raise _unusable({i: why for own in everyone for i, why in own.items()})
        arrived = zip(*map(codec.unpack, received), strict=True)
        return [self._decoded(*each) for each in zip(messages, arrived, strict=True)]

    def _decoded(self, message: Uplink, everyone: Sequence[Parts]) -> Iterator[Tensor]:
        for worker, parts in enumerate(everyone):
            out = torch.empty_like(message.decoded[0])
            yield message.compressor.decode(parts, out, self._uplink_key(worker, message.call))


def _unusable(faults: Faults) -> NonFiniteError:
    """The error about these workers: what each says about its fault, if anything."""
    told = [f"worker {i} ({why or 'NaN or infinity'})" for i, why in sorted(faults.items())]
    advice = "NaN and infinities come from too large a step size, or a function undefined there"
    return NonFiniteError(
        f"the gradient of {', '.join(told)} cannot be used, so nothing of this step was applied"
        f"{'' if all(faults.values()) else f'. {advice}'}"
    )
