"""Background: where means are made beside what follows, each of them an :class:`Arrival`."""

from dataclasses import dataclass
from threading import Event

import torch

from torchcomp.bucket import Bucket
from torchcomp.ddp.executors import Executor
from torchcomp.ddp.transport import transport
from torchcomp.exchange import Exchange


class Arrival:
    """The mean of one bucket, on its way.

    Attributes:
        bucket: this rank's values, replaced by the mean.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._done = Event()
        self._on_device: torch.cuda.Event | None = None
        if bucket.flat.is_cuda:
            self._on_device = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._problem: Exception | None = None

    def average(self, exchange: Exchange) -> None:
        """Run by the executor."""
        try:
            exchange.sum(self.bucket.flat)
            self.bucket.flat.div_(exchange.world_size)
            if self._on_device is not None:
                self._on_device.record()
        except Exception as error:
            self._problem = error
        self._done.set()

    def wait(self) -> None:
        """Wait until the mean is there, on CUDA on the current stream only.

        Raises:
            Exception: what the exchange raised.
        """
        self._done.wait()
        if self._problem is not None:
            raise self._problem
        if self._on_device is not None:
            self._on_device.wait()


@dataclass
class Background:
    """A thread or a stream that makes means, one after another.

    Attributes:
        exchange: the ranks once more, for collectives beside those of the user and DDP.
        executor: runs what is submitted.
    """

    exchange: Exchange
    executor: Executor

    @classmethod
    def beside(cls, exchange: Exchange) -> "Background":
        """One for the ranks of `exchange`; all of them call this."""
        return cls(*transport(exchange.group, exchange.device))

    def submit(self, arrival: Arrival) -> None:
        """Make a mean."""
        self.executor.submit(lambda: arrival.average(self.exchange))
