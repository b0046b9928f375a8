"""Star: n workers around a server, and everything that travels between them.

A method is written once, against :class:`Star`: what a worker computes is a row for each worker of
this process, what the server computes is a vector. :class:`Simulated` holds all workers in one
process; :class:`~torchcomp.algorithms.ranks.Ranks` has one a rank. Both decode the same messages in
the same order, so that they agree bit for bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from torchcomp import wire
from torchcomp.checks import check_count
from torchcomp.compressors import Compressor, Identity
from torchcomp.errors import NonFiniteError
from torchcomp.keys import Key, check_seed, tensor_id
from torchcomp.wire import Layout, Parts

DENSE = Identity()


@dataclass
class Traffic:
    """What one worker and the server have sent each other; the same for every worker.

    Attributes:
        up_coordinates: values sent by the worker; indices, scales and headers are not counted.
        down_coordinates: values sent to the worker.
        up_bytes: bytes of the frames sent by the worker, all included.
        down_bytes: bytes of the frames sent to the worker, all included.
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
class Message:
    """One message of every worker of this process to the server.

    Attributes:
        compressor: what made it.
        call: number of the message, the same on all workers.
        parts: fields of each worker's message.
        decoded: what the messages stand for; (workers of this process, d).
        faulty: workers whose vector held a NaN or an infinity.
    """

    compressor: Compressor
    call: int
    parts: tuple[Parts, ...]
    decoded: Tensor
    faulty: tuple[int, ...]

    @property
    def layout(self) -> Layout:
        """Fields of one worker's message."""
        return self.compressor.layout(self.decoded.shape[1], self.decoded.dtype)


class Star(ABC):
    """The communication of a method with a server.

    Args:
        n: number of workers, all together.
        mine: those of this process.
        seed: the run's seed, equal everywhere; all randomness of the messages comes from it.

    Attributes:
        traffic: what has been sent since the start.
        explain: says what is known about a fault of this process's workers; "" is nothing.

    Raises:
        SpecError: if n or the seed is not a whole number in its range.
    """

    def __init__(self, n: int, mine: range, seed: int) -> None:
        check_count("n", n)
        check_seed(seed)
        self.n, self.mine, self.seed = n, mine, seed
        self.traffic = Traffic()
        self.explain: Callable[[], str] = lambda: ""
        # A draw of RandK is shared by all who hold the key: workers differ in the vector's name.
        self._uplinks = [tensor_id(f"uplink of worker {i}") for i in range(n)]

    def encode(self, vectors: Tensor, compressor: Compressor, call: int) -> Message:
        """Compress one vector of every worker of this process; nothing is sent yet.

        Args:
            vectors: (workers of this process, d), of any floating-point dtype.
            compressor: used by each worker independently.
            call: number of the message: two messages of a run must not share it.
        """
        d, dtype = vectors.shape[1], vectors.dtype
        parts, decoded = [], torch.empty_like(vectors)
        for row, vector, worker in zip(decoded, vectors, self.mine, strict=True):
            key = self._uplink_key(worker, call)
            parts.append(compressor.compress(vector, key))
            row.copy_(compressor.decompress(parts[-1], d, dtype, key))
        return Message(compressor, call, tuple(parts), decoded, _faulty(vectors, self.mine))

    def up(self, *messages: Message) -> list[Tensor]:
        """Send messages to the server together.

        Returns:
            For each message the mean over all n workers, 1-D, summed in the order of the workers.

        Raises:
            NonFiniteError: on all ranks, if a worker's vector held a NaN or an infinity; names it.
            WireError: on all ranks, if a frame was damaged on the way.
        """
        layout = tuple(field for message in messages for field in message.layout)
        self.traffic.up_coordinates += sum(_coordinates(m) for m in messages)
        self.traffic.up_bytes += wire.framed(wire.nbytes(layout))
        self.traffic.round_trips += 1
        return self._means(messages, layout)

    def down(self, vector: Tensor, compressor: Compressor, call: int) -> Tensor:
        """Compress the server's vector and send it to all workers; 1-D, as they decode it."""
        d, dtype = vector.numel(), vector.dtype
        key = Key(self.seed, call, tensor_id("downlink"))
        parts = compressor.compress(vector, key)
        self._count_down(compressor, d, dtype)
        return compressor.decompress(parts, d, dtype, key)

    def broadcast(self, *vectors: Tensor) -> tuple[Tensor, ...]:
        """Send the server's vectors to all workers as they are."""
        for vector in vectors:
            self._count_down(DENSE, vector.numel(), vector.dtype)
        return vectors

    @abstractmethod
    def _means(self, messages: Sequence[Message], layout: Layout) -> list[Tensor]:
        """The mean of each message over all workers."""

    def _faulty(self, messages: Sequence[Message]) -> dict[int, str]:
        """Workers of this process whose messages cannot be used, and what is known of the cause."""
        return {worker: self.explain() for message in messages for worker in message.faulty}

    def _count_down(self, compressor: Compressor, d: int, dtype: torch.dtype) -> None:
        self.traffic.down_coordinates += compressor.kept(d)
        self.traffic.down_bytes += wire.framed(wire.nbytes(compressor.layout(d, dtype)))

    def _uplink_key(self, worker: int, call: int) -> Key:
        return Key(self.seed, call, self._uplinks[worker], worker)

    def _mean(self, decoded: Iterable[Tensor]) -> Tensor:
        # One by one: a sum along an axis may add in another order on another machine.
        rows = iter(decoded)
        total = next(rows).clone()
        for row in rows:
            total += row
        return total / self.n

    def state_dict(self) -> dict[str, int]:
        """The traffic so far."""
        return asdict(self.traffic)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over the traffic of an earlier run."""
        self.traffic = Traffic(**state)


class Simulated(Star):
    """All n workers in this process: nothing is sent, everything is counted.

    Args:
        n: number of workers.
        seed: the run's seed.
    """

    def __init__(self, n: int, seed: int = 0) -> None:
        super().__init__(n, range(n) if isinstance(n, int) else range(0), seed)

    def _means(self, messages: Sequence[Message], layout: Layout) -> list[Tensor]:
        faulty = self._faulty(messages)
        if faulty:
            raise NonFiniteError(unusable(faulty))
        return [self._mean(message.decoded) for message in messages]


def unusable(faults: dict[int, str]) -> str:
    """The text of the error about these workers: what each says about its fault, if anything."""
    told = [f"worker {i} ({why or 'NaN or infinity'})" for i, why in sorted(faults.items())]
    advice = "NaN and infinities come from too large a step size, or a function undefined there"
    return (
        f"the gradient of {', '.join(told)} cannot be used, so nothing of this step was applied"
        f"{'' if all(faults.values()) else f'. {advice}'}"
    )


def _coordinates(message: Message) -> int:
    return message.compressor.kept(message.decoded.shape[1])


def _faulty(vectors: Tensor, workers: range) -> tuple[int, ...]:
    if vectors.isfinite().all():
        return ()
    finite = vectors.isfinite().all(1).tolist()
    return tuple(i for i, good in zip(workers, finite, strict=True) if not good)
