"""Count what code would cost on CUDA, on a machine without a GPU: launches and waits by call site.

A :class:`DeviceTensor` says that it is on "cuda:0" and holds a tensor of the CPU. Torch's own
bindings then take the paths for CUDA: ``x[0] = 5`` becomes a copy from host memory. Operations pass
:class:`_Device`, which counts them, computes them on the CPU, and refuses tensors of two devices.

Every operation, copy and collective counts as one launch, whatever the number of its kernels.
"""

import contextlib
import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

import torchcomp
from torchcomp import Averager
from torchcomp.engine.bucket import Bucket
from torchcomp.exchange import Exchange
from torchcomp.exchange.base import Conclusion
from torchcomp.kernels import backend

DEVICE = torch.device("cuda", 0)
_PRODUCT, _TORCH = (str(Path(package.__file__).parent) for package in (torchcomp, torch))  # type: ignore[arg-type]

# Operations that launch nothing, by name. Those that return a view are found by their schema.
FREE = {
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
    *("_unsafe_view", "is_pinned", "is_same_size", "promote_types", "resize_", "set_"),
}

WAITS = {
    *("_local_scalar_dense", "is_nonzero", "equal", "allclose"),
    *("nonzero", "masked_select", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
    *("linalg_cholesky", "linalg_eigh", "linalg_inv", "linalg_solve"),
}
"""Operations that always make the host wait: it reads their result, or the result's size."""

_FIRST_LAUNCH = {
    ("kernels/launch.py", "plain"),
}
"""What the first launch of a kernel calls on a GPU, and every launch in the interpreter."""

_HERE = Path(__file__).parent
_KINDS = ("launches", "waits", "copies", "calls")
_COPIES = {"copy_", "_to_copy", "_foreach_copy_"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Count:
    """Launches, waits, copies from the host and calls, by call site and operation."""

    def __init__(self) -> None:
        self.by_kind = {kind: Counter[tuple[str, str]]() for kind in _KINDS}

    launches, waits, copies, calls = (
        property(lambda self, kind=kind: self.by_kind[kind].total()) for kind in _KINDS
    )

    def by_site(self) -> dict[str, tuple[int, int]]:
        """The launches and the waits of each site."""
        sites: dict[str, tuple[int, int]] = {}
        for number, kind in enumerate(("launches", "waits")):
            for (where, _), times in self.by_kind[kind].items():
                both = list(sites.get(where, (0, 0)))
                both[number] += times
                sites[where] = both[0], both[1]
        return sites

    def __repr__(self) -> str:
        lines = [
            f"{times:6} {kind}: {' '.join(entry)}"
            for kind, counter in self.by_kind.items()
            for entry, times in sorted(counter.items(), key=lambda item: (-item[1], item[0]))
        ]
        return "\n".join(lines)

    def note(self, kind: str, operation: str) -> None:
        self.by_kind[kind][site(), operation] += 1

    @contextlib.contextmanager
    def count_calls(self) -> Iterator[None]:
        """Count the calls of torchcomp's functions in this thread and block."""

        def note(frame: FrameType, event: str, argument: object) -> None:
            path = frame.f_code.co_filename
            if event == "call" and path.startswith(_PRODUCT):
                function = path[len(_PRODUCT) + 1 :], frame.f_code.co_name
                self.by_kind["calls"][function] += function not in _FIRST_LAUNCH

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def collective(self, name: str) -> None:
        """Count a collective as ProcessGroupExchange runs it with NCCL."""
        self.note("launches", name)
        if sys.getprofile() is not None:
            # `_all_gather` and `_all_gather_to`, for example.
            self.by_kind["calls"]["exchange/process_group.py", name] += 2

    def take(self) -> "Count":
        """Return what was counted so far, and count from zero again."""
        taken = Count()
        taken.by_kind, self.by_kind = self.by_kind, taken.by_kind
        return taken

    reset = take

    def add(self, other: "Count") -> None:
        for kind, counter in other.by_kind.items():
            self.by_kind[kind].update(counter)


class DeviceTensor(Tensor):
    """A tensor that says that it is on a CUDA device. Its values are in `host`, on the CPU."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> "DeviceTensor":
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=DEVICE,
        )
        wrapper.host = host
        return wrapper

    def __repr__(self, **options: Any) -> str:
        return f"DeviceTensor({self.host!r})"

    def new_tensor(self, *args: Any, **options: Any) -> Tensor:
        # For a subclass with another device than its backend, torch's own makes a meta tensor.
        return torch.tensor(*args, **{"dtype": self.dtype, "device": self.device, **options})

    def tolist(self) -> Any:
        # Torch refuses this for any subclass. For a tensor on CUDA it does the same.
        return self.cpu().tolist()

    def record_stream(self, stream: object) -> None:
        """Accept the call: it neither launches nor waits."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} of a DeviceTensor outside counted()")


class _Device(TorchDispatchMode):
    """Computes and counts the operations on DeviceTensors."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        leaves = tree_leaves((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
        target = kwargs.get("device")
        on_device = bool(given) if target is None else torch.device(target).type == "cuda"
        if not given and not on_device:
            return _on_host(func, name, args, kwargs)
        _require_one_device(name, args, kwargs, bool(given))
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        unpinned = _waits(name, args, kwargs, on_device)
        result = func(*tree_map(_host, args), **tree_map(_host, kwargs))
        if launches(func, name, result):
            self._count.note("launches", name)
            if on_device and name in _COPIES and _from_host(name, args):
                self._count.note("copies", name)
        if unpinned:
            self._count.note("waits", name)
        # In-place operations and `out=` return their argument.
        wrappers = {id(wrapper.host): wrapper for wrapper in given}
        for wrapper in given:
            assert wrapper.shape == wrapper.host.shape, f"{name} resized its argument"

        def wrap(value: Any) -> Any:
            if not isinstance(value, Tensor) or not on_device:
                return value
            return wrappers[id(value)] if id(value) in wrappers else DeviceTensor(value)

        return tree_map(wrap, result)


def _on_host(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """An operation on the CPU. Pinned memory is ordinary memory with a mark."""
    if name == "is_pinned":
        return _pinned(args[0])
    if name == "_pin_memory":
        copy = args[0].clone()
        copy.untyped_storage().pinned = True
        return copy
    pins = kwargs.pop("pin_memory", False)
    result = func(*args, **kwargs)
    if pins:
        result.untyped_storage().pinned = True
    return result


def _pinned(x: Tensor) -> bool:
    return getattr(x.untyped_storage(), "pinned", False)


def _host(value: Any) -> Any:
    return value.host if isinstance(value, DeviceTensor) else value


def _require_one_device(name: str, args: Any, kwargs: Any, given: bool) -> None:
    """Raise as CUDA does. Only a number, as a tensor without a dimension, can be on the host."""
    if not given or name in _COPIES or name in _INDEXING:
        return
    direct = [*args, *kwargs.values()]
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, Tensor) and not isinstance(value, DeviceTensor):
            number = value.dim() == 0 and any(value is argument for argument in direct)
            if not number:
                raise RuntimeError(f"{name}: expected all tensors to be on the same device")


def is_view(func: Any) -> bool:
    """Whether an operation returns views of its arguments."""
    returned = [entry.alias_info for entry in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def launches(func: Any, name: str, result: Any) -> bool:
    """Whether an operation launches anything."""
    if name in FREE or is_view(func):
        return False
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return not tensors or any(tensor.numel() for tensor in tensors)


def _waits(name: str, args: Any, kwargs: Any, on_device: bool) -> bool:
    """Whether the host waits for an operation."""
    if name == "_to_copy":
        blocks = not kwargs.get("non_blocking", False)
        if isinstance(args[0], DeviceTensor):
            # A copy to the host that does not wait goes to pinned memory.
            return blocks and not on_device
        return blocks or not _pinned(args[0])
    if name == "copy_":
        return _copy_waits(args[0], args[1], *args[2:], **kwargs)
    if name == "_foreach_copy_":
        return any(_copy_waits(a, b) for a, b in zip(args[0], args[1], strict=True))
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in _INDEXING:
        return _indexing_waits(name, *args)
    return name in WAITS


def _from_host(name: str, args: Any) -> bool:
    """Whether a copy to the device reads memory of the host."""
    sources = args[0] if name == "_to_copy" else args[1]
    return not all(isinstance(source, DeviceTensor) for source in tree_leaves(sources))


def _copy_waits(target: Tensor, source: Tensor, non_blocking: bool = False) -> bool:
    sides = [side for side in (target, source) if not isinstance(side, DeviceTensor)]
    return bool(sides) and not (non_blocking and _pinned(sides[0]))


def _indexing_waits(
    name: str, x: Tensor, indices: Sequence[Tensor | None], *values: Any, **options: Any
) -> bool:
    used = [index for index in indices if index is not None]
    if name != "index" and not isinstance(values[0], DeviceTensor):
        # A number. With a single mask this is a masked fill; otherwise the number is copied.
        return not (len(used) == 1 and used[0].dtype == torch.bool)
    masks = any(index.dtype in (torch.bool, torch.uint8) for index in used)
    return masks or not all(isinstance(index, DeviceTensor) for index in used)


def site() -> str:
    """The innermost frame in torchcomp, or else the innermost outside torch."""
    frame: FrameType | None = sys._getframe(1)
    other = ""
    while frame is not None:
        path, own = frame.f_code.co_filename, f":{frame.f_lineno} {frame.f_code.co_name}"
        if path.startswith(_PRODUCT):
            return path[len(_PRODUCT) + 1 :] + own
        inside = Path(path).parent == _HERE or path.startswith((_TORCH, "<"))
        other = other or ("" if inside else Path(path).name + own)
        frame = frame.f_back
    return other


class _Waitable:
    """Stands in for all streams and events of CUDA. Only the host's waits matter here."""

    def __init__(self, count: Count) -> None:
        self._count = count

    def synchronize(self, device: object = None) -> None:
        self._count.note("waits", "synchronize")

    def __getattr__(self, name: str) -> Any:
        # wait_stream, wait_event, record, record_event, query: neither launches nor host waits.
        return lambda *args, **options: self


def on_device(values: Tensor) -> Tensor:
    """A copy of `values` as a tensor on the simulated device. This is not counted."""
    return DeviceTensor(values.clone())


@contextlib.contextmanager
def counted(triton: bool = False) -> Iterator[Count]:
    """Simulate a CUDA device in this thread, with kernels of plain torch or interpreted Triton."""
    count = Count()
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(_device_guard())
        enter(_tensors_begin_on_the_host())
        enter(mock.patch.object(torch.cuda, "_lazy_init"))
        waitable = _Waitable(count)
        enter(mock.patch.object(torch.cuda, "synchronize", waitable.synchronize))
        for name in ("current_stream", "Stream", "Event"):
            enter(mock.patch.object(torch.cuda, name, return_value=waitable))
        enter(_interpreted(count) if triton else backend.plain_torch("cuda"))
        enter(_Device(count))
        yield count


@contextlib.contextmanager
def _interpreted(count: Count) -> Iterator[None]:
    """Count and interpret launches of Triton's kernels on DeviceTensors."""
    from triton.runtime import interpreter

    run = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **options: Any) -> None:
        count.note("launches", self.fn.__name__)
        # A kernel is no Python on a GPU.
        profile = sys.getprofile()
        sys.setprofile(None)
        with _disable_current_modes():
            run(self, *map(_host, args), **options)
        sys.setprofile(profile)

    backend.fast_form.cache_clear()
    with (
        mock.patch.object(interpreter.GridExecutor, "__call__", launch),
        mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()),
    ):
        yield


