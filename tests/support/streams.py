"""Find races between CUDA streams, and memory that is used again too early, without a GPU.

Real DDP trains on tensors of the CPU. Each operation belongs to the current stream, and each stream
has a vector clock, which `wait_stream`, events, futures and waits of the host pass on. Faults are:

* a *race*: an operation reads or writes bytes that another stream wrote, or writes bytes that
  another stream read, and nothing orders the two;
* a *reuse*: a storage was freed, and its stream allocates memory while another stream can still be
  using the storage, and `record_stream` was not called.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.launches import FREE, WAITS, is_view, site
from torchcomp.ddp import two_level
from torchcomp.ddp.executors import Executor, StreamExecutor, after_backward
from torchcomp.engine import host
from torchcomp.exchange import Exchange, PrivateExchange, ProcessGroupExchange
from torchcomp.kernels import backend
from torchcomp.local_sgd import averages

Clock = dict["Stream", int]
MakeExecutor = Callable[[torch.device, Callable[[BaseException], None]], Executor]


def join(clock: Clock, other: Clock) -> None:
    """Order everything that happened before `other` before `clock` as well."""
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


class Event:
    """Stands in for torch.cuda.Event."""

    def __init__(self, simulator: "Simulator") -> None:
        self._simulator = simulator
        self.clock: Clock = {}

    def record(self, stream: "Stream | None" = None) -> None:
        self.clock = dict((stream or self._simulator.current).now())

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or self._simulator.current).wait_event(self)

    def synchronize(self) -> None:
        join(self._simulator.host, self.clock)


class Stream:
    """Stands in for torch.cuda.Stream."""

    def __init__(self, simulator: "Simulator", name: str, device: torch.device) -> None:
        self._simulator, self.name, self.device = simulator, name, device
        self._clock: Clock = {self: 0}

    def __repr__(self) -> str:
        return self.name

    def now(self) -> Clock:
        """The clock of whatever is enqueued next."""
        # The host enqueues it only after everything that the host has waited for.
        join(self._clock, self._simulator.host)
        return self._clock

    def tick(self) -> int:
        self._clock[self] += 1
        return self._clock[self]

    def wait_stream(self, stream: "Stream") -> None:
        join(self._clock, stream.now())

    def wait_event(self, event: Event) -> None:
        join(self._clock, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._simulator)
        event.record(self)
        return event

    def synchronize(self) -> None:
        join(self._simulator.host, self.now())


@dataclass(frozen=True)
class Access:
    """One use of some bytes of a storage."""

    stream: Stream
    time: int
    writes: bool
    start: int
    stop: int
    where: str

    def before(self, clock: Clock) -> bool:
        return self.time <= clock.get(self.stream, 0)

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} by {self.where} on {self.stream}"


@dataclass(eq=False)
class Memory:
    """A storage: the stream that allocated it, and the uses that later ones must follow."""

    owner: Stream
    uses: list[Access] = field(default_factory=list)
    recorded: set[Stream] = field(default_factory=set)


class Simulator(TorchDispatchMode):
    """Attributes the operations of this thread to streams, and finds faults."""

    def __init__(self) -> None:
        super().__init__()
        self.host: Clock = {}
        self.device = torch.device("cpu")
        self.main = self.current = Stream(self, "main", self.device)
        self._streams = [self.main]
        self._freed: list[Memory] = []
        self._returned: list[tuple[Any, Tensor]] = []
        self.faults: list[str] = []
        self.operations: Counter[Stream] = Counter()

    def new_stream(self, *_: Any, **__: Any) -> Stream:
        self._streams.append(Stream(self, f"stream {len(self._streams) + 1}", self.device))
        return self._streams[-1]

    def synchronize(self, *_: Any) -> None:
        for stream in self._streams:
            stream.synchronize()

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    # --- Operations ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        inputs = list(_tensors(func, args, kwargs))
        for x, _ in inputs:
            self._memory(x)
        result = func(*args, **kwargs)
        if is_view(func):
            return result
        # torch.tensor(...) makes a value that the host knows, and reading it back is no wait.
        known = name in WAITS and not any(self._memory(x).uses for x, _ in inputs)
        if known:
            return result
        where = f"{name} at {site()}"
        self.operations[self.current] += 1
        self.current.now()
        time = self.current.tick()
        if name not in FREE:
            for x, writes in inputs:
                self._use(x, writes, time, where)
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and _memory_of(x) is None:
                self._allocated(where)
                self._memory(x)
                if name not in FREE:
                    self._use(x, True, time, where)
        if name in WAITS:
            self.current.synchronize()
        return result

    def _memory(self, x: Tensor) -> Memory:
        memory = _memory_of(x)
        if memory is None:
            storage = x.untyped_storage()
            memory = storage.simulated = Memory(self.current)
            weakref.finalize(storage, self._freed.append, memory).atexit = False
        return memory

    def _use(self, x: Tensor, writes: bool, time: int, where: str) -> None:
        if x.numel() == 0:
            return
        start = x.storage_offset() * x.element_size()
        last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        stop = start + (last + 1) * x.element_size()
        self._check(x, Access(self.current, time, writes, start, stop, where), self.current.now())

    def _check(self, x: Tensor, use: Access, clock: Clock) -> None:
        memory = self._memory(x)
        kept = []
        for other in memory.uses:
            apart = other.stop <= use.start or use.stop <= other.start
            ordered = other.before(clock)
            if not (apart or ordered) and (use.writes or other.writes):
                self.faults.append(f"race: {use}, not ordered after {other}")
            inside = use.start <= other.start and other.stop <= use.stop
            # What follows `use` then follows `other` as well.
            if not (ordered and inside and (use.writes or not other.writes)):
                kept.append(other)
        memory.uses = [*kept, use]

    def _allocated(self, where: str) -> None:
        """Check that everything that was freed on this stream can be handed out now."""
        clock, waiting = self.current.now(), []
        for memory in self._freed:
            pending = [use for use in memory.uses if not use.before(clock)]
            if memory.owner is not self.current:
                waiting.append(memory)
            elif late := [use for use in pending if use.stream not in memory.recorded]:
                self.faults.append(f"reuse: memory for {where} can still be in a {late[0]}")
        self._freed[:] = waiting

    # --- Calls that are no operations ---

    def record_stream(self, x: Tensor, stream: Stream) -> None:
        self._memory(x).recorded.add(stream)

    def tolist(self, x: Tensor) -> Any:
        self._use(x, False, self.current.tick(), f"tolist at {site()}")
        self.current.synchronize()
        return _tolist(x)

    def returned(self, future: Any, bucket: dist.GradBucket) -> None:
        """Do what DDP does in C++ with the futures of a hook: it waits for them at the end."""
        self._returned.append((future, bucket.buffer()))
        if bucket.is_last():
            # DDP queues its own callback, which waits, right after this.
            after_backward(self._ddp_waits)

    def _ddp_waits(self) -> None:
        """DDP makes the current stream wait for one future after the other and reads its bucket."""
        for future, flat in self._returned:
            future.wait()
            self._use(flat, True, self.current.tick(), "DDP at the end of the backward pass")
        self._returned.clear()


Future = torch.futures.Future
_make_future, _set_result, _wait = Future.__init__, Future.set_result, Future.wait


def _init(future: Any, simulator: Simulator, *, devices: Any = None) -> None:
    """A future of a device is done once its work is enqueued. Waiting blocks the stream."""
    _make_future(future)
    future.done = Event(simulator)


def _complete(future: Any, result: Any) -> None:
    future.done.record()
    _set_result(future, result)


def _join(future: Any) -> Any:
    future.done.wait()
    return _wait(future)


def _register(model: Any, simulator: Simulator, state: Any, hook: Any) -> None:
    """As DDP's method of this name, for a hook that the simulator follows."""

    def followed(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future = hook(state, bucket)
        simulator.returned(future, bucket)
        return future

    _register_comm_hook(model, state, followed)


_COLLECTIVES = ("_all_reduce", "_reduce_scatter_to", "_all_gather_to", "_all_to_all_to")


def _private(exchange: Any, name: str, ranks: Sequence[int], beside: ProcessGroupExchange) -> None:
    """A group that torch knows: calls of one that it does not know are no operations."""
    ProcessGroupExchange.__init__(exchange, dist.new_group(list(ranks)), beside.device)


_register_comm_hook = DistributedDataParallel.register_comm_hook
_tolist = Tensor.tolist


def _tensors(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, bool]]:
    """The tensors that an operation reads or writes, and whether it writes them."""
    collective = func.namespace == "c10d"
    values = [*args, *kwargs.values()]
    names = [argument.name for argument in func._schema.arguments[: len(args)]] + list(kwargs)
    written = {
        each.name for each in func._schema.arguments if each.alias_info and each.alias_info.is_write
    }
    for name, value in zip(names, values, strict=True):
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                yield leaf, collective or name in written


