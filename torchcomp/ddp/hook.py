"""DDPHandle: the communication hook of one DDP model."""

# DDP inspects the hook's signature, so this module must not postpone the evaluation of annotations.

import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from operator import is_

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.autograd import profiler
from torch.nn.parallel import DistributedDataParallel

from torchcomp.ddp.buckets import Buckets
from torchcomp.ddp.checks import AFTER_CLOSE, check_not_joined, check_not_sharded
from torchcomp.ddp.executors import after_backward
from torchcomp.ddp.handle import SCALER_ADVICE, Handle
from torchcomp.ddp.loop import OptimizerLRs
from torchcomp.engine.averager import Averager
from torchcomp.engine.bucket import Bucket, BucketShape
from torchcomp.engine.profiling import OFF, span
from torchcomp.kernels.swap import fill_where

Future = torch.futures.Future[Tensor]


class DDPHandle(Handle):
    """The handle of a DDP model."""

    _after_close = AFTER_CLOSE

    def __init__(
        self,
        model: DistributedDataParallel,
        buckets: Buckets,
        scaler: "torch.amp.GradScaler | None",
        lrs: OptimizerLRs | None = None,
    ) -> None:
        super().__init__(model, buckets, buckets.parameters, scaler, lrs)
        # Weak, because DDP's reducer refers to the handle: a cycle would keep the model alive.
        self._model = weakref.ref(model)
        self._names = {id(parameter): name for name, parameter in buckets.parameters.items()}
        # By the index of a bucket: its parameters and its shape, until DDP rebuilds its buckets.
        self._known: dict[int, tuple[list[Tensor], BucketShape]] = {}
        self._received: list[tuple[Tensor, Future]] = []  # DDP's buckets of this backward pass
        self._checked = False
        model.register_forward_pre_hook(self._before_forward)
        may_leave_unused = bool(model.find_unused_parameters) and not model.static_graph
        self._unused = UnusedWatch(buckets.parameters) if may_leave_unused else None
        self._end_step = partial(
            self.averager.finish,
            may_skip=self._loss_scale is not None,
            advice=SCALER_ADVICE,
            used=None if self._unused is None else self._unused.used,
        )

    # Not compiled with the model, and never removed: removing it would compile the model again.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, model: torch.nn.Module, args: object) -> None:
        self._thread = threading.current_thread()
        if not self._checked:
            check_not_sharded(model)
            self._checked = True
        if self._discarded is not None and self._discarded.open:
            self._discarded.look_in_backward()

    # --- Called by the hook, during the backward pass ---

    def _receive(self, grad_bucket: GradBucket) -> Future:
        if self.closed:
            raise RuntimeError(f"this handle is closed. {AFTER_CLOSE}")
        index, flat, last = grad_bucket.index(), grad_bucket.buffer(), grad_bucket.is_last()
        buckets, unused, end_step = self._buckets, self._unused, self._end_step
        values = self._begin_pass() if index == 0 else None
        parameters, known = grad_bucket.parameters(), self._known.get(index)
        # All of them: what DDP has rebuilt can be in the same memory, in another order.
        same = known is not None and len(known[0]) == len(parameters)
        if known is None or not same or not all(map(is_, known[0], parameters)):
            names = tuple([self._names[id(parameter)] for parameter in parameters])
            known = self._known[index] = parameters, BucketShape.of(names, buckets.parameters)
        bucket = Bucket(known[1], flat, lasts=True)

        def job() -> None:
            if values is not None:
                buckets.begin(*values)
            if unused is not None:
                unused.before(bucket)
            buckets.average(bucket)
            if last:
                buckets.finish(end_step)

        future: Future = torch.futures.Future(devices=[flat.device] if flat.is_cuda else [])
        self._received.append((flat, future))
        buckets.executors[0].submit(job)
        if last:
            after_backward(self._finish_backward)
            done = partial(_complete, self._received, self.averager, unused, self._void_value)
            buckets.complete(done)
        return future

    def _begin_pass(self) -> tuple[float, dict[str, float] | None]:
        model = self._model()
        if model is not None and model._join_config.enable:
            check_not_joined(model)
        self._enter_pass()
        self._received = []
        try:
            return self._begin_step()
        except Exception as error:
            # Kept, as that of a job: raised here, it would leave DDP in the middle of a step.
            self._buckets.executors[0].fail(error)
            return 1.0, None

    # --- Called at the end of the backward pass ---

    def _finish_backward(self) -> None:
        start = time.perf_counter()
        with span("wait") if profiler._is_profiler_enabled else OFF:
            failure = self._buckets.join()
        self.seconds_waited += time.perf_counter() - start
        self._running = False
        if failure is not None:
            if self.averager.step > self._step_before:
                # With two levels, the step can end before the gradients are in DDP's buckets.
                self.averager.abandon(self._step_before)
                self.averager.abandoned = False  # no job is left
            # Raise after DDP's own final callback, so that DDP is ready for another iteration.
            after_backward(partial(self._raise_failure, failure))

    def _raise_failure(self, failure: BaseException) -> None:
        for executor in self._buckets.executors:
            executor.failure = None
        if self._discarded is not None:
            self._discarded.is_stepping = False
        raise failure


class UnusedWatch:
    """Tracks which parameters a step uses, and restores DDP's buckets for those of no rank.

    DDP leaves the gradient of such a parameter alone, so what its residual sends would be lost.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        # Since the last exchange, also in no_sync. The gradients do not show it: a used parameter's
        # can be zero, and without zero_grad an unused parameter still has an old one.
        self.used: set[str] = set()
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        for name, parameter in parameters.items():
            # The hook refers to the set only, so it does not keep this object and its copies alive.
            note = partial(_note, self.used, name)
            parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def before(self, bucket: Bucket) -> None:
        """Copy the parts of a bucket that this rank did not use: other ranks can have."""
        for name, part in bucket.parts().items():
            if name not in self.used:
                self._before[name] = (part, part.clone())

    def end(self, unused: Iterable[str]) -> None:
        """Restore the buckets' parts of parameters that no rank used, and begin the next step."""
        for name in self._before.keys() & unused:
            part, before = self._before[name]
            part.copy_(before)
        self.used.clear()
        self._before.clear()


def _note(used: set[str], name: str, parameter: Tensor) -> None:
    used.add(name)


def _complete(
    received: list[tuple[Tensor, Future]],
    averager: Averager,
    unused: UnusedWatch | None,
    void_value: float,
) -> None:
    if unused is not None:
        unused.end(averager.unused)
    if averager.void is not None:  # only the device knows whether the step counts
        for flat, _ in received:
            fill_where(averager.void, flat, void_value)
    # Only now: a group can still change any of DDP's buckets until the last one is averaged.
    for flat, future in received:
        future.set_result(flat)
    # DDP frees its first buckets when it rebuilds them.
    received.clear()


def hook(state: DDPHandle, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Pass a bucket to the handle. DDP calls this communication hook for every bucket, in order."""
    return state._receive(bucket)
