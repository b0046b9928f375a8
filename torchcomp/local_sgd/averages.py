"""Averages: how a synchronisation makes the ranks' parameters equal."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcomp.aggregators import Mean
from torchcomp.averager import Averager, average_in_place
from torchcomp.bucket import Bucket, BucketShape, Group
from torchcomp.ddp.executors import transport
from torchcomp.exchange import Exchange, ProcessGroupExchange
from torchcomp.keys import Key
from torchcomp.local_sgd.options import LocalMethod, Parameters
from torchcomp.nonfinite import FiniteWatch
from torchcomp.state import Kind, Slot, State

UNCHANGED = "No rank has averaged its parameters, and the residual is what it was."

Future = torch.futures.Future[Tensor]
Due = Sequence[tuple[Group, float]]
"""Groups of parameters to average, each with the mean learning rate of its round."""


@dataclass(frozen=True)
class ExactMean(Mean):
    """What ``compress="mean"`` stands for: the exact mean, and an error if it is not finite."""

    @property
    def transparent(self) -> bool:
        return False

    def aggregate(self, bucket: Bucket, exchange: Exchange, state: State, key: Key) -> None:
        average_in_place(exchange, bucket.flat)


class Averages:
    """The exact mean of the parameters over the ranks, in float32 or wider.

    Attributes:
        averager: exchanges, counts, and holds the parameters, late ones included.
    """

    def __init__(
        self,
        method: LocalMethod,
        exchange: ProcessGroupExchange,
        parameters: Parameters,
        groups: Sequence[Group],
    ) -> None:
        self._outer = method.outer
        self.averager = Averager(
            ExactMean() if method.plain else method.aggregator,
            exchange,
            parameters,
            groups,
            seed=method.seed,
            merged=False,
            what="a parameter" if method.plain else "a pseudo-gradient",
            unchanged=UNCHANGED,
            client_slots=self._slots,
        )

    def start(self, groups: Iterable[Group]) -> None:
        """The next local step is the first one that changes these parameters."""

    def synchronise(self, due: Due, step: int, dense_bytes: int) -> None:
        """Exchange what the ranks have after `step` steps, and give the parameters new values.

        If this raises, on all ranks, no parameter has changed.
        """
        results = [self._average(group, lr) for group, lr in due]
        where = f"the synchronisation after step {step}"
        self.averager.finish(dense_bytes=dense_bytes, where=where)
        for bucket in results:
            bucket.write(self.averager.parameters)

    def wait(self, names: set[str] | None = None) -> None:
        """Wait until parameters (by default all) have their averages."""

    def _slots(self, shape: BucketShape) -> tuple[Slot, ...]:
        return ()

    def _read(self, group: Group) -> Bucket:
        """The parameters of a group, in float32 or wider."""
        return Bucket.read(self.averager.shape_of(group).wide(), self.averager.parameters)

    def _average(self, group: Group, lr: float) -> Bucket:
        """The new values of a group's parameters."""
        bucket = self._read(group)
        self.averager.average(bucket)
        return bucket


