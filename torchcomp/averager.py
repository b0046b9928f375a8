"""Averager: the engine. The mean of named tensors over the ranks by one method, step after step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchcomp import checkpoint
from torchcomp.aggregators import EF, Aggregator
from torchcomp.bucket import Bucket, BucketShape, Caps, Group, Shard, merge, partition
from torchcomp.component import Component
from torchcomp.compressors import Identity
from torchcomp.errors import CheckpointError, SpecError
from torchcomp.exchange import Exchange
from torchcomp.keys import Key, check_seed
from torchcomp.nonfinite import FiniteWatch
from torchcomp.spec import parse_aggregator
from torchcomp.state import Kind, Slot, State
from torchcomp.stats import Meter, Stats
from torchcomp.traffic import Traffic, sum_bytes

UNCHANGED = "Nothing of this step entered the residual, and no parameter has changed."

_FLUSH = EF(Identity())
_ADVICE = {
    "spec": "use that method, load, and then swap to the new one",
    "world_size": "torchcomp.redistribute(states, world_size) makes it fit",
}


class Averager:
    """The mean of named tensors over the ranks by one method, step after step.

    It knows no model, no optimizer and no DDP. A step is ``begin``, an ``average`` for each bucket,
    and ``finish``, by which all ranks conclude together that the step counts, or that it does not:
    then the method's state is what it was before. A training loop without DDP averages by::

        averager = torchcomp.Averager(
            "ef(topk(0.01))", torchcomp.ProcessGroupExchange(), dict(model.named_parameters())
        )
        ...
        loss.backward()
        averager.average_all({name: p.grad for name, p in model.named_parameters()})
        optimizer.step()

    Args:
        aggregator: the method, as a spec string or an object.
        exchange: the ranks.
        parameters: by name, tensors with the shapes, dtypes and devices of what is averaged; the
            same on all ranks.
        groups: names of parameters that are compressed together; by default of up to 25 MiB.
        seed: seed of the method's random choices, a whole number of at least 0.
        merged: whether a method that works on the whole model gets all groups as one bucket.
        what: what is averaged, for errors.
        unchanged: what a step that fails leaves behind, for errors.
        client_slots: declares, by bucket, slots that the caller itself opens in :attr:`state`, so
            that checkpoints hold them.

    Attributes:
        buckets: the groups as the method in use wants them: as they are, or merged.
        state: the slots of this rank.
        step: steps that were exchanged to the end, without an error.

    Raises:
        SpecError: if the method cannot be built, or an argument cannot be used.
    """

    def __init__(
        self,
        aggregator: str | Component,
        exchange: Exchange,
        parameters: Mapping[str, Tensor],
        groups: Sequence[Group] | None = None,
        *,
        seed: int = 0,
        merged: bool = True,
        what: str = "a gradient",
        unchanged: str = UNCHANGED,
        client_slots: Callable[[BucketShape], tuple[Slot, ...]] | None = None,
    ) -> None:
        check_seed(seed)
        self.exchange = exchange
        self.parameters = dict(parameters)
        self.groups = tuple(groups or partition(self.parameters.items(), Caps()))
        self.buckets = self.groups
        self.state = State()
        self.step = 0
        self.seed = seed
        self._merged = merged
        self._what, self._unchanged = what, unchanged
        self._client_slots = client_slots
        self._shapes: dict[Group, BucketShape] = {}
        self._nbytes = sum(parameter.nbytes for parameter in self.parameters.values())
        self._scale = 1.0
        self._meter = Meter()
        self._callbacks: list[Callable[[bool], None]] = []
        self._watch = FiniteWatch(exchange)
        # Whether a rank alone has loaded a checkpoint shows only when all ranks look.
        self._verified = False
        self._flushing = False
        self.use(aggregator)

    @property
    def aggregator(self) -> Aggregator:
        """The method that was asked for; its ``str`` is the spec."""
        return self._aggregator

    @property
    def grouped(self) -> bool:
        """Whether the result depends on :attr:`buckets`; else any division of tensors will do."""
        return self._active.depends_on_grouping

    # A step.

    def begin(self, scale: float = 1.0) -> None:
        """Begin a step, and forget whatever a step that raised has left behind.

        Args:
            scale: loss scale of the gradients to come, which the state follows.

        Raises:
            RankMismatchError: at the first step, and at the first after a checkpoint was loaded, if
                the ranks differ in what they must share.
        """
        self.state.rollback()
        self.exchange.reset()
        self._watch = FiniteWatch(self.exchange)
        if not self._verified:
            facts = {"spec": self._aggregator, "step": self.step, "seed": self.seed}
            facts |= {"groups": self.groups, "buckets": self.buckets, "flushing": self._flushing}
            thresholds = [(name, t.tolist()) for name, t in self.state.items("thresholds")]
            facts["thresholds"] = sorted(thresholds)
            self.exchange.verify("the first step", facts, checkpoint.ONE_STEP)
            self._verified = True
        if scale != self._scale:
            self.state.scale(scale / self._scale)
            self._scale = scale

    def average(self, bucket: Bucket) -> None:
        """Replace the values of a bucket by the method's estimate of their mean, in place.

        All ranks average the same buckets in the same order: where :attr:`grouped`, one of
        :attr:`buckets` each.
        """
        method = self._active
        guarded = not method.transparent
        if guarded and not method.traces(bucket.flat.dtype):
            self._watch.before(bucket)
        key = Key(self.seed, self.step, rank=self.exchange.rank)
        method.aggregate(bucket, self.exchange, self.state, key)
        if guarded:
            self._watch.after(bucket)

    def finish(
        self,
        *,
        may_skip: bool = False,
        dense_bytes: int | None = None,
        where: str | None = None,
        advice: str = "",
    ) -> bool:
        """Conclude the step, on all ranks together: the state is committed, or rolled back.

        Args:
            may_skip: return False, instead of raising, for a step with a NaN or an infinity.
            dense_bytes: bytes that plain DDP would have sent instead; by default what it sends for
                one step of all parameters.
            where: which step this is, for errors.
            advice: what to do about a NaN, for the error.

        Returns:
            Whether the step counts.

        Raises:
            NonFiniteError: on all ranks, naming ranks and parameters.
            WireError: on all ranks, if a message was not intact, naming its sender.
        """
        if dense_bytes is None:
            dense_bytes = sum_bytes(self._nbytes, self.exchange.world_size)
        self._meter.record(self.exchange.take_traffic(dense_bytes))
        where = where or f"step {self.step + 1}"
        try:
            counts = self._watch.conclude(where, self._unchanged)
            if not counts and not may_skip:
                advice = f"{self._unchanged} {advice}".strip()
                raise self._watch.error(f"{self._what} of {where}", advice, self._traces())
        except Exception:
            self.state.rollback()
            raise
        if counts:
            flushed = self._flushing and self._flushed()
            self.state.commit()
            if flushed:
                self.state.drop(self.state.debts())
                self._flushing = False
                self._install(self._aggregator)
        else:
            self.state.rollback()
        self.step += 1
        for callback in self._callbacks:
            callback(counts)
        return counts

    def average_all(self, tensors: Mapping[str, Tensor], **options: Any) -> bool:
        """One whole step: replace all `tensors` by their means over the ranks, in place.

        Args:
            tensors: one for each of :attr:`parameters`, of its shape.
            options: as for :meth:`finish`.

        Returns:
            Whether the step counts; if not, and on error, the tensors keep their values.

        Raises:
            SpecError: if a tensor is missing.
        """
        lacking = [name for name in self.parameters if tensors.get(name) is None]
        if lacking:
            raise SpecError(
                f"average_all needs a tensor for each parameter, and there is none for "
                f"{checkpoint.listed(lacking)}: where a gradient is None, give zeros"
            )
        self.begin()
        buckets = [Bucket.read(self.shape_of(group), tensors) for group in self.buckets]
        for bucket in buckets:
            self.average(bucket)
        counts = self.finish(**options)
        for bucket in buckets if counts else ():
            bucket.write(tensors)
        return counts

    def on_finish(self, callback: Callable[[bool], None]) -> None:
        """Call this at the end of every :meth:`finish` with what it returns."""
        self._callbacks.append(callback)

    def shape_of(self, group: Group) -> BucketShape:
        """The shape of a bucket of these parameters."""
        shape = self._shapes.get(group)
        if shape is None:
            shape = self._shapes[group] = BucketShape.of(group, self.parameters)
        return shape

    # What is averaged, and how.

    def use(self, aggregator: str | Component) -> str:
        """Change the method between two steps; all ranks alike.

        The residual goes on where the new method keeps one, too. Otherwise the next steps send what
        is left of it, by ``ef(identity)``, until nothing is.

        Returns:
            A sentence that says what becomes of the residual.

        Raises:
            SpecError: if the method cannot be built.
        """
        method = parse_aggregator(aggregator)
        self._aggregator, self._flushing = method, False
        self._install(method)
        if not any(True for debt in self.state.debts() for _ in self.state.items(debt)):
            return "There is no residual yet."
        if self.state.debts() <= {slot.name for slot in self._declared(method, self.buckets)}:
            return f"The residual is kept: {method} goes on with it."
        self._flushing = True
        self._install(_FLUSH)
        return (
            f"{method} keeps no such residual: the next steps send what is left of it by {_FLUSH}, "
            "as far as the gradients' dtype can hold it."
        )

    def regroup(self, groups: Sequence[Group]) -> None:
        """Compress other parameters together; all ranks alike, between two steps.

        Args:
            groups: names that belong together; each parameter once.
        """
        self.groups = tuple(groups)
        self._install(self._active)
        self._verified = False

    def add(self, parameters: Mapping[str, Tensor], groups: Sequence[Group]) -> None:
        """Average further parameters from now on; all ranks alike, between two steps."""
        self.parameters |= parameters
        self._nbytes += sum(parameter.nbytes for parameter in parameters.values())
        self.groups = (*self.groups, *groups)
        self.buckets = (*self.buckets, *groups)

    def _install(self, method: Aggregator) -> None:
        one = method.whole_model and self._merged
        buckets = merge(self.groups, self.parameters) if one else self.groups
        owned, self._active = self._owned(), method
        self.buckets, before = buckets, self.buckets
        declared = {slot.name: slot for slot in self._declared(method, buckets)}
        if buckets != before or not any(slot.sharded for slot in declared.values()):
            self.state.unshard(owned, self.exchange.world_size)
        kept = {*declared, *self.state.debts()}
        self.state.drop([name for name in self.state.slots() if name not in kept])

    def _flushed(self) -> bool:
        """Whether the step in flight leaves no residual on any rank. What it has rounded goes."""
        after, left = dict(self.state.pending("error")), False
        for name, before in self.state.items("error"):
            part, numbers = after.get(name, before), torch.finfo(self.parameters[name].dtype)
            # Unchanged is what no rank could send, for want of a gradient; large, what was cut off.
            if torch.equal(part, before) or (part.abs() > numbers.eps * numbers.max).any():
                left |= bool(part.any())
            else:
                part.zero_()
        flag = torch.tensor([left], dtype=torch.uint8, device=self.exchange.device)
        return not self.exchange.any_of(flag).any()

    def _owned(self) -> list[Shard]:
        """This rank's shard of each bucket."""
        rank, ranks = self.exchange.rank, self.exchange.world_size
        return [self.shape_of(group).shards(ranks)[rank] for group in self.buckets]

    def _declared(self, method: Aggregator, buckets: Sequence[Group]) -> Iterator[Slot]:
        """All slots of all buckets."""
        for group in buckets:
            shape = self.shape_of(group)
            yield from method.slots(shape, self.exchange.world_size, self.exchange.rank)
            if self._client_slots is not None:
                yield from self._client_slots(shape)

    def _traces(self) -> Iterator[tuple[str, Tensor]]:
        """Residuals that a NaN in a gradient shows in."""
        for name, part in self.state.pending("error"):
            if self._active.traces(self.parameters[name].dtype):
                yield name, part

    # What a user can ask.

    @property
    def stats(self) -> Stats:
        """Counters of this rank: bytes of the last step, and in all."""
        return self._meter.snapshot(self.step, self.step)

    def count(self, late: Traffic) -> None:
        """Add bytes that the last step has moved after its end."""
        self._meter.last.add(late)
        self._meter.total.add(late)

    def residual_norms(self, slot: str = "error") -> dict[str, float]:
        """Euclidean norm of this rank's residual, by parameter name; waits for the device.

        Args:
            slot: "error", what this rank has not sent; or "server_error", what it has not sent
                back as the owner of shards.
        """
        return {name: float(part.norm()) for name, part in self.state.items(slot)}

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: plain tensors, numbers and strings, keyed by parameter name.

        Every rank saves its own. It loads with ``torch.load(..., weights_only=True)``.
        """
        slots: dict[str, Any] = {}
        for slot in self._declared(self._active, self.buckets):
            entry: dict[str, Any] = {
                "kind": slot.kind.value,
                "sharded": slot.sharded,
                "tensors": {},
            }
            held = dict(self.state.items(slot.name))
            saved = checkpoint.save_slot(slot, held, self.parameters)
            slots.setdefault(slot.name, entry)["tensors"] |= saved
        return {
            **checkpoint.header(str(self._aggregator), self.exchange),
            "step": self.step,
            "seed": self.seed,
            "scale": self._scale,
            "flushing": self._flushing,
            "groups": [list(group) for group in self.groups],
            "buckets": [list(group) for group in self.buckets],
            "parameters": checkpoint.layout_of(self.parameters),
            "traffic": self._meter.state_dict(),
            "slots": slots,
        }

    def prepare(self, state: Any, advice: Mapping[str, str] = _ADVICE) -> Callable[[], None]:
        """Check a state dict as a whole; nothing changes.

        Args:
            state: what :meth:`state_dict` of this rank returned.
            advice: what to do about a "spec" or "world_size" that differs.

        Returns:
            A function that restores it, with its groups: the run goes on bit for bit even if other
            groups were built here.

        Raises:
            CheckpointError: if it is another model's, method's, rank's or world size's, or damaged.
        """
        checkpoint.check_header(state, str(self._aggregator), self.exchange, advice)
        checkpoint.check_engine(state, self.parameters)
        method = _FLUSH if state["flushing"] else self._aggregator
        slots: dict[str, tuple[Kind, bool, dict[str, Tensor]]] = {}
        for slot in self._declared(method, _groups(state["buckets"])):
            if slot.kind is not Kind.CACHE or slot.name in state["slots"]:
                parts = checkpoint.load_slot(slot, state, self.parameters)
                slots.setdefault(slot.name, (slot.kind, slot.sharded, {}))[2].update(parts)
        for name, saved in state["slots"].items():
            foreign = sorted(set(saved["tensors"]) - set(slots[name][2] if name in slots else ()))
            if foreign or name not in slots:
                raise CheckpointError(
                    f"a damaged checkpoint: slots['{name}'] holds what {self._aggregator} does not "
                    f"keep: {checkpoint.listed(foreign)}"
                )
        return partial(self._restore, state, slots)

    def _restore(
        self,
        state: Mapping[str, Any],
        slots: Mapping[str, tuple[Kind, bool, dict[str, Tensor]]],
    ) -> None:
        self._meter.load_state_dict(state["traffic"])
        self.groups, self.buckets = _groups(state["groups"]), _groups(state["buckets"])
        self.step, self.seed, self._scale = state["step"], state["seed"], float(state["scale"])
        self._flushing = state["flushing"]
        self._active = _FLUSH if self._flushing else self._aggregator
        self.state = State()
        for name, (kind, sharded, parts) in slots.items():
            self.state.load(name, kind, sharded, parts)
        self._verified = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` of this rank returned; nothing changes on error.

        Raises:
            CheckpointError: as :meth:`prepare`.
        """
        self.prepare(state)()


def average_in_place(exchange: Exchange, values: Tensor) -> None:
    """Replace `values` (1-D, contiguous) by their exact mean over the ranks.

    Divided by the number of ranks at the end. Gradients are multiplied by its reciprocal before,
    whose rounding errs to one side: weights that are averaged thousands of times would grow by it.
    """
    exchange.all_reduce(values)
    values.div_(exchange.world_size)


@torch.no_grad()
def exact_mean(exchange: Exchange, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the means of tensors over the ranks, in float32 or wider.

    Args:
        exchange: the ranks.
        tensors: the same names, shapes and dtypes on all of them.
    """
    means: dict[str, Tensor] = {}
    for group in merge(((name,) for name in tensors), tensors):
        bucket = Bucket.read(BucketShape.of(group, tensors).wide(), tensors)
        average_in_place(exchange, bucket.flat)
        means |= bucket.tensors()
    return means


def _groups(names: Sequence[Sequence[str]]) -> tuple[Group, ...]:
    return tuple(tuple(group) for group in names)
