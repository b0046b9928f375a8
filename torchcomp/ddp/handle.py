"""Handle: the communication hook of one DDP model, and what a user can ask of it."""

# DDP inspects the hook's signature, so this module must not postpone the evaluation of annotations.

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from torchcomp import checkpoint
from torchcomp.aggregators import Aggregator
from torchcomp.bucket import Bucket, Group, Shard, merge, owned_shards
from torchcomp.component import Component
from torchcomp.ddp.assembly import Assembly
from torchcomp.ddp.callbacks import after_backward
from torchcomp.ddp.executors import Executor
from torchcomp.ddp.unused import UnusedWatch
from torchcomp.errors import NonFiniteError, UnsupportedModelError
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.nonfinite import FiniteWatch
from torchcomp.spec import parse_aggregator
from torchcomp.state import State
from torchcomp.stats import Meter, Stats

_STATE_KEYS = (
    *("step", "seed", "scale", "delivering", "groups", "traffic"),
    *("shapes", "strides", "error", "buckets", "owner", "thresholds"),
)
_ADVICE = {
    "spec": "register that method, load, and then handle.swap(...) to the new one",
    "world_size": "torchcomp.redistribute(states, world_size) makes it fit",
}
_NOTHING_KEPT = "Nothing of this step entered the error memory, and no parameter has changed."
_SCALER = (
    f"{_NOTHING_KEPT} If a GradScaler is meant to skip such steps, hand it over: "
    "torchcomp.register(model, spec, scaler=scaler)"
)

Future = torch.futures.Future[Tensor]


@dataclass
class Delivery:
    """One of DDP's buckets on its way through the hook."""

    bucket: Bucket
    future: Future
    is_last: bool

    def release(self) -> None:
        """Tell DDP that the bucket holds its final values."""
        self.future.set_result(self.bucket.flat)


