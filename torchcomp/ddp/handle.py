"""Handle: the user's interface to the compressed exchange of one model."""

import math
import threading
import weakref
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from torchcomp.aggregators import Aggregator
from torchcomp.aggregators.rehearsal import rehearse_all
from torchcomp.checkpoints.gathering import Gatherable
from torchcomp.checkpoints.redistribution import Place
from torchcomp.ddp.buckets import Buckets
from torchcomp.ddp.discarded import Discarded
from torchcomp.ddp.executors import AT_EXIT_SECONDS
from torchcomp.ddp.loop import LossScale, OfOneProcess, OptimizerLRs
from torchcomp.engine.stats import Stats
from torchcomp.exchange import Exchange
from torchcomp.specs.component import Component
from torchcomp.specs.spec import parse_aggregator

SCALER_ADVICE = "If a GradScaler should skip such steps, pass scaler=scaler to torchcomp.register"
_NO_GUARD = SimpleNamespace(report=None, alarms=())


class Handle(OfOneProcess, Gatherable):
    """Compressed gradient exchange of one model; returned by :func:`torchcomp.register`.

    Attributes:
        averager: the engine, with the method, its state and the counters.
        seconds_waited: time for which backward passes of this rank have waited for the worker
            thread after the last gradient was computed, in total. 0 on CUDA, where the stream
            waits and the host does not.
        guard: its last `report`, None before the first one, and what it found, `alarms`.
        closed: whether :meth:`close` was called.
        choice: the :class:`torchcomp.Choice` of ``register(model, "auto")``; None before, and with
            any other method.
    """

    choice: Any = None
    _after_close = "Register the model again to continue training"  # advice in errors

    def __init__(
        self,
        model: torch.nn.Module,
        buckets: Buckets,
        parameters: Mapping[str, Tensor],
        scaler: "torch.amp.GradScaler | None",
        lrs: OptimizerLRs | None,
    ) -> None:
        self._buckets = buckets
        self.averager = buckets.averager
        self.guard: Any = next(iter(buckets.averager.observers), _NO_GUARD)
        self.closed, self.seconds_waited, self._lrs = False, 0.0, lrs
        scales = scaler is not None and scaler.is_enabled()
        self._loss_scale = LossScale(scaler, model) if scaler is not None and scales else None
        # Gradients of a step that does not count, if only the device knows that: a scaler skips
        # the step because of the infinity, and without one, the optimizer gets zeros.
        self._void_value = math.inf if scales else 0.0
        self._discarded: Discarded | None = None
        if buckets.gathers:  # a manager decides itself
            self._discarded = Discarded(self.averager, parameters, buckets.everyone.rank == 0)
        self._running = False
        self._step_before = 0  # steps before the backward pass that is running
        self._thread = threading.current_thread()  # of the last forward pass
        # Ends the threads also if the user deletes the model without `close`.
        self._finalizer = weakref.finalize(self, buckets.close, AT_EXIT_SECONDS)

    def __repr__(self) -> str:
        return f"<torchcomp.Handle '{self.method}': {self.stats}>"

    @property
    def method(self) -> Aggregator:
        """The aggregator in use; its ``str`` is the spec."""
        return self.averager.aggregator

    @property
    def stats(self) -> Stats:
        """Counters of this rank after its last step. Any thread can read them at any time."""
        return self.averager.stats

    def residual_norms(self, slot: str = "error") -> dict[str, float]:
        """Return the Euclidean norm of this rank's residual, by parameter name; this waits.

        Args:
            slot: "error" for the residual of this rank's gradients, or "server_error" for its
                server residual as the owner of shards.
        """
        return self.averager.residual_norms(slot)

    def swap(self, spec: str | Component) -> str:
        """Change the method between two steps. Call this on all ranks with the same spec.

        The callback of a guard may call it as well: if only some ranks do, the next step raises
        RankMismatchError on all of them. After a swap, ``"auto"`` no longer chooses.

        Args:
            spec: the new method.

        Returns:
            A sentence on what happens to the residual.

        Raises:
            SpecError: if the spec is invalid.
            RankMismatchError: if the specs differ between ranks.
            RuntimeError: during a backward pass, or after :meth:`close`.
        """

        def make() -> tuple[Aggregator, dict[str, Any]]:
            self._require("swap")
            self._take_back_discarded()
            aggregator = self._parse(spec)
            return aggregator, {"spec": aggregator}

        if self.averager.settling:
            # No collective over the user's group, where others can be running: the step compares.
            return self.averager.use(self._parse(spec))
        return self.averager.use(self._buckets.everyone.build("handle.swap", {"spec": spec}, make))

    def _parse(self, spec: str | Component) -> Aggregator:
        aggregator = parse_aggregator(spec)
        self._check_method(aggregator)
        rehearse_all(aggregator, self.averager.parameters.values())
        return aggregator

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: tensors, numbers and strings, keyed by parameter name.

        Every rank saves its own, which loads with ``torch.load(..., weights_only=True)``. If one
        rank writes the checkpoint for all, save :meth:`gather_state_dict` instead. After a backward
        pass that raised, this is the state before that step.

        Raises:
            RuntimeError: during a backward pass.
        """
        self._require_idle("state_dict")
        self._take_back_discarded()
        return self._buckets.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned on this rank.

        With it, the groups of parameters that are compressed together: the resumed run is
        bit-identical, even if DDP now has another bucket size. On error, nothing changes.

        Raises:
            CheckpointError: if the state is of another model, method, rank or world size, or
                damaged.
            RuntimeError: during a backward pass, or after :meth:`close`.
        """
        self._require("load_state_dict")
        self._buckets.load_state_dict(state, self._method_of(state))

    def leave(self) -> None:
        """Say that the next step of this rank is its last one, with ``register(manager=...)``.

        At its end, its residual passes to the ranks that stay, with one dense all-reduce. Go on
        until :attr:`left` is True: a step that the manager does not count is repeated.

        Raises:
            RuntimeError: without a manager, or after :meth:`close`.
        """
        self._require_open("leave")
        self._buckets.leave()

    @property
    def left(self) -> bool:
        """Whether the step after :meth:`leave` counts, so that this rank can exit.

        Read it after ``should_commit()``, or after the step of torchft's optimizer.
        """
        return self._buckets.left

    @property
    def _gather_over(self) -> Exchange:
        self._require_open("gather_state_dict or load_gathered")
        if not self._buckets.gathers:
            raise RuntimeError(
                "under a manager, the ranks come and go: save handle.state_dict() on each rank, "
                "and load it with handle.load_state_dict(state)"
            )
        return self._buckets.everyone

    @property
    def _place(self) -> Place:
        return self._buckets.place

    def close(self) -> None:
        """End the exchange, its threads and its connections. The model cannot train afterwards.

        Call this on all ranks. The last step is settled first, with the last comparison of a guard.
        After a backward pass that raised, neither is, and connections remain until the handle is
        deleted. DDP and FSDP2 keep the hook.

        Raises:
            NonFiniteError, WireError, RankMismatchError: those of the last step, if they are raised
                late. The handle is closed all the same.
        """
        if self.closed:
            return
        # After a backward pass that raised, another rank may never join what this one has sent.
        raised = self._running or self.averager.abandoned
        # A manager may not have voted yet. `state_dict` asks it.
        awaits_vote = self.averager.undecided and not self._buckets.gathers
        try:
            if not raised and not awaits_vote:
                self.averager.settle()
        finally:
            self.closed = True
            if self._finalizer.detach() is not None:
                self._buckets.close(AT_EXIT_SECONDS if raised else None)

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _method_of(self, state: Any) -> Aggregator | None:
        return None

    @staticmethod
    def _check_method(aggregator: Aggregator) -> None:
        """Raise SpecError if the method cannot run on this kind of model."""

    def _enter_pass(self) -> None:
        if self._running:
            self._abandon()
        if self.averager.abandoned:
            self._buckets.join()  # or its jobs would be taken for those of this one
            # One of them can have prepared a bucket for a state that was replaced since.
            self.averager.forget()
            self.averager.abandoned = False
        self._buckets.start()
        self._step_before, self._running = self.averager.step, True

    def _begin_step(self) -> tuple[float, dict[str, float] | None]:
        if self._discarded is not None and self._discarded.open:
            self._discarded.settle(in_backward=True)
            self._step_before = self.averager.step
        scale = 1.0 if self._loss_scale is None else self._loss_scale.read()
        return scale, None if self._lrs is None else self._lrs.read()

    def _abandon(self) -> None:
        self._running = False
        if self._discarded is not None:
            self._discarded.is_stepping = False  # an optimizer that ran it has ended its step
        self._buckets.abandon(self._step_before)

    def _take_back_discarded(self) -> None:
        if self._discarded is not None and self._discarded.open:
            self._discarded.settle(in_backward=False)

    def _require(self, call: str) -> None:
        self._require_idle(call)
        self._require_open(call)

    def _require_idle(self, call: str) -> None:
        # Check both: a backward pass that raised leaves `_running` set, but has no graph task.
        if not self._running:
            return
        # Another thread sees no graph task, so it cannot tell whether the pass has raised.
        elsewhere = self._thread is not threading.current_thread() and self._thread.is_alive()
        if elsewhere or torch._C._current_graph_task_id() != -1:
            raise RuntimeError(f"{call} was called during a backward pass, not between two steps")
        self._abandon()

    def _require_open(self, call: str) -> None:
        if self.closed:
            raise RuntimeError(f"{call} was called on a closed handle. {self._after_close}")
