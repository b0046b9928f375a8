"""Averages: how a synchronisation makes the parameters of all ranks equal, and further state."""

import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule

from torchcomp.aggregators import Mean
from torchcomp.ddp.executors import transport
from torchcomp.engine.averager import Averager
from torchcomp.engine.bucket import Bucket, BucketShape, Group
from torchcomp.engine.keys import Key
from torchcomp.engine.means import average_in_place, exact_mean
from torchcomp.engine.nonfinite import FiniteWatch, all_finite, largest_magnitudes
from torchcomp.engine.prepared import Prepared
from torchcomp.engine.profiling import span
from torchcomp.engine.state import Kind, Slot
from torchcomp.exchange import Exchange, ProcessGroupExchange
from torchcomp.exchange.traffic import Load
from torchcomp.local_sgd.method import LocalMethod, Optimizers, Parameters
from torchcomp.specs.errors import RankFailureError, SpecError

UNCHANGED = "No rank has averaged its parameters, and the residual is unchanged."

AT_EXIT_SECONDS = 60.0
"""How long a process that ends, or has raised, waits for all-reduces that others may need."""

Future = torch.futures.Future[Tensor]


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


def require_finite(
    exchange: Exchange, finite: Tensor, where: str, tensors: Mapping[str, Tensor]
) -> None:
    """Raise NonFiniteError on every rank unless `finite`, a bool on the device, holds on all."""
    # conclude() skips its collective if no message was received in this step.
    exchange.must_conclude = True
    if not exchange.conclude(finite, where, UNCHANGED):
        raise FiniteWatch(exchange).error(where, UNCHANGED, sorted(tensors.items()))


class Averages:
    """The exact mean of the parameters over the ranks, in float32 or wider, by `averager`."""

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
            what="a parameter" if method.plain else "a pseudo-gradient",
            unchanged=UNCHANGED,
            client_slots=self._slots,
        )

    def start(self) -> None:
        """Prepare for local steps, right before the first one."""

    def synchronise(self, lr: float, step: int, dense_bytes: int) -> None:
        """Average over the ranks; if this raises, on all, and nothing changes.

        `lr` is the mean learning rate of the round.
        """
        results = [self._average(group, lr) for group in self.averager.buckets]
        where = f"the synchronisation after step {step}"
        self.averager.finish(dense_bytes=dense_bytes, where=where)
        # Only now: finish() raises if any group failed on any rank, and then no rank may write.
        for bucket in results:
            bucket.write(self.averager.parameters)

    def wait(self, names: set[str] | None = None) -> None:
        """Wait until the named parameters (by default all) have their averages."""

    def stop(self) -> None:
        """End after an error: wait for averages, but not for a rank that never joins them."""

    def _slots(self, shape: BucketShape) -> tuple[Slot, ...]:
        return ()

    def _read(self, group: Group) -> Bucket:
        # In float32 or wider: a sum in a narrower dtype would be rounded once for each rank.
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

    m and x are the same on all ranks, bit for bit. Nothing is lost: the sum of all m plus the mean
    residual (plus the server residual) is the sum of all mean pseudo-gradients, up to rounding in
    float32 or wider. Only an all-reduce in a narrower dtype, as in ``ef(cast("bf16"))``, rounds
    away up to 1e-3 of them, which no residual keeps.
    """

    def start(self) -> None:
        for group in self.averager.buckets:
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
        # With gloo it has its own process group: DDP and the user issue collectives meanwhile.
        self.async_exchange, self._executor = transport(exchange.group, exchange.device)
        self._running: list[tuple[Bucket, Future]] = []
        self._stopped = False
        self._finalizer = weakref.finalize(self, self._executor.close, AT_EXIT_SECONDS)

    def close(self) -> None:
        """End the thread and the connections of the all-reduces, after all of them."""
        if self._finalizer.detach() is not None:
            self._executor.close()
            self.async_exchange.close()

    def synchronise(self, lr: float, step: int, dense_bytes: int) -> None:
        # The groups run from the last layers to the first. The next forward pass needs the first
        # layers first, so their all-reduce is issued first.
        buckets = [self._read(group) for group in reversed(self.averager.buckets)]
        where = f"the parameters after step {step}"
        # Check before sending: once optimizer.step() has returned, there is no call in which all
        # ranks could still raise together. NaN compares as false.
        exchange = self.averager.exchange
        small = [
            # world_size values of at most this size cannot overflow when they are added up.
            largest_magnitudes([each.flat], exchange.device)
            <= torch.finfo(each.flat.dtype).max / exchange.world_size
            for each in buckets
        ]
        values = {name: part for each in buckets for name, part in each.parts().items()}
        require_finite(exchange, torch.cat(small).all(), where, values)
        # Counted now, although they move later: the counters of a step do not change after it.
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
                    "an exception has ended the local steps while the parameters were being "
                    "averaged, and another rank did not join. Restart all ranks from their last "
                    "checkpoint"
                )
            with span("wait"):
                mean.wait()
            bucket.write(self.averager.parameters)
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
        # A future with a device records CUDA events: wait() then blocks the stream, not the host.
        device = bucket.flat.device
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


def wait_in_forward(model: nn.Module, averages: OverlappedAverages) -> Iterator[Any]:
    """Make every layer, and ``state_dict``, wait for what they read; yield the hooks' handles."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        everything = _waiter(module, averages, None)
        yield module.register_state_dict_pre_hook(everything)  # type: ignore[no-untyped-call]
    for layer in _layers(model):
        # With those of its children, which it can read without calling the children. torch.compile
        # adds this prefix, and the averager's names do not have it.
        needed = {names[id(p)].replace("_orig_mod.", "") for p in layer.parameters()}
        yield layer.register_forward_pre_hook(_waiter(layer, averages, needed))


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    # Wait in front of a whole compiled module. A hook inside it would break its graph. If
    # torch.compile(module) has already compiled it, the hook is not even called (torch 2.13).
    compiled = isinstance(module, OptimizedModule) or module._compiled_call_impl is not None
    if compiled or any(True for _ in module.parameters(recurse=False)):
        yield module
        return
    for child in module.children():
        yield from _layers(child)


