"""Handle: the communication hook of one DDP model, and what a user can ask of it."""

# DDP inspects the hook's signature, so this module must not postpone the evaluation of annotations.

import weakref
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from torchcomp.aggregators import Aggregator
from torchcomp.averager import Averager
from torchcomp.bucket import Bucket
from torchcomp.component import Component
from torchcomp.ddp.checks import KEEPS_ITS_HOOK, check_not_joined
from torchcomp.ddp.executors import Executor, after_backward
from torchcomp.ddp.reordering import Reordering
from torchcomp.ddp.unused import UnusedWatch
from torchcomp.spec import parse_aggregator
from torchcomp.stats import Stats

_SCALER = (
    "If a GradScaler is meant to skip such steps, hand it over, scaler=scaler, to what "
    "was installed on the model: torchcomp.register or torchcomp.JointSpar"
)

Future = torch.futures.Future[Tensor]


class Handle:
    """Compressed gradient exchange of one DDP model; made by :func:`torchcomp.register`.

    The hook hands every bucket to an executor (a thread for gloo, a side stream for CUDA), which
    averages it while the backward pass goes on. The last bucket concludes the step.

    Attributes:
        averager: the engine: method, state and counters.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        averager: Averager,
        executor: Executor,
        scaler: "torch.amp.GradScaler | None",
    ) -> None:
        # Weak, because DDP's reducer holds the handle: a cycle would keep the model alive.
        self._model = weakref.ref(model)
        self.averager = averager
        self._names = {id(parameter): name for name, parameter in averager.parameters.items()}
        self._executor = executor
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        may_leave_unused = bool(model.find_unused_parameters) and not model.static_graph
        self._unused = UnusedWatch(averager.parameters) if may_leave_unused else None
        self._reordering, self._reordered = Reordering(None), (False, averager.buckets)
        self._closed = False
        self._running = False
        # DDP's buckets in the backward pass in progress, and the first error of their exchange.
        self._arrived: list[tuple[Bucket, Future]] = []
        self._failure: Exception | None = None
        self._finalizer = weakref.finalize(self, executor.close)

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
        """Counters of this rank: bytes of the last step and in all."""
        return self.averager.stats

    def residual_norms(self, slot: str = "error") -> dict[str, float]:
        """Euclidean norm of this rank's residual, by parameter name; waits for the device.

        Args:
            slot: "error", what this rank has not sent; or "server_error", what it has not sent
                back as the owner of shards.
        """
        return self.averager.residual_norms(slot)

    def swap(self, spec: str | Component) -> str:
        """Change the method between two steps; to be called on all ranks alike.

        Args:
            spec: the new method.

        Returns:
            A sentence that says what becomes of the residual.

        Raises:
            SpecError: if the spec cannot be built.
            RankMismatchError: if the ranks give different specs.
            RuntimeError: in the middle of a backward pass, or after :meth:`close`.
        """

        def make() -> tuple[Aggregator, dict[str, Any]]:
            self._require_idle("swap")
            self._require_open("swap")
            aggregator = parse_aggregator(spec)
            return aggregator, {"spec": aggregator}

        aggregator = self.averager.exchange.build("handle.swap", {"spec": spec}, make)
        return self.averager.use(aggregator)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: plain tensors, numbers and strings, keyed by parameter name.

        Every rank saves its own. It loads with ``torch.load(..., weights_only=True)``. After a
        backward pass that raised, it is the state before that step.

        Raises:
            RuntimeError: in the middle of a backward pass.
        """
        self._require_idle("state_dict")
        return self.averager.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` of this rank returned; nothing changes on error.

        The groups that are compressed together come from the checkpoint, so the run goes on bit for
        bit even if DDP's buckets have another size now.

        Raises:
            CheckpointError: if it is another model's, method's, rank's or world size's, or damaged.
            RuntimeError: in the middle of a backward pass, or after :meth:`close`.
        """
        self._require_idle("load_state_dict")
        self._require_open("load_state_dict")
        self.averager.load_state_dict(state)

    def close(self) -> None:
        """End the background thread. DDP cannot drop a hook, so the model cannot train on."""
        self._closed = True
        self._finalizer()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Handle":
        # A copy of the model, to average its weights for one, lists the hook but does not call it.
        return self

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a handle belongs to its process and its process group, and cannot be pickled: save "
            "handle.state_dict(), and of the model model.module.state_dict()"
        )

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _require_idle(self, call: str) -> None:
        # A backward pass that raised has left `_running` behind, but no graph task.
        if self._running and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{call} in the middle of a backward pass: call it between two steps"
            )

    def _require_open(self, call: str) -> None:
        if self._closed:
            raise RuntimeError(f"{call} of a closed handle: {KEEPS_ITS_HOOK}")

    # Called by the hook, in the backward pass.

    def _receive(self, grad_bucket: GradBucket) -> Future:
        if self._closed:
            raise RuntimeError(f"this handle is closed, and {KEEPS_ITS_HOOK}")
        parameters = grad_bucket.parameters()
        names = tuple([self._names[id(parameter)] for parameter in parameters])
        flat, is_last = grad_bucket.buffer(), grad_bucket.is_last()
        bucket = Bucket(self.averager.shape_of(names), flat)
        future: Future = torch.futures.Future(devices=[flat.device] if flat.is_cuda else [])
        scale = None
        if grad_bucket.index() == 0:
            check_not_joined(self._model())
            self._arrived, self._failure, self._running = [], None, True
            scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        self._arrived.append((bucket, future))
        if is_last:
            after_backward(self._finish_backward)
        self._executor.submit(partial(self._exchange, bucket, scale, is_last))
        return future

    # Runs in the executor, bucket by bucket.

    def _exchange(self, bucket: Bucket, scale: float | None, is_last: bool) -> None:
        """Average one of DDP's buckets; `scale` comes with the first, and the last concludes."""
        try:
            if self._failure is None:
                if scale is not None:
                    self._begin(scale)
                if self._unused is not None:
                    self._unused.before(bucket)
                for group in self._reordering.add(bucket):
                    self.averager.average(group)
                if is_last:
                    self._conclude()
        except Exception as error:
            # Raised at the end of the backward pass: DDP would turn it into a cast error here.
            self._failure = error
        if is_last:
            for held, future in self._arrived:
                future.set_result(held.flat)

    def _begin(self, scale: float) -> None:
        averager = self.averager
        averager.begin(scale)
        wanted = (averager.grouped, averager.buckets)
        if wanted != self._reordered:
            shapes = [averager.shape_of(group) for group in averager.buckets]
            self._reordering = Reordering(shapes if averager.grouped else None)
            self._reordered = wanted
        self._reordering.begin()

    def _conclude(self) -> None:
        if self._unused is not None:
            self._unused.undo(self.averager.exchange, self.averager.state)
            self._unused.reset()
        self.averager.finish(may_skip=self._scaler is not None, advice=_SCALER)

    # Runs in the backward pass again, once all of it is done.

    def _finish_backward(self) -> None:
        self._executor.join()
        self._running = False
        if self._failure is not None:
            # Behind DDP's own final callback, so that DDP is ready for another iteration.
            after_backward(self._raise_failure)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def hook(state: Handle, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook; DDP calls it for every bucket, in order."""
    return state._receive(bucket)
