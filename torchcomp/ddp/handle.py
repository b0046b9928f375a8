"""Handle: the communication hook of one DDP model, and what a user can ask of it."""

# DDP inspects the hook's signature, so this module must not postpone the evaluation of annotations.

import weakref
from dataclasses import dataclass, field
from typing import Any, NoReturn

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
from torchcomp.ddp.checks import KEEPS_ITS_HOOK, check_not_joined
from torchcomp.ddp.executors import Executor
from torchcomp.ddp.payout import is_paid, pay_out
from torchcomp.ddp.snapshot import check_state_dict, load_memories, save_memories
from torchcomp.ddp.unused import UnusedWatch
from torchcomp.errors import NonFiniteError
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.nonfinite import FiniteWatch
from torchcomp.spec import parse_aggregator
from torchcomp.state import State
from torchcomp.stats import Meter, Stats

_NOTHING_KEPT = "Nothing of this step entered the error memory, and no parameter has changed."
_SCALER = (
    f"{_NOTHING_KEPT} If a GradScaler is meant to skip such steps, hand it over, scaler=scaler, "
    "to what was installed on the model: torchcomp.register or torchcomp.JointSpar"
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


@dataclass
class BackwardPass:
    """What one backward pass has brought into the hook so far.

    Attributes:
        finite: watches its buckets.
        deliveries: DDP's buckets, in order.
        failure: the first error; the buckets behind it are not exchanged.
        running: whether it has begun and is not over.
    """

    finite: FiniteWatch
    deliveries: list[Delivery] = field(default_factory=list)
    failure: Exception | None = None
    running: bool = False


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
        self._backward = BackwardPass(FiniteWatch(exchange))
        self._closed = False
        # Whether a rank alone has loaded a checkpoint shows only when all ranks look.
        self._verified = False
        self._delivering = False
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
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    @property
    def groups(self) -> tuple[Group, ...]:
        """Names of parameters that are compressed together, where the method depends on it."""
        return self._groups

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
            RuntimeError: in the middle of a backward pass, or after :meth:`close`.
        """

        def build() -> tuple[Aggregator, dict[str, Any]]:
            self._require_idle("swap")
            self._require_open("swap")
            aggregator = parse_aggregator(spec)
            return aggregator, {"spec": aggregator}

        aggregator = self._exchange.agree("handle.swap", {"spec": spec}, build)
        self._use(aggregator)
        held = any(True for _ in self._state.worker.items())
        self._delivering = held and not aggregator.remembers
        if not held:
            return "There is no error memory yet."
        if aggregator.remembers:
            return f"The error memory is kept: {aggregator} goes on with it."
        return (
            f"{aggregator} keeps no memory: the next step adds what there is to its gradients, as "
            "far as their dtype can hold it, and later steps the rest."
        )

    def regroup(self, groups: tuple[Group, ...]) -> None:
        """Compress other parameters together; for parts of torchcomp that need groups of their own.

        To be called on all ranks alike, between two steps.

        Args:
            groups: names that belong together; each parameter once.
        """
        self._groups = groups
        self._use(self._aggregator)
        self._verified = False

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
            "buckets": [list(group) for group in self._buckets],
            "thresholds": [dict(self._state.agreed(group)) for group in self._buckets],
            **save_memories(self._state, self._parameters, self._owned(self._buckets)),
        }

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
        check_state_dict(state, str(self._aggregator), self._parameters, self._exchange)
        memories = load_memories(state, self._parameters)
        self._meter.load_state_dict(state["traffic"])
        self._state = memories
        self._buckets = checkpoint.groups(state["buckets"])
        self._step = state["step"]
        self._seed = state["seed"]
        self._scale = state["scale"]
        self._delivering = state["delivering"]
        self.regroup(checkpoint.groups(state["groups"]))

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
        if self._backward.running:
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
        self._backward.deliveries.append(delivery)
        return delivery

    def _begin_step(self) -> None:
        check_not_joined(self._model())
        self._backward = BackwardPass(FiniteWatch(self._exchange), running=True)
        # Whatever an earlier step left unfinished, by an error in the middle of it, never was.
        self._state.rollback()
        self._exchange.forget()
        self._assembly.begin()
        self._follow_scale()

    def _follow_scale(self) -> None:
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        if scale != self._scale:
            self._state.scale(scale / self._scale)
            self._scale = scale

    # Runs in the executor, bucket by bucket.

    def _exchange_safely(self, delivery: Delivery) -> None:
        try:
            if self._backward.failure is None:
                self._exchange_bucket(delivery)
        except Exception as error:
            # Raised at the end of the backward pass: DDP would turn it into a cast error here.
            self._backward.failure = error
        if delivery.is_last:
            for held in self._backward.deliveries:
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
            self._backward.finite.before(bucket)
        if self._delivering:
            pay_out(bucket, self._state.worker, self._exchange.world_size)
        key = Key(self._seed, self._step, rank=self._exchange.rank)
        self._aggregator.aggregate(bucket, self._exchange, self._state, key)
        if guarded:
            self._backward.finite.after(bucket)

    def _settle(self) -> None:
        nbytes = sum(p.nbytes for p in self._parameters.values())
        self._meter.record(self._exchange.take_traffic(nbytes))
        if self._backward.finite.conclude(f"step {self._step + 1}", _NOTHING_KEPT):
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
        error = self._backward.finite.error(where, _SCALER, traces)
        self._state.rollback()
        return error

    def _end_delivery(self) -> None:
        if self._delivering and is_paid(self._state.worker):
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
        self._backward.running = False
        if self._backward.failure is not None:
            # Behind DDP's own final callback, so that DDP is ready for another iteration.
            after_backward(self._raise_failure)

    def _raise_failure(self) -> None:
        failure, self._backward.failure = self._backward.failure, None
        if failure is not None:
            raise failure


def hook(state: Handle, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook; DDP calls it for every bucket, in order."""
    return state._receive(bucket)