class Handle:
    """Compressed gradient exchange of one DDP model; made by :func:`torchcomp.register`.

    The hook hands every bucket to an executor (a thread for gloo, a side stream for CUDA), which
    aggregates it while the backward pass goes on. When the last bucket is through, the step is
    either committed to the error memory or, if a gradient was not finite, rolled back.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        parameters: dict[str, nn.Parameter],
        groups: tuple[Group, ...],
        aggregator: Aggregator,
        exchange: Exchange,
        executor: Executor,
        seed: int,
        scaler: "torch.amp.GradScaler | None",
    ) -> None:
        # Weak, because DDP's reducer holds the handle: a cycle would keep the model alive.
        self._model = weakref.ref(model)
        self._parameters = parameters
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._groups = groups
        self._exchange = exchange
        self._executor = executor
        self._seed = seed
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._scale = 1.0
        may_leave_unused = bool(model.find_unused_parameters) and not model.static_graph
        self._unused = UnusedWatch(parameters) if may_leave_unused else None
        self._state = State()
        self._meter = Meter()
        self._step = 0
        self._in_backward = False
        self._closed = False
        # Whether a rank alone has loaded a checkpoint shows only when all ranks look.
        self._verified = False
        self._delivering = False
        self._failure: Exception | None = None
        self._buckets = groups
        self._use(aggregator)
        self._finalizer = weakref.finalize(self, executor.close)

    def __repr__(self) -> str:
        return f"<torchcomp.Handle '{self._aggregator}': {self.stats}>"

    @property
    def method(self) -> Aggregator:
        """The aggregator in use; its ``str`` is the spec."""
        return self._aggregator

    @property
    def step(self) -> int:
        """Steps that were exchanged to the end, without an error."""
        return self._step

    @property
    def stats(self) -> Stats:
        """Counters of this rank: bytes of the last step and in all, and norms of the memory."""
        norms = {name: float(part.norm()) for name, part in self._state.worker.items()}
        owed = {name: float(part.norm()) for name, part in self._state.owner.items()}
        return self._meter.snapshot(self._step, self._step, norms, owed)

    def swap(self, spec: str | Component) -> str:
        """Change the method between two steps; to be called on all ranks alike.

        Args:
            spec: the new method.

        Returns:
            A sentence that says what becomes of the error memory.

        Raises:
            SpecError: if the spec cannot be built.
            RankMismatchError: if the ranks give different specs.
            RuntimeError: in the middle of a backward pass.
        """

        def build() -> tuple[Aggregator, dict[str, Any]]:
            self._require_idle("swap")
            aggregator = parse_aggregator(spec)
            return aggregator, {"spec": aggregator}

        aggregator = self._exchange.agree("handle.swap", {"spec": spec}, build)
        self._use(aggregator)
        if not any(True for _ in self._state.worker.items()):
            self._delivering = False
            return "There is no error memory yet."
        self._delivering = not aggregator.remembers
        if aggregator.remembers:
            return f"The error memory is kept: {aggregator} goes on with it."
        return f"{aggregator} keeps no memory: the next step adds what there is to its gradients."

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: plain tensors, numbers and strings, keyed by parameter name.

        Every rank saves its own. It loads with ``torch.load(..., weights_only=True)``.

        Raises:
            RuntimeError: in the middle of a backward pass.
        """
        self._require_idle("state_dict")
        return {
            **checkpoint.header(str(self._aggregator), self._exchange),
            "step": self._step,
            "seed": self._seed,
            "scale": self._scale,
            "delivering": self._delivering,
            "groups": [list(group) for group in self._groups],
            "traffic": self._meter.state_dict(),
            "shapes": checkpoint.shapes(self._parameters),
            "strides": checkpoint.strides(self._parameters),
            "error": checkpoint.shaped(self._state.worker.items(), self._parameters),
            "buckets": [list(group) for group in self._buckets],
            "owner": {name: part.clone() for name, part in self._state.owner.items()},
            "thresholds": [dict(self._state.agreed(group)) for group in self._buckets],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` of this rank returned; nothing changes on error.

        The groups that are compressed together come from the checkpoint, so the run goes on bit for
        bit even if DDP's buckets have another size now.

        Raises:
            CheckpointError: if it is another model's, method's, rank's or world size's.
            RuntimeError: in the middle of a backward pass.
        """
        self._require_idle("load_state_dict")
        checkpoint.check_header(state, str(self._aggregator), self._exchange, _STATE_KEYS, _ADVICE)
        checkpoint.check_shapes(state["shapes"], self._parameters)
        buckets = tuple(tuple(bucket) for bucket in state["buckets"])
        owned = self._owned(buckets)
        checkpoint.check_owner(state, owned, self._parameters)
        error = checkpoint.flat(state["error"], self._parameters)
        self._state.clear()
        self._state.worker.load(error)
        self._state.owner.load(checkpoint.on_devices(state["owner"], self._parameters))
        self._buckets = buckets
        for bucket, thresholds in zip(buckets, state["thresholds"], strict=True):
            self._state.agreed(bucket).update(thresholds)
        self._step = state["step"]
        self._seed = state["seed"]
        self._scale = state["scale"]
        self._delivering = state["delivering"]
        self._groups = tuple(tuple(group) for group in state["groups"])
        self._meter.load_state_dict(state["traffic"])
        self._use(self._aggregator)
        self._verified = False

    def close(self) -> None:
        """End the background thread. DDP cannot drop a hook, so the model cannot train on."""
        self._closed = True
        self._finalizer()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Handle":
        # A copy of the model, to average its weights for one, lists the hook but does not call it.
        return self

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _use(self, aggregator: Aggregator) -> None:
        self._aggregator = aggregator
        merged = merge(self._groups, self._parameters) if aggregator.whole_model else self._groups
        if merged != self._buckets or not aggregator.owes:
            self._state.settle(self._owned(self._buckets), self._exchange.world_size)
        self._buckets = merged
        self._assembly = Assembly(merged if aggregator.depends_on_grouping else None)

    def _owned(self, buckets: tuple[Group, ...]) -> list[Shard]:
        """This rank's shard of each bucket."""
        exchange = self._exchange
        return owned_shards(buckets, self._parameters, exchange.rank, exchange.world_size)

    def _require_idle(self, call: str) -> None:
        if self._in_backward:
            raise RuntimeError(
                f"{call} in the middle of a backward pass: call it between two steps"
            )

    # Called by the hook, in the backward pass.

    def _receive(self, grad_bucket: GradBucket) -> Future:
        if self._closed:
            raise RuntimeError(
                "this handle is closed, and DDP cannot drop its hook: to train on, build "
                "DistributedDataParallel anew (handle.swap('mean') instead of close() is plain DDP)"
            )
        if grad_bucket.index() == 0:
            self._begin_step()
        delivery = self._deliver(grad_bucket)
        if delivery.is_last:
            after_backward(self._finish_backward)
        self._executor.submit(lambda: self._exchange_safely(delivery))
        return delivery.future

    def _deliver(self, grad_bucket: GradBucket) -> Delivery:
        parameters = grad_bucket.parameters()
        names = tuple(self._names[id(parameter)] for parameter in parameters)
        sizes = tuple(parameter.numel() for parameter in parameters)
        flat = grad_bucket.buffer()
        devices: list[int | str | torch.device] = [flat.device] if flat.is_cuda else []
        delivery = Delivery(
            Bucket(names, sizes, flat), torch.futures.Future(devices=devices), grad_bucket.is_last()
        )
        self._deliveries.append(delivery)
        return delivery

    def _begin_step(self) -> None:
        model = self._model()
        if model is not None and model._join_config.enable:
            raise UnsupportedModelError(
                "model.join() stands in for ranks that ran out of data with gradients of its own, "
                "and an error memory cannot tell: give every rank the same number of batches"
            )
        self._in_backward = True
        self._failure = None
        self._deliveries: list[Delivery] = []
        # Whatever an earlier step left unfinished, by an error in the middle of it, never was.
        self._state.rollback()
        self._exchange.forget()
        self._assembly.begin()
        self._finite = FiniteWatch(self._exchange)
        self._follow_scale()

    def _follow_scale(self) -> None:
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        if scale != self._scale:
            self._state.scale(scale / self._scale)
            self._scale = scale

    # Runs in the executor, bucket by bucket.

    def _exchange_safely(self, delivery: Delivery) -> None:
        try:
            if self._failure is None:
                self._exchange_bucket(delivery)
        except Exception as error:
            # Raised at the end of the backward pass: DDP would turn it into a cast error here.
            self._failure = error
        if delivery.is_last:
            for held in self._deliveries:
                held.release()

    def _exchange_bucket(self, delivery: Delivery) -> None:
        if not self._verified:
            self._verify()
        if self._unused is not None:
            self._unused.before(delivery.bucket)
        for bucket in self._assembly.add(delivery.bucket):
            self._aggregate(bucket)
        if delivery.is_last:
            if self._unused is not None:
                self._unused.undo(self._exchange, self._state)
                self._unused.reset()
            self._settle()

    def _aggregate(self, bucket: Bucket) -> None:
        guarded = self._delivering or not self._aggregator.transparent
        if guarded and not self._aggregator.traces(bucket.flat.dtype):
            self._finite.before(bucket)
        if self._delivering:
            wide = torch.promote_types(bucket.flat.dtype, torch.float32)
            memory, rest = self._state.worker.open(bucket, wide)
            bucket.flat.copy_(memory + bucket.flat)
            rest.zero_()
        key = Key(self._seed, self._step, rank=self._exchange.rank)
        self._aggregator.aggregate(bucket, self._exchange, self._state, key)
        if guarded:
            self._finite.after(bucket)

    def _settle(self) -> None:
        nbytes = sum(p.nbytes for p in self._parameters.values())
        self._meter.record(self._exchange.take_traffic(nbytes))
        if self._finite.conclude(f"step {self._step + 1}", _NOTHING_KEPT):
            self._state.commit()
            self._end_delivery()
        else:
            if self._scaler is None:
                raise self._nonfinite_error()
            self._state.rollback()
        self._step += 1

    def _nonfinite_error(self) -> NonFiniteError:
        where = f"a gradient of step {self._step + 1}"
        traces = (
            (name, part)
            for name, part in self._state.worker.pending()
            if self._aggregator.traces(self._parameters[name].dtype)
        )
        error = self._finite.error(where, _SCALER, traces)
        self._state.rollback()
        return error

    def _end_delivery(self) -> None:
        # What belongs to a parameter that no rank used waits for a step that uses it.
        waiting = self._delivering and any(
            bool(part.any()) for _, part in self._state.worker.items()
        )
        if self._delivering and not waiting:
            self._state.clear()
            self._delivering = False

    def _verify(self) -> None:
        facts = {
            **{"step": self._step, "seed": self._seed, "groups": self._groups},
            "thresholds": [self._state.agreed(group) for group in self._buckets],
        }
        self._exchange.require_same("the first step", facts, checkpoint.ONE_STEP)
        self._verified = True

    # Runs in the backward pass again, once all of it is done.

    def _finish_backward(self) -> None:
        self._executor.join()
        self._in_backward = False
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
