"""Averages: how a synchronisation makes the parameters of all ranks equal."""

import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcomp.aggregators import Mean
from torchcomp.averager import Averager
from torchcomp.bucket import Bucket, BucketShape, Group
from torchcomp.ddp.executors import transport
from torchcomp.errors import RankFailureError
from torchcomp.exchange import ProcessGroupExchange
from torchcomp.keys import Key
from torchcomp.local_sgd.options import LocalMethod, Parameters
from torchcomp.means import average_in_place
from torchcomp.nonfinite import FiniteWatch
from torchcomp.prepared import Prepared
from torchcomp.profiling import span
from torchcomp.state import Kind, Slot
from torchcomp.traffic import Load

UNCHANGED = "No rank has averaged its parameters, and the residual is unchanged."

AT_EXIT_SECONDS = 60.0
"""How long a process that ends, or has raised, waits for overlapped all-reduces.

Another rank may still wait for them, for example to save its model: they get the time that they
need, except behind a rank that never joins.
"""

Future = torch.futures.Future[Tensor]
Due = Sequence[tuple[Group, float]]
"""Groups of parameters to average, each with the mean learning rate of its round."""


@dataclass(frozen=True)
class ExactMean(Mean):
    """The aggregator for ``compress="mean"``: the exact mean, which must be finite."""

    @property
    def transparent(self) -> bool:
        # Plain DDP passes a NaN gradient on, and the user can skip the step. A NaN in an averaged
        # parameter would stay for the rest of the run, so the averager has to check for it.
        return False

    def aggregate(self, g: Tensor, bucket: Prepared, key: Key) -> None:
        average_in_place(bucket.exchange, g)


class Averages:
    """The exact mean of the parameters over the ranks, in float32 or wider.

    Attributes:
        averager: does the exchange, counts bytes and stores the parameters, including late ones.
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
            ExactMean() if method.aggregator.transparent else method.aggregator,
            exchange,
            parameters,
            groups,
            seed=method.seed,
            # fragments_of() merges within a fragment. A bucket must not span two fragments, which
            # synchronise at different steps.
            merged=False,
            what="a parameter" if method.plain else "a pseudo-gradient",
            unchanged=UNCHANGED,
            client_slots=self._slots,
        )

    def start(self, groups: Iterable[Group]) -> None:
        """Prepare for local steps on these parameters, right before the first one."""

    def synchronise(self, due: Due, step: int, dense_bytes: int) -> None:
        """Average the `due` groups over the ranks after `step` steps, and update the parameters.

        If this raises, it raises on every rank and no parameter has changed.
        """
        results = [self._average(group, lr) for group, lr in due]
        where = f"the synchronisation after step {step}"
        self.averager.finish(dense_bytes=dense_bytes, where=where)
        # Only now: finish() raises if any group failed on any rank, and then no rank may write.
        for bucket in results:
            bucket.write(self.averager.parameters)

    def wait(self, names: set[str] | None = None) -> None:
        """Wait until the named parameters (by default all) have their averages.

        Raises:
            RankFailureError: if another rank was lost, at this call and at each one after it.
        """

    def stop(self) -> None:
        """End after an error: wait for averages, but not for a rank that never joins them."""

    def _slots(self, shape: BucketShape) -> tuple[Slot, ...]:
        return ()

    def _read(self, group: Group) -> Bucket:
        """The parameters of a group, in float32 or wider."""
        # A sum of bfloat16 or float16 values would be rounded once for each rank.
        return Bucket.read(self.averager.shape_of(group).wide(), self.averager.parameters)

    def _average(self, group: Group, lr: float) -> Bucket:
        """The new values of a group's parameters."""
        bucket = self._read(group)
        self.averager.average(bucket)
        return bucket


