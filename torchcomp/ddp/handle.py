"""DDPHandle: the communication hook of one DDP model."""

# DDP inspects the hook's signature, so this module must not postpone the evaluation of annotations.

import time
import weakref

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from torchcomp.averager import Averager
from torchcomp.bucket import Bucket
from torchcomp.ddp.averaging import Buckets, Step
from torchcomp.ddp.checks import AFTER_CLOSE, check_not_joined, check_not_sharded
from torchcomp.ddp.unused import UnusedWatch
from torchcomp.hooks.executors import after_backward
from torchcomp.hooks.handle import SCALER_ADVICE, Handle
from torchcomp.hooks.loss_scale import LossScale
from torchcomp.hooks.optimizer_lrs import OptimizerLRs
from torchcomp.profiling import label

Future = torch.futures.Future[Tensor]


class DDPHandle(Handle):
    """The handle of a DDP model.

    The hook submits every bucket to a thread (gloo) or a side stream (CUDA), which averages it in
    parallel with the backward pass. The last bucket ends the step.
    """

    _after_close = AFTER_CLOSE

    def __init__(
        self,
        model: DistributedDataParallel,
        buckets: Buckets,
        scaler: "torch.amp.GradScaler | None",
        lrs: OptimizerLRs | None = None,
    ) -> None:
        super().__init__(buckets)
        # A weak reference, because DDP's reducer refers to the handle. A cycle would keep the
        # model alive.
        self._model = weakref.ref(model)
        self._buckets = buckets
        # By id, because DDP passes parameters to the hook, not their names.
        self._names = {id(parameter): name for name, parameter in buckets.parameters.items()}
        self._checked = False
        model.register_forward_pre_hook(self._before_forward)
        loss_scale = LossScale(scaler)
        if loss_scale.in_use:
            model.register_forward_pre_hook(loss_scale.fetch)
        may_leave_unused = bool(model.find_unused_parameters) and not model.static_graph
        unused = UnusedWatch(buckets.parameters) if may_leave_unused else None
        self._step = _Step(self.averager, loss_scale, lrs, unused)

    # Compiled apart, and without removing the hook: a compiled model would be compiled again.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, model: torch.nn.Module, args: object) -> None:
        self._note_thread()
        if not self._checked:
            check_not_sharded(model)
            self._checked = True

    # --- Called by the hook, during the backward pass ---

    def _receive(self, grad_bucket: GradBucket) -> Future:
        if self._closed:
            raise RuntimeError(f"this handle is closed. {AFTER_CLOSE}")
        names = tuple([self._names[id(parameter)] for parameter in grad_bucket.parameters()])
        flat, first, last = grad_bucket.buffer(), grad_bucket.index() == 0, grad_bucket.is_last()
        bucket = Bucket(self._buckets.shape_of(names), flat)
        future: Future = torch.futures.Future(devices=[flat.device] if flat.is_cuda else [])
        if first:
            check_not_joined(self._model())
            self._enter_pass()
            self._step.received.clear()
            self._buckets.start()
        self._step.received.append((flat, future))
        if last:
            after_backward(self._finish_backward)
        self._buckets.submit(bucket, self._step, first=first, last=last)
        return future

    # --- Called at the end of the backward pass ---

    def _finish_backward(self) -> None:
        start = time.perf_counter()
        with label("wait"):
            self._buckets.join()
        self.seconds_waited += time.perf_counter() - start
        self._running = False
        if self._buckets.failure is not None:
            if self.averager.step > self._step_before:
                # With two levels, the step can end well before the gradients are back in DDP's
                # buckets.
                self.averager.abandon(self._step_before)
                self.averager.abandoned = False  # no job is left
            # Raise after DDP's own final callback, so that DDP is ready for another iteration.
            after_backward(self._raise_failure)

    def _raise_failure(self) -> None:
        failure = self._buckets.failure
        self._buckets.start()
        if failure is not None:
            raise failure


class _Step(Step):
    """One backward pass after another, as the thread of the exchange sees them.

    Attributes:
        received: DDP's buckets of the current backward pass.
    """

    def __init__(
        self,
        averager: Averager,
        loss_scale: LossScale,
        lrs: OptimizerLRs | None,
        unused: UnusedWatch | None,
    ) -> None:
        self._averager = averager
        self._loss_scale, self._lrs, self._unused = loss_scale, lrs, unused
        self.received: list[tuple[Tensor, Future]] = []

    def begin(self) -> tuple[float, dict[str, float] | None]:
        return self._loss_scale.read(), None if self._lrs is None else self._lrs.read()

    def before(self, bucket: Bucket) -> None:
        if self._unused is not None:
            self._unused.before(bucket)

    def finish(self, dense_bytes: int | None = None, leaving: bool | None = None) -> bool:
        return self._averager.finish(
            may_skip=self._loss_scale.in_use,
            dense_bytes=dense_bytes,
            advice=SCALER_ADVICE,
            used=None if self._unused is None else self._unused.used,
            leaving=leaving,
        )

    def complete(self) -> None:
        if self._unused is not None:
            self._unused.end(self._averager.unused)
        # Complete the futures only now: a group can still change any of DDP's buckets until the
        # last one is averaged.
        for flat, future in self.received:
            future.set_result(flat)
        # DDP frees its first buckets when it rebuilds them.
        self.received.clear()


def hook(state: DDPHandle, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Pass a bucket to the handle. DDP calls this communication hook for every bucket, in order."""
    return state._receive(bucket)
