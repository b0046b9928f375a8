"""Attach a method to a model before it trains.

A method is the name of a baseline or a spec of torchcomp. The spec can be a method, a schedule of
local steps, or ``jointspar(...)`` with the options of :class:`torchcomp.JointSpar`.
"""

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import torchcomp
from benchmarks.net import baselines
from benchmarks.net.names import BASELINES, BF16, FLOOR, NAIVE_TOPK, ONE_VALUE, POWERSGD
from torchcomp.local_sgd.schedules import SCHEDULES

LAYERS = "jointspar("
# Large enough for a whole model. PyTorch's PowerSGD hook waits for collectives inside callbacks,
# which hangs gloo if two buckets do it. With one bucket, the hook runs unchanged.
_ONE_BUCKET_MB = 4096


@dataclass
class Trainee:
    """A model in training. `counter` is torchcomp's handle, which counts bytes, if there is one."""

    model: DistributedDataParallel
    optimizer: SGD
    counter: Any = None

    def counted(self) -> tuple[int, int]:
        """Bytes of messages that this rank has sent, and those inside the node with two levels."""
        if self.counter is None:
            return 0, 0
        stats = self.counter.stats
        # Methods without a second level do not count it.
        return stats.total_bytes_sent, getattr(stats, "total_inside_bytes_sent", 0)

    def close(self) -> None:
        if self.counter is not None:
            self.counter.close()


@dataclass(frozen=True)
class Course:
    """The length and learning rate of a training run.

    `settled` skips the dense steps with which PowerSGD starts.
    """

    lr: float
    total_steps: int
    warmup_steps: int = 0
    settled: bool = False


def attach(method: str, module: nn.Module, course: Course, nodes: int | None = None) -> Trainee:
    """Wrap `module` in DDP and attach `method` to it.

    With `nodes`, the number of ranks of a node, a gradient method exchanges in two levels.

    Raises:
        ValueError: If the method has one level only.
    """
    # PowerSGD's hook in one bucket: see _ONE_BUCKET_MB.
    whole = {"bucket_cap_mb": _ONE_BUCKET_MB} if method == POWERSGD else {}
    model = in_ddp(module, **whole)
    optimizer = SGD(model.parameters(), lr=course.lr, momentum=0.9, weight_decay=5e-4)
    if method in BASELINES:
        _register_baseline(method, model, course.settled)
        return Trainee(model, optimizer)
    return Trainee(model, optimizer, _counter(method, model, optimizer, course, nodes))


@contextmanager
def attached(
    method: str, module: nn.Module, course: Course, nodes: int | None = None
) -> Iterator[Trainee]:
    """A context in which `method` is attached to `module`: see :func:`attach`."""
    # Objects in reference cycles would otherwise keep the model before in memory.
    gc.collect()
    trainee = attach(method, module, course, nodes)
    try:
        yield trainee
    finally:
        trainee.close()


def in_ddp(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """Wrap `module` in DDP without its broadcasts, of buffers and of the first weights."""
    # All ranks build the same weights from the same seed. Sending them would take minutes on a
    # slow link. DDP of torch 2.6 always sends them.
    if "init_sync" in signature(DistributedDataParallel).parameters:
        options["init_sync"] = False
    model = DistributedDataParallel(module, gradient_as_bucket_view=True, **options)
    # BatchNorm statistics stay local with every method: their broadcast would add to the measured
    # bytes and time. Not as an argument, whose name torch 2.13 changed.
    model.broadcast_buffers = False
    return model


def _counter(
    method: str,
    model: DistributedDataParallel,
    optimizer: SGD,
    course: Course,
    nodes: int | None,
) -> Any:
    """Attach a method of torchcomp and return its handle, which counts bytes."""
    layers = method.startswith(LAYERS)
    schedule = method.partition("(")[0] in {each.name for each in SCHEDULES}
    if not layers and not schedule:
        return torchcomp.register(model, method, nodes=nodes)
    if nodes is not None:
        raise ValueError(f"{method} has one level only: measure it with --levels 1")
    if layers:
        return torchcomp.JointSpar(model, **_options(method))
    lengths = {"total_steps": course.total_steps, "warmup_steps": course.warmup_steps}
    return torchcomp.LocalSGD(model, optimizer, method, **lengths)


def _options(method: str) -> dict[str, Any]:
    """The keyword arguments in the source text of a call."""
    # Literals only, never eval: the method comes from the command line.
    call: Any = ast.parse(method, mode="eval").body
    return {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}


def _register_baseline(method: str, model: DistributedDataParallel, settled: bool) -> None:
    if method == FLOOR:
        model.register_comm_hook(None, baselines.no_op)
    elif method == BF16:
        model.register_comm_hook(None, baselines.bf16)
    elif method == ONE_VALUE:
        model.register_comm_hook(None, baselines.one_value)
    elif method == POWERSGD:
        model.register_comm_hook(_powersgd_state(settled), powerSGD_hook.powerSGD_hook)
    elif method == NAIVE_TOPK:
        model.register_comm_hook(baselines.NaiveTopK(0.01), baselines.naive_topk)


def _powersgd_state(settled: bool) -> powerSGD_hook.PowerSGDState:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    if settled:
        state.iter = state.start_powerSGD_iter
    return state