class PseudoGradients(Averages):
    """The mean pseudo-gradient since the last synchronisation, by any aggregator.

    Let x be the parameters of the last synchronisation, which are the same on all ranks, and y this
    rank's parameters now. The pseudo-gradient is y - x.

    1. m <- the aggregator's estimate of the mean of y - x over the ranks
    2. x <- x + m, or the outer step from x along m, rounded to the dtype of the parameters
    3. y <- x

    m and x are the same on all ranks, bit for bit. Nothing is lost: the sum of all m plus the mean
    residual (plus the server residual) is the sum of all mean pseudo-gradients. This is exact up to
    rounding in float32 or wider. An all-reduce in a narrower dtype, as in ``ef(cast("bf16"))``, is
    the exception. It rounds away up to 1e-3 of the pseudo-gradients, which no residual keeps.
    """

    def start(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self._open(group)
        # Opening a slot stores its first value: x = the parameters before any local step. It also
        # begins a change, which no exchange will complete, so discard that.
        self.averager.state.rollback()

    def _average(self, group: Group, lr: float) -> Bucket:
        m, outer = self._read(group), self._outer
        (before, x), *momenta = self._open(group)
        # 1. m <- the estimated mean of y - x
        m.flat.sub_(before)
        self.averager.average(m)
        # 2. x <- x + m, or the outer step
        if outer is None:
            torch.add(before, m.flat, out=x)
        else:
            x.copy_(before)
            for momentum, u in momenta:
                outer.apply(x, m.flat, u.copy_(momentum), lr)
        # Round x to what the parameters can store. Otherwise the next y - x would contain this
        # rounding error as if local steps had made it. synchronise() then does 3., y <- x.
        x.copy_(x.to(self.averager.shape_of(group).dtype))
        return Bucket(m.shape, x)

    def _slots(self, shape: BucketShape) -> tuple[Slot, ...]:
        # ESTIMATE: neither is an unsent gradient.
        kept = (Kind.ESTIMATE, shape.names, shape.sizes, shape.wide().dtype)
        reference = Slot("reference", *kept, equal=True, init=self._first_reference)
        momentum = Slot("outer_momentum", *kept, equal=True)
        return (reference,) if self._outer is None else (reference, momentum)

    def _open(self, group: Group) -> list[tuple[Tensor, Tensor]]:
        device = self.averager.parameters[group[0]].device
        slots = self._slots(self.averager.shape_of(group))
        return [self.averager.state.open(slot, device) for slot in slots]

    def _first_reference(self, name: str, out: Tensor) -> None:
        out.copy_(self._read((name,)).flat)


class OverlappedAverages(Averages):
    """The same exact mean, by async all-reduces that overlap with the code after the step.

    Every layer waits for its own parameters before it computes. Earlier layers, and code that reads
    no parameter, run without waiting.

    Attributes:
        async_exchange: issues the all-reduces. With gloo it has its own process group, because
            DDP and the user issue collectives from another thread.
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
        self._stopped = False
        self._finalizer = weakref.finalize(self, self._executor.close, AT_EXIT_SECONDS)

    def close(self) -> None:
        """End the thread and the connections of the all-reduces, after all of them."""
        if self._finalizer.detach() is not None:
            self._executor.close()
            self.async_exchange.close()

    def synchronise(self, due: Due, step: int, dense_bytes: int) -> None:
        # The groups run from the last layers to the first. The next forward pass needs the first
        # layers first, so their all-reduce is issued first.
        buckets = [self._read(group) for group, _ in reversed(due)]
        where = f"the parameters after step {step}"
        # Check before sending: once optimizer.step() has returned, there is no call in which all
        # ranks could still raise together.
        self._require_finite(buckets, where)
        # Counted now, although they move later: the counters of a step do not change after it.
        nbytes = sum(bucket.flat.nbytes for bucket in buckets)
        self.averager.exchange.count(Load(summed=nbytes))
        self.averager.finish(dense_bytes=dense_bytes, where=where)
        self._running = [(bucket, self._mean(i, bucket)) for i, bucket in enumerate(buckets)]
        # Parameters added after the start can belong to modules without a waiting hook.
        self.wait(set(self.averager.parameters) - self._of_layers)

    def wait(self, names: set[str] | None = None) -> None:
        left = []
        for bucket, mean in self._running:
            if names is None or not names.isdisjoint(bucket.names):
                if self._stopped and not mean.done():
                    raise RankFailureError(
                        "an exception has ended the local steps while the parameters were being "
                        "averaged, and another rank did not join. Restart all ranks from their "
                        "last checkpoint"
                    )
                with span("wait"):
                    mean.wait()
                bucket.write(self.averager.parameters)
            else:
                left.append((bucket, mean))
        # Only now: if an average failed, later calls must raise as well.
        self._running = left

    def stop(self) -> None:
        if self._finalizer.detach() is None:
            return
        self._stopped = True
        self._executor.close(AT_EXIT_SECONDS)
        with suppress(Exception):  # the error of the caller is on its way
            self.wait()
            self.async_exchange.close()

    def _mean(self, number: int, bucket: Bucket) -> Future:
        """Start the async all-reduce of a bucket."""
        device = bucket.flat.device
        # A future with a device records CUDA events: wait() then blocks the stream, not the host.
        future: Future = torch.futures.Future(devices=[device] if bucket.flat.is_cuda else [])

        def make() -> None:
            try:
                with span("average", number):
                    average_in_place(self.async_exchange, bucket.flat)
                future.set_result(bucket.flat)
            except Exception as error:
                # An uncaught error would end the executor's thread, and wait() would hang.
                future.set_exception(error)  # type: ignore[arg-type]

        self._executor.submit(make)
        return future

    def _require_finite(self, buckets: list[Bucket], where: str) -> None:
        """Raise on every rank if the values of any rank, or their sum, overflow."""
        exchange = self.averager.exchange
        # On the device, because a test of each bucket on the host would wait for each.
        finite = torch.ones((), dtype=torch.bool, device=exchange.device)
        watch = FiniteWatch(exchange)
        for bucket in buckets:
            watch.before(bucket)
            if bucket.flat.numel():
                lowest, highest = torch.aminmax(bucket.flat)
                # world_size values of at most this size cannot overflow when they are added up.
                limit = torch.finfo(bucket.flat.dtype).max / exchange.world_size
                # Written so that NaN, which compares as false, counts as not finite.
                finite &= (lowest >= -limit) & (highest <= limit)
        # conclude() skips its collective if no message was received in this step. Here the ranks
        # have exchanged nothing yet, and each has looked only at its own values.
        exchange.must_conclude = True
        if not exchange.conclude(finite, where, UNCHANGED):
            raise watch.error(where, UNCHANGED)