@contextlib.contextmanager
def _device_guard() -> Iterator[None]:
    """Let torch's bindings switch to a CUDA device, which a build without CUDA cannot."""
    library = ctypes.CDLL(str(Path(_TORCH, "lib", "libc10.so")))
    # The guards of all device types. The one of "meta" does nothing.
    guards = (ctypes.c_void_p * 15).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14
    before = guards[cuda]
    # A build with CUDA has a guard, but without a driver it raises.
    guards[cuda] = before if torch.cuda.is_available() else guards[meta]
    try:
        yield
    finally:
        guards[cuda] = before


@contextlib.contextmanager
def _tensors_begin_on_the_host() -> Iterator[None]:
    """Let ``torch.tensor(..., device="cuda")`` show its copy to the device to a dispatch mode."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


# --- One bucket of a method, among any number of ranks ---


class EchoExchange(Exchange):
    """The exchange of rank 0, where every other rank sends what this one sends, repeated or cut."""

    def __init__(self, world_size: int, count: Count, device: torch.device = DEVICE) -> None:
        super().__init__(0, world_size, device)
        self._count = count

    def gather_objects(self, value: Any, dst: int | None = None) -> list[Any]:
        return [value] * self.world_size

    def conclude(self, finite: Tensor | None, where: str, advice: str) -> Conclusion:
        for headers, origin in self._headers:
            _host(headers).copy_(_host(origin.frames.expected).repeat(origin.rows, 1))
        if finite is not None:
            _host(finite).fill_(True)  # a message that was cut decodes to a NaN
        return super().conclude(finite, where, advice)

    # As NCCL among a power of two of ranks.
    _averages = (torch.float32, torch.float64, torch.bfloat16)

    def _all_reduce(self, values: Tensor) -> None:
        self._count.collective("all_reduce")
        _host(values).mul_(self.world_size)

    def _all_reduce_mean(self, values: Tensor) -> None:
        self._count.collective("all_reduce")

    def _all_gather(self, mine: Tensor) -> Tensor:
        self._count.collective("all_gather")
        with _disable_current_modes():
            return self._received(_host(mine).repeat(self.world_size))

    def _all_to_all(
        self, outgoing: Tensor, sizes: Sequence[int], arriving: Sequence[int]
    ) -> Tensor:
        self._count.collective("all_to_all")
        with _disable_current_modes():
            mine = torch.split(_host(outgoing), list(sizes))[self.rank]
            parts = [
                mine.repeat(-(-length // max(1, len(mine))))[:length] if length else mine[:0]
                for length in arriving
            ]
            return self._received(torch.cat(parts))

    def _received(self, values: Tensor) -> Tensor:
        return DeviceTensor(values) if self.device == DEVICE else values


def one_bucket(
    spec: str,
    world_size: int,
    numel: int = 2**14,
    dtype: torch.dtype = torch.float32,
    steps: int = 2,
    simulation: Callable[[], AbstractContextManager[Count]] = counted,
    device: torch.device = DEVICE,
) -> tuple[Count, Count]:
    """Average a bucket, one matrix with 64 rows, `steps` times among ranks that are simulated."""
    draws = torch.Generator().manual_seed(0)
    place = on_device if device == DEVICE else Tensor.clone
    with simulation() as count, torch.no_grad():
        weight = place(torch.zeros(64, numel // 64, dtype=dtype))
        averager = Averager(spec, EchoExchange(world_size, count, device), {"weight": weight})
        (group,) = averager.buckets
        for _ in range(steps):
            flat = torch.randn(numel, generator=draws).to(dtype)
            bucket = Bucket(averager.shape_of(group), place(flat), lasts=True)
            count.take()
            averager.begin()
            per_step = count.take()
            with count.count_calls():
                averager.average(bucket)
            per_bucket = count.take()
            averager.finish()
            per_step.add(count)
    return per_bucket, per_step