class PseudoGradients(Averages):
    """The mean pseudo-gradient since the last synchronisation, by any aggregator, and what follows.

    With x the parameters of the last synchronisation, the same on all ranks, and y this rank's:

    1. m <- the aggregator's estimate of the mean of y - x over the ranks
    2. x <- x + m, or the outer step from x along m, rounded to the dtype of the parameters
    3. y <- x

    m and x are the same on all ranks bit for bit. Nothing is lost: the sum of all m plus the mean
    residual (plus the server residual) is the sum of all mean pseudo-gradients, up to rounding in
    float32 or wider. An all-reduce in a narrower dtype, as in ``ef(cast("bf16"))``, is an
    exception: no residual sees what it rounds away, up to 1e-3 of the pseudo-gradients.
    """

    def start(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self._open(group)
        self.averager.state.rollback()  # nothing is in flight: this was for the first values

    def _average(self, group: Group, lr: float) -> Bucket:
        m, outer = self._read(group), self._outer
        (before, x), *momenta = self._open(group)
        m.flat.sub_(before)
        self.averager.average(m)
        x.copy_(before)
        if outer is None:
            x.add_(m.flat)
        else:
            for momentum, u in momenta:
                outer.apply(x, m.flat, u.copy_(momentum), lr)
        result = Bucket(m.shape, x)
        for name, values in result.tensors().items():
            values.copy_(values.to(self.averager.parameters[name].dtype))
        return result

    def _slots(self, shape: BucketShape) -> tuple[Slot, ...]:
        kept = (Kind.ESTIMATE, shape.names, shape.sizes, shape.wide().dtype)
        reference = Slot("reference", *kept, init=self._first_reference)
        momentum = Slot("outer_momentum", *kept)
        return (reference,) if self._outer is None else (reference, momentum)

    def _open(self, group: Group) -> list[tuple[Tensor, Tensor]]:
        device = self.averager.parameters[group[0]].device
        slots = self._slots(self.averager.shape_of(group))
        return [self.averager.state.open(slot, device) for slot in slots]

    def _first_reference(self, name: str, out: Tensor) -> None:
        out.copy_(self._read((name,)).flat)


class OverlappedAverages(Averages):
    """The same means, made by async all-reduces that overlap with what follows the optimizer step.

    Every layer waits for its own parameters before it computes; the layers in front of it, and
    whatever reads no parameter, go on. `async_exchange` is for collectives beside those of the user
    and DDP, and `close` ends the executor.
    """

    def __init__(
        self,
        method: LocalMethod,
        exchange: ProcessGroupExchange,
        parameters: Parameters,
        groups: Sequence[Group],
    ) -> None:
        super().__init__(method, exchange, parameters, groups)
        self.async_exchange, self._executor = transport(exchange.group, exchange.device)
        self._of_layers = frozenset(parameters)
        self._running: list[tuple[Bucket, Future]] = []
        self.close = weakref.finalize(self, self._executor.close)

    def synchronise(self, due: Due, step: int, dense_bytes: int) -> None:
        # The last group first: groups go from the end of the model to its beginning, where the next
        # forward pass begins.
        buckets = [self._read(group) for group, _ in reversed(due)]
        where = f"the parameters after step {step}"
        self._require_finite(buckets, where)
        self.averager.finish(dense_bytes=dense_bytes, where=where)
        self._running = [(bucket, self._mean(bucket)) for bucket in buckets]
        # No layer waits for parameters that came late, because their modules may be new.
        self.wait(set(self.averager.parameters) - self._of_layers)

    def wait(self, names: set[str] | None = None) -> None:
        running, self._running = self._running, []
        for bucket, mean in running:
            if names is None or not names.isdisjoint(bucket.names):
                mean.wait()
                bucket.write(self.averager.parameters)
            else:
                self._running.append((bucket, mean))
        if names is None:
            self.averager.count(self.async_exchange.take_traffic(0))

    def _mean(self, bucket: Bucket) -> Future:
        """Let the executor make the mean of a bucket; to wait for it makes the stream wait."""
        device = bucket.flat.device
        future: Future = torch.futures.Future(devices=[device] if bucket.flat.is_cuda else [])

        def make() -> None:
            try:
                average_in_place(self.async_exchange, bucket.flat)
                future.set_result(bucket.flat)
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]

        self._executor.submit(make)
        return future

    def _require_finite(self, buckets: list[Bucket], where: str) -> None:
        """Learn before anything is sent whether some rank's values, or their sum, overflow."""
        exchange, finite = self.averager.exchange, True
        watch = FiniteWatch(exchange)
        for bucket in buckets:
            watch.before(bucket)
            if bucket.flat.numel():
                lowest, highest = torch.aminmax(bucket.flat)
                limit = torch.finfo(bucket.flat.dtype).max / exchange.world_size
                finite &= bool((lowest >= -limit) & (highest <= limit))  # not if one is NaN
        exchange.concludes = True  # ranks must be asked, as no frame has come in
        if not exchange.conclude(torch.tensor(finite, device=exchange.device), where, UNCHANGED):
            raise watch.error(where, UNCHANGED)
