"""Averages: how a synchronisation makes the parameters of all ranks equal."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.nn.parallel import DistributedDataParallel

from torchcomp.aggregators import Mean
from torchcomp.ddp.checks import bucket_caps, trained_parameters
from torchcomp.ddp.executors import transport
from torchcomp.engine.averager import Averager
from torchcomp.engine.bucket import Bucket, BucketShape, Group, merge, partition
from torchcomp.engine.keys import Key
from torchcomp.engine.nonfinite import FiniteWatch, largest_magnitudes
from torchcomp.engine.prepared import Prepared
from torchcomp.engine.profiling import span
from torchcomp.engine.state import Kind, Slot
from torchcomp.exchange import Exchange, ProcessGroupExchange
from torchcomp.exchange.traffic import Load
from torchcomp.local_sgd.method import LocalMethod
from torchcomp.specs.errors import RankFailureError

UNCHANGED = "No rank has averaged its parameters, and the residual is unchanged."

AT_EXIT_SECONDS = 60.0  # a process that ends, or has raised, waits so long for all-reduces

Future = torch.futures.Future[Tensor]


def average_in_place(exchange: Exchange, values: Tensor) -> None:
    """Replace `values` (1-D, contiguous) with their exact mean over the ranks."""
    exchange.all_reduce(values)
    # Divide last. Gradients are multiplied by the reciprocal before the sum, as in plain DDP. It is
    # rounded, always to the same side: weights that are averaged thousands of times would drift.
    values.div_(exchange.world_size)


@torch.no_grad()
def exact_mean(exchange: Exchange, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the means of tensors over the ranks, as new tensors in float32 or wider."""
    means: dict[str, Tensor] = {}
    for group in merge(((name,) for name in tensors), tensors):
        bucket = Bucket.read(BucketShape.of(group, tensors).wide(), tensors)
        average_in_place(exchange, bucket.flat)
        means |= bucket.tensors()
    return means


@dataclass(frozen=True)
class ExactMean(Mean):
    """The aggregator for ``compress="mean"``: the exact mean, which must be finite."""

    @property
    def transparent(self) -> bool:
        return False  # check for NaN, which would stay in the parameters for the rest of the run

    def aggregate(self, g: Tensor, bucket: Prepared, key: Key) -> None:
        average_in_place(bucket.exchange, g)


def require_finite(
    exchange: Exchange, finite: Tensor, where: str, tensors: Mapping[str, Tensor]
) -> None:
    """Raise NonFiniteError on every rank unless `finite`, a bool on the device, holds on all."""
    exchange.must_conclude = True  # also if no message was received in this step
    if not exchange.conclude(finite, where, UNCHANGED).wait():
        raise FiniteWatch(exchange).error(where, UNCHANGED, sorted(tensors.items()))


