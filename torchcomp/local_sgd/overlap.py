"""Overlap: averages that run while the code after the optimizer step goes on.

Every layer waits for its own parameters before it computes. Other code runs without waiting.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule

from torchcomp.ddp.executors import transport
from torchcomp.engine.bucket import Bucket, Group
from torchcomp.engine.means import average_in_place
from torchcomp.engine.nonfinite import largest_magnitudes
from torchcomp.engine.profiling import span
from torchcomp.exchange import ProcessGroupExchange
from torchcomp.exchange.traffic import Load
from torchcomp.local_sgd.averages import Averages, Due, require_finite
from torchcomp.local_sgd.method import LocalMethod, Parameters
from torchcomp.specs.errors import RankFailureError

AT_EXIT_SECONDS = 60.0
"""How long a process that ends, or has raised, waits for all-reduces that others may need."""

Future = torch.futures.Future[Tensor]


class OverlappedAverages(Averages):
    """The same exact mean, by async all-reduces."""

    def __init__(
        self,
        method: LocalMethod,
        exchange: ProcessGroupExchange,
        parameters: Parameters,
        groups: Sequence[Group],
    ) -> None:
        super().__init__(method, exchange, parameters, groups)
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

    def synchronise(self, due: Due, step: int, dense_bytes: int) -> None:
        # The groups run from the last layers to the first. The next forward pass needs the first
        # layers first, so their all-reduce is issued first.
        buckets = [self._read(group) for group, _ in reversed(due)]
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
    """Make every layer, and ``state_dict``, wait for what they read; yield the hooks' handles.

    A layer is a compiled module, or a module with its own parameters. It also waits for the
    parameters of its children, because it can read them without calling the children.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        everything = _waiter(module, averages, None)
        yield module.register_state_dict_pre_hook(everything)  # type: ignore[no-untyped-call]
    for layer in _layers(model):
        # torch.compile adds this prefix, and the averager's names do not have it.
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
