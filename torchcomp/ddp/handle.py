"""Handle: the communication hook of one DDP model, and the user's interface to it."""

# DDP inspects the hook's signature, so this module must not postpone the evaluation of annotations.

import time
import weakref
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from torchcomp.aggregators import Aggregator
from torchcomp.aggregators.rehearsal import rehearse_all
from torchcomp.averager import Averager
from torchcomp.bucket import Bucket
from torchcomp.component import Component
from torchcomp.ddp.averaging import Averaging, Step
from torchcomp.ddp.checks import AFTER_CLOSE, check_not_joined
from torchcomp.ddp.executors import AT_EXIT_SECONDS, after_backward
from torchcomp.ddp.loss_scale import LossScale
from torchcomp.ddp.one_process import OfOneProcess
from torchcomp.ddp.optimizer_lrs import OptimizerLRs
from torchcomp.ddp.unused import UnusedWatch
from torchcomp.exchange import Exchange
from torchcomp.gathering import Gatherable
from torchcomp.profiling import label
from torchcomp.redistribution import Place
from torchcomp.spec import parse_aggregator
from torchcomp.stats import Stats

_SCALER_ADVICE = (
    "If a GradScaler should skip such steps, pass scaler=scaler to torchcomp.register or "
    "torchcomp.JointSpar"
)

Future = torch.futures.Future[Tensor]