def _memory_of(x: Tensor) -> Memory | None:
    return getattr(x.untyped_storage(), "simulated", None)


@contextlib.contextmanager
def simulated(executor: MakeExecutor = StreamExecutor) -> Iterator[Simulator]:
    """Simulate streams in this thread, for tensors of the CPU that say that they are on CUDA."""
    simulator = Simulator()

    def transport(group: Any, device: torch.device) -> tuple[Exchange, Executor]:
        exchange = ProcessGroupExchange(group, device)
        return exchange, executor(device, exchange.leave)

    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "Stream", simulator.new_stream),
        (torch.cuda, "Event", lambda **_: Event(simulator)),
        (torch.cuda, "stream", simulator.on),
        (torch.cuda, "synchronize", simulator.synchronize),
        (torch.cuda, "current_stream", lambda *_: simulator.current),
        (torch.cuda, "device", lambda *_: contextlib.nullcontext()),
        (Future, "__init__", partialmethod(_init, simulator)),
        (Future, "set_result", _complete),
        (Future, "wait", _join),
        (Tensor, "is_cuda", True),
        (Tensor, "record_stream", lambda x, stream: simulator.record_stream(x, stream)),
        (Tensor, "tolist", lambda x: simulator.tolist(x)),
        (DistributedDataParallel, "register_comm_hook", partialmethod(_register, simulator)),
        (host, "can_read", lambda x: False),
        (import_module("torchcomp.ddp.register"), "transport", transport),
        (averages, "transport", transport),
        (two_level, "executor_for", lambda exchange, leave: executor(exchange.device, leave)),
        (PrivateExchange, "__init__", _private),
        *((PrivateExchange, name, getattr(ProcessGroupExchange, name)) for name in _COLLECTIVES),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(backend.plain_torch("cpu"))
        stack.enter_context(simulator)
        yield simulator