def _waiter(module: nn.Module, averages: OverlappedAverages, names: set[str] | None) -> Any:
    owner = weakref.ref(module)

    def wait(module: nn.Module, *args: Any) -> None:
        # copy.deepcopy copies hooks, and a copy of the module has its own parameters.
        if module is owner():
            averages.wait(names)

    return torch.compiler.disable(wait)  # type: ignore[no-untyped-call]


# --- Further state: the optimizers' and BatchNorm's -----------------------------------------------


def state_to_average(parameters: Mapping[str, Tensor], optimizers: Optimizers) -> dict[str, Tensor]:
    """The tensors of the optimizers' state that ``moments="average"`` averages, by name and key."""
    found = {}
    for index, optimizer in enumerate(optimizers):
        # Two optimizers can train the same parameter.
        suffix = f" (optimizer {index})" if index else ""
        for name, parameter in parameters.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor | Number | str | None):
                    raise SpecError(
                        f"moments='average' cannot average the optimizer's state '{name} {key}': "
                        f"it is a {type(value).__name__}, not a tensor or number. Use "
                        "moments='local' or 'reset'",
                        "moments",
                    )
                # Adam's bias correction needs the rank's own count of steps.
                if isinstance(value, Tensor) and value.is_floating_point() and key != "step":
                    found[f"{name}{suffix} {key}"] = value
    return found


def mean_state(exchange: Exchange, mine: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    """The mean over the ranks, in float32 or wider, of every tensor that at least one rank has."""
    # A rank has no optimizer state for a parameter that it has not used, or while a GradScaler
    # skips every step: it adds zeros, and continues without.
    tensors, device = dict(mine), exchange.device
    layout = {name: (tensor.shape, tensor.dtype) for name, tensor in mine.items()}
    # Compare a checksum first: usually all ranks have the same tensors, and gathering the names of
    # all of them costs more than one small collective.
    if not exchange.same(zlib.crc32(repr(sorted(layout.items())).encode())):
        for theirs in exchange.gather_objects(layout):
            for name, (shape, dtype) in theirs.items():
                tensors.setdefault(name, torch.zeros(shape, dtype=dtype, device=device))
    # Sorted, because the order in which an optimizer creates state can differ between ranks.
    means = exact_mean(exchange, dict(sorted(tensors.items())))
    where = f"the averages of optimizer state or BatchNorm statistics after step {step}"
    require_finite(exchange, all_finite(means.values(), device), where, tensors)
    return means