class Handle(OfOneProcess, Gatherable):
    """Compressed gradient exchange of one DDP model; returned by :func:`torchcomp.register`.

    The hook submits every bucket to a thread (gloo) or a side stream (CUDA), which averages it in
    parallel with the backward pass. The last bucket ends the step.

    Attributes:
        averager: the engine, with the method, its state and the counters.
        seconds_waited: time for which backward passes of this rank have waited for the worker
            thread after the last gradient was computed, in total. 0 on CUDA, where the stream
            waits and the host does not.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        averaging: Averaging,
        scaler: "torch.amp.GradScaler | None",
        lrs: OptimizerLRs | None = None,
    ) -> None:
        # A weak reference, because DDP's reducer refers to the handle. A cycle would keep the
        # model alive.
        self._model = weakref.ref(model)
        self._averaging = averaging
        self.averager = averaging.averager
        # By id, because DDP passes parameters to the hook, not their names.
        parameters = averaging.parameters
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        loss_scale = LossScale(scaler)
        if loss_scale.in_use:
            model.register_forward_pre_hook(loss_scale.fetch)
        may_leave_unused = bool(model.find_unused_parameters) and not model.static_graph
        unused = UnusedWatch(parameters) if may_leave_unused else None
        self._step = _Step(self.averager, loss_scale, lrs, unused)
        self._closed = False
        self.seconds_waited = 0.0
        self._running = False
        # Ends the threads also if the user deletes the model without `close`.
        self._finalizer = weakref.finalize(self, averaging.close, AT_EXIT_SECONDS)

    def __repr__(self) -> str:
        return f"<torchcomp.Handle '{self.method}': {self.stats}>"

    @property
    def method(self) -> Aggregator:
        """The aggregator in use; its ``str`` is the spec."""
        return self.averager.aggregator

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    @property
    def stats(self) -> Stats:
        """Counters of this rank after its last step: bytes of that step, and in total.

        Any thread can read them at any time, for example one that logs during a backward pass.
        """
        return self.averager.stats

    def residual_norms(self, slot: str = "error") -> dict[str, float]:
        """Return the Euclidean norm of this rank's residual, by parameter name.

        This waits for the device.

        Args:
            slot: "error" for the residual of this rank's gradients, or "server_error" for its
                server residual as the owner of shards.
        """
        return self.averager.residual_norms(slot)

    def swap(self, spec: str | Component) -> str:
        """Change the method between two steps. Call this on all ranks with the same spec.

        Args:
            spec: the new method.

        Returns:
            A sentence that describes what happens to the residual.

        Raises:
            SpecError: if the spec is invalid.
            RankMismatchError: if the specs differ between ranks.
            RuntimeError: during a backward pass, or after :meth:`close`.
        """

        def make() -> tuple[Aggregator, dict[str, Any]]:
            self._require_idle("swap")
            self._require_open("swap")
            aggregator = parse_aggregator(spec)
            rehearse_all(aggregator, self.averager.parameters.values())
            return aggregator, {"spec": aggregator}

        aggregator = self._averaging.everyone.build("handle.swap", {"spec": spec}, make)
        return self.averager.use(aggregator)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: tensors, numbers and strings, keyed by parameter name.

        Every rank must save its own state, which loads with ``torch.load(..., weights_only=True)``.
        If one rank writes the checkpoint for all, save :meth:`gather_state_dict` instead.
        After a backward pass that raised, this is the state before that step.

        Raises:
            RuntimeError: during a backward pass.
        """
        self._require_idle("state_dict")
        return self._averaging.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned on this rank.

        The checkpoint also contains the groups of parameters that are compressed together. The
        resumed run is therefore bit-identical, even if DDP now has another bucket size. Nothing
        changes if an error is raised.

        Args:
            state: the state of this rank.

        Raises:
            CheckpointError: if the state is of another model, method, rank or world size, or
                damaged.
            RuntimeError: during a backward pass, or after :meth:`close`.
        """
        self._require_idle("load_state_dict")
        self._require_open("load_state_dict")
        self._averaging.load_state_dict(state)

    @property
    def _gather_over(self) -> Exchange:
        # close() has ended the process group of the exchange.
        self._require_open("gather_state_dict or load_gathered")
        return self._averaging.everyone

    @property
    def _place(self) -> Place:
        return self._averaging.place

    def close(self) -> None:
        """End the worker thread. The model cannot train afterwards: DDP cannot remove a hook."""
        self._closed = True
        if self._finalizer.detach() is not None:
            self._averaging.close()

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _require_idle(self, call: str) -> None:
        # Check both: a backward pass that raised leaves `_running` set, but has no graph task.
        if self._running and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{call} was called during a backward pass. Call it between two steps"
            )

    def _require_open(self, call: str) -> None:
        if self._closed:
            raise RuntimeError(f"{call} was called on a closed handle. {AFTER_CLOSE}")

    # --- Called by the hook, during the backward pass ---

    def _receive(self, grad_bucket: GradBucket) -> Future:
        if self._closed:
            raise RuntimeError(f"this handle is closed. {AFTER_CLOSE}")
        names = tuple([self._names[id(parameter)] for parameter in grad_bucket.parameters()])
        flat, first, last = grad_bucket.buffer(), grad_bucket.index() == 0, grad_bucket.is_last()
        bucket = Bucket(self._averaging.shape_of(names), flat)
        future: Future = torch.futures.Future(devices=[flat.device] if flat.is_cuda else [])
        if first:
            check_not_joined(self._model())
            self._running = True
            self._step.received.clear()
            self._averaging.start()
        self._step.received.append((flat, future))
        if last:
            after_backward(self._finish_backward)
        self._averaging.submit(bucket, self._step, first=first, last=last)
        return future

    # --- Called at the end of the backward pass ---

    def _finish_backward(self) -> None:
        start = time.perf_counter()
        with label("wait"):
            self._averaging.join()
        self.seconds_waited += time.perf_counter() - start
        self._running = False
        if self._averaging.failure is not None:
            # Raise after DDP's own final callback, so that DDP is ready for another iteration.
            after_backward(self._raise_failure)

    def _raise_failure(self) -> None:
        failure = self._averaging.failure
        self._averaging.start()
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

    def finish(self, dense_bytes: int | None = None) -> None:
        self._averager.finish(
            may_skip=self._loss_scale.in_use,
            dense_bytes=dense_bytes,
            advice=_SCALER_ADVICE,
            used=None if self._unused is None else self._unused.used,
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


def hook(state: Handle, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Pass a bucket to the handle. DDP calls this communication hook for every bucket, in order."""
    return state._receive(bucket)