class Averages:
    """The exact mean of the parameters over the ranks, in float32 or wider, by `averager`."""

    def __init__(
        self,
        method: LocalMethod,
        exchange: ProcessGroupExchange,
        model: DistributedDataParallel,
    ) -> None:
        self._outer, parameters = method.outer, dict(trained_parameters(model))
        self.averager = Averager(
            ExactMean() if method.aggregator.transparent else method.aggregator,
            exchange,
            parameters,
            partition(parameters.items(), bucket_caps(model)),
            seed=method.seed,
            what="a parameter" if method.plain else "a pseudo-gradient",
            unchanged=UNCHANGED,
            client_slots=self._slots,
        )

    def start(self) -> None:
        """Prepare for local steps, right before the first one."""

    def synchronise(self, lr: float, step: int, dense_bytes: int) -> None:
        """Average after a round with the mean learning rate `lr`; raise on all ranks or none."""
        results = [self._average(group, lr) for group in self.averager.buckets]
        where = f"the synchronisation after step {step}"
        self.averager.finish(dense_bytes=dense_bytes, where=where)
        for bucket in results:
            bucket.write(self.averager.parameters)

    def wait(self, names: set[str] | None = None) -> None:
        """Wait until the named parameters (by default all) have their averages."""

    def close(self, timeout: float | None = None) -> None:
        """Wait for averages, at most `timeout` seconds, and end their thread and connections."""

    def _slots(self, shape: BucketShape) -> tuple[Slot, ...]:
        return ()

    def _read(self, group: Group) -> Bucket:
        # Wide: a sum in a narrower dtype than float32 would be rounded once for each rank.
        return Bucket.read(self.averager.shape_of(group).wide(), self.averager.parameters)

    def _average(self, group: Group, lr: float) -> Bucket:
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

    Nothing is lost: the sum of all m plus the mean residual (plus the server residual) is the sum
    of all mean pseudo-gradients. Only an all-reduce in a narrower dtype than float32 rounds.
    """

    def start(self) -> None:
        for group in self.averager.buckets:
            self._open(group)
        # Opening a slot has stored x, and begun a change, which no exchange will complete.
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
        # Otherwise the next y - x would contain the rounding of x.
        x.copy_(x.to(self.averager.shape_of(group).dtype))
        return Bucket(m.shape, x)

    def _slots(self, shape: BucketShape) -> tuple[Slot, ...]:
        kept = (Kind.ESTIMATE, shape.names, shape.sizes, shape.wide().dtype)
        first = lambda name, out: out.copy_(self._read((name,)).flat)  # noqa: E731
        reference = Slot("reference", *kept, equal=True, init=first)
        momentum = Slot("outer_momentum", *kept, equal=True)
        return (reference,) if self._outer is None else (reference, momentum)

    def _open(self, group: Group) -> list[tuple[Tensor, Tensor]]:
        device = self.averager.parameters[group[0]].device
        slots = self._slots(self.averager.shape_of(group))
        return [self.averager.state.open(slot, device) for slot in slots]


class OverlappedAverages(Averages):
    """The same exact mean, by async all-reduces; every layer waits for its own parameters."""

    def __init__(self, method: LocalMethod, exchange: ProcessGroupExchange, *rest: Any) -> None:
        super().__init__(method, exchange, *rest)
        self.async_exchange, self._executor = transport(exchange.group, exchange.device)
        self._running: list[tuple[Bucket, Future]] = []
        self._stopped = False
        self._finalizer = weakref.finalize(self, self._executor.close, AT_EXIT_SECONDS)

    def synchronise(self, lr: float, step: int, dense_bytes: int) -> None:
        # The groups run from the last layers to the first, and a forward pass needs these first.
        buckets = [self._read(group) for group in reversed(self.averager.buckets)]
        where, exchange = f"the parameters after step {step}", self.averager.exchange
        # Check before sending: later, there is no call in which all ranks raise together. A sum of
        # values of at most this size cannot overflow. NaN compares as false.
        small = [
            largest_magnitudes([each.flat], exchange.device)
            <= torch.finfo(each.flat.dtype).max / exchange.world_size
            for each in buckets
        ]
        values = {name: part for each in buckets for name, part in each.parts().items()}
        require_finite(exchange, torch.cat(small).all(), where, values)
        exchange.count(Load(summed=sum(bucket.flat.nbytes for bucket in buckets)))
        self.averager.finish(dense_bytes=dense_bytes, where=where)
        self._running = [(bucket, self._mean(i, bucket)) for i, bucket in enumerate(buckets)]

    def wait(self, names: set[str] | None = None) -> None:
        left = []
        for bucket, mean in self._running:
            if names is not None and names.isdisjoint(bucket.names):
                left.append((bucket, mean))
                continue
            if self._stopped and not mean.done():
                raise RankFailureError(
                    "another rank did not join an average: restart all ranks from their last "
                    "checkpoint"
                )
            with span("wait"):
                mean.wait()
            bucket.write(self.averager.parameters)
        # Not before: if an average failed, later calls must raise as well.
        self._running = left

    def close(self, timeout: float | None = None) -> None:
        if self._finalizer.detach() is not None:
            self._executor.close(timeout)
            self._stopped = True
            with suppress(Exception):  # later calls of wait() raise it
                self.wait()
                self.async_exchange.close()

    def _mean(self, number: int, bucket: Bucket) -> Future:
        # With a device, wait() blocks the stream, not the host.
        device = bucket.flat.device
        future: Future = torch.futures.Future(devices=[device] if bucket.flat.is_cuda else [])

        def make() -> None:
            try:
                with span("average", number):
                    average_in_place(self.async_exchange, bucket.flat)
                future.set_result(bucket.flat)
            except Exception as error:  # uncaught, wait() would hang
                future.set_exception(error)  # type: ignore[arg-type]

        self._executor.submit(make)
        return future


def wait_in_forward(model: nn.Module, averages: OverlappedAverages) -> Iterator[Any]:
    """Make every layer, and ``state_dict``, wait for what they read; yield the hooks' handles."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        everything = _waiter(averages, None)
        yield module.register_state_dict_pre_hook(everything)  # type: ignore[no-untyped-call]
    for layer in _layers(model):
        # With those of its children, which it can read without calling them.
        needed = {names[id(p)].replace("_orig_mod.", "") for p in layer.parameters()}
        yield layer.register_forward_pre_hook(_waiter(averages, needed))


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    # Wait in front of a whole compiled module: a hook inside would break its graph.
    compiled = isinstance(module, OptimizedModule) or module._compiled_call_impl is not None
    if compiled or any(True for _ in module.parameters(recurse=False)):
        yield module
        return
    for child in module.children():
        yield from _layers(child)


def _waiter(averages: OverlappedAverages, names: set[str] | None) -> Any:
    def wait(*args: Any) -> None:
        averages.wait(names)

    return torch.compiler.disable(wait)  # type: ignore[no-untyped-call]
