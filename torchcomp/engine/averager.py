"""Averager: averages named tensors over the ranks with one compression method, step after step."""

import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from torchcomp.aggregators import Aggregator
from torchcomp.aggregators.rehearsal import rehearse_all
from torchcomp.checkpoints.checkpoint import listed
from torchcomp.checkpoints.resume import FLUSH, Resumable
from torchcomp.engine.bucket import Bucket, BucketShape, Group, Shard, merge, partition
from torchcomp.engine.keys import Key, check_seed
from torchcomp.engine.nonfinite import FiniteWatch
from torchcomp.engine.observer import Observer
from torchcomp.engine.prepared import Prepared
from torchcomp.engine.profiling import OFF, span
from torchcomp.engine.settlement import Reason, Status
from torchcomp.engine.state import LR, Slot, by_name, hand_over, is_sent
from torchcomp.exchange import Exchange
from torchcomp.kernels.swap import fill_where
from torchcomp.specs.component import Component
from torchcomp.specs.errors import RankFailureError, SpecError
from torchcomp.specs.spec import parse_aggregator

UNCHANGED = "This step was discarded: the residual and the parameters did not change."

_LATE = (
    "This was found one step later: the residual is that before the step. The averaged gradients "
    "were set to zero, so the optimizer has applied at most its momentum and weight decay."
)
_SAME_LR = (
    "The learning rate must be the same function of the step on all ranks. If an optimizer has "
    "stepped since, the replicas are no longer equal: load a checkpoint."
)
_SAME_FATE = "On some ranks only, an optimizer has stepped: the replicas are no longer equal."


class Averager(Resumable):
    """Averages named tensors over the ranks with one compression method, step after step.

    One step is a call of ``begin``, one of ``average`` per bucket, and one of ``finish``, where all
    ranks decide together whether the step counts. If it does not, the state is rolled back to what
    it was before. A training loop without DDP averages its gradients with:

        averager = torchcomp.Averager(
            "ef(topk(0.01))", torchcomp.ProcessGroupExchange(), dict(model.named_parameters())
        )
        ...
        loss.backward()
        averager.average_all({name: p.grad for name, p in model.named_parameters()})

    Args:
        aggregator: the method, as a spec string or an object.
        exchange: the collectives of the ranks.
        parameters: tensors by name, with the shapes, dtypes and devices of those that will be
            averaged. They must match on all ranks.
        groups: names of the parameters that are compressed together. By default, groups of up to
            25 MiB.
        seed: seed of the method's random choices, an integer of at least 0.
        merged: whether a method that works on the whole model gets all groups as one bucket.
        what: what is averaged ("a gradient"), for error messages.
        unchanged: a sentence on what a discarded step leaves unchanged, for error messages.
        late: whether a step is checked when the next one begins; see :meth:`finish`.
        vote: returns whether the last step counts, if that is decided after it has finished, such
            as by torchft's Manager. Asked when the next step begins, or the state is read.
        client_slots: returns, for the shape of a bucket, the slots that the caller opens in
            :attr:`state`, to add them to checkpoints.
        checksum: whether frames have a checksum of their payload; see :mod:`torchcomp.routes.wire`.
        takes_back: whether the caller calls :meth:`take_back`, which all ranks then compare.

    Attributes, beside those of :class:`~torchcomp.checkpoints.resume.Resumable`:
        buckets: the groups that the method averages; merged, one for each dtype and device.
        unused: names of the parameters that no rank used in the last step; see :meth:`finish`.
        guarded: whether a NaN discards the step. A transparent method passes it on, as plain DDP.
        grouped: whether the result depends on :attr:`buckets`. If not, any bucketing can be used.
        changes: number of changes of the method, its buckets or the whole state.
        observers: what watches the steps, in this order.

    Raises:
        SpecError: if an argument is invalid.
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
        late: bool = False,
        vote: Callable[[], bool] | None = None,
        client_slots: Callable[[BucketShape], tuple[Slot, ...]] | None = None,
        checksum: bool = False,
        takes_back: bool = False,
    ) -> None:
        super().__init__()
        self.exchange = exchange
        self.parameters = dict(parameters)
        groups = groups or partition(self.parameters.items())
        self.groups = self.buckets = tuple(groups)
        self._merged, self._client_slots = merged, client_slots
        self._shapes: dict[Group, BucketShape] = {}
        self._prepared: dict[Group, Prepared] = {}
        self.observers: tuple[Observer, ...] = ()
        self.changes = 0
        self.unused: tuple[str, ...] = ()
        self.seed = check_seed(seed)
        self._what, self._unchanged = what, unchanged
        self._late, self._vote, self._takes_back = late, vote, takes_back
        exchange.checksum = self._checksum = checksum
        self._nbytes = sum(parameter.nbytes for parameter in self.parameters.values())
        self._step_lrs: dict[str, float] = {}  # of the step in flight, if they were given
        self._averaged = 0  # buckets of the step in flight, for the labels of a trace
        self._callbacks: list[Callable[[bool], None]] = []
        self._watch, self._combined = FiniteWatch(exchange), False
        self.use(aggregator)

    def begin(self, scale: float = 1.0, lr: LR = None, watch: FiniteWatch | None = None) -> None:
        """Begin a step. Roll back whatever a step that raised left behind.

        Args:
            scale: loss scale of this step's gradients. When it changes, the state is rescaled.
            lr: learning rate of this step, or one by parameter name; in all steps, or in none. The
                residual is then kept in the unit of the update: when a learning rate changes from a
                to b, the residual in the unit of the gradients is multiplied by a / b. At learning
                rate 0, the state of a parameter does not change.
            watch: what has checked this rank's values, before the caller combined those of ranks.

        Raises:
            SpecError: if a learning rate is negative, not finite or missing.
            RankMismatchError: if the ranks differ in a value that must match, such as the spec:
                compared at the first step, and after a checkpoint or :meth:`regroup`.
            NonFiniteError, WireError, RankMismatchError: those of the last step, if it was late.
        """
        self.settle()
        with self._lock:
            if self.abandoned:
                self._require_wanted()
            self._step_lrs = lrs = {} if lr is None else by_name(lr, self.parameters)
            if self.status is not Status.COUNTED:
                self.state.rollback()
                self.exchange.reset()
                # Here, and not where it was abandoned: its thread could still report a bucket.
                self._tell_changed()
            verified = self._verified
        self._averaged, self.unused = 0, ()
        self._watch, self._combined = watch or FiniteWatch(self.exchange), watch is not None
        if not verified:
            self._compare_ranks(lrs)
            with self._lock:  # another state can have been loaded meanwhile
                self._verified = not self.abandoned
        with self._lock:
            if self.abandoned:
                self._require_wanted()
            self.status, self._reasons = Status.IN_FLIGHT, ()
            ratios: Mapping[str, float] = {}
            units = self.units
            units.before = units.scale, units.lrs
            if scale != units.scale or lrs or units.lrs:
                ratios = units.follow(self.state, scale, lrs, self.parameters)
        self._follow_stage()
        self._key = Key(self.seed, self.step, rank=self.exchange.rank)
        for observer in self.observers:
            observer.begin(ratios)

    def average(self, bucket: Bucket) -> None:
        """Replace the values of a bucket with the method's estimate of their mean, in place.

        All ranks must average the same buckets in the same order. If :attr:`grouped`, these must be
        the :attr:`buckets`.
        """
        with span("average", self._averaged) if profiler._is_profiler_enabled else OFF:
            if self.abandoned:
                self._require_wanted()
            flat, now = bucket.flat, self.now
            prepared = self._prepare(bucket.shape, flat.device)
            if self.guarded and not (prepared.shows_nonfinite or self._combined):
                self._watch.before(bucket)
            for observer in self.observers:
                observer.before(bucket, now)
            now.aggregate(flat, prepared, self._key)
            for observer in self.observers:
                observer.after(bucket, now)
            # A method that is dense for its first steps only is checked in all of them.
            if self.guarded:
                self._watch.after(bucket)
        self._averaged += 1

    def finish(
        self,
        *,
        may_skip: bool = False,
        dense_bytes: int | None = None,
        where: str | None = None,
        advice: str = "",
        used: Collection[str] | None = None,
        leaving: bool | None = None,
    ) -> bool:
        """End the step. All ranks commit their state, or all ranks roll it back.

        With ``late=True``, the host does not wait. The device decides: it puts the state back if
        the step does not count, and :attr:`void` tells the caller, who then sets the means to zero.
        What is wrong is raised by the next :meth:`begin`, :meth:`use`, :meth:`regroup` or
        :meth:`state_dict`. A flush is never late, nor is a step with `used`.

        Args:
            may_skip: return False instead of raising if there is a NaN or an infinity.
            dense_bytes: bytes that plain DDP would have sent instead. By default, the bytes of one
                all-reduce of all parameters.
            where: the name of this step, for error messages.
            advice: what to do about a NaN, for error messages.
            used: names of the parameters that took part in the step on this rank, by default all.
                The state of a parameter that took part on no rank does not change.
            leaving: whether this is the last step of this rank. Its residual then passes to the
                ranks that stay, in equal parts. None, on all ranks, if no rank ever leaves.

        Returns:
            Whether the step counts. True as well if that is decided late.

        Raises:
            NonFiniteError: on all ranks, if there is a NaN or an infinity, unless `may_skip`.
            WireError: on all ranks, if a message was damaged; names its sender.
            RankMismatchError: on all ranks, if the learning rates of the step differ between them.
        """
        with span("finish") if profiler._is_profiler_enabled else OFF:
            exchange = self.exchange
            if dense_bytes is None:
                dense_bytes = 2 * (exchange.world_size - 1) * self._nbytes // exchange.world_size
            flags = [] if used is None else [name in used for name in self.parameters]
            used_by_any = exchange.max_at_end(flags) if flags else []
            leaves = [] if leaving is None else exchange.max_at_end([leaving])
            late = self._late and used is None and not self.flushing
            reasons: tuple[Reason, ...] = () if self._vote is None else (self._vote,)
            counts, flushed, self._keeps_number = True, False, late and may_skip
            try:
                verdict = self._ask(where or f"step {self.step + 1}", advice, may_skip, late)
                if late:
                    reasons = (verdict, *reasons)
                else:
                    counts = verdict()
                self._note_unused(used_by_any)
                unchanged = {*self.unused, *[n for n, lr in self._step_lrs.items() if not lr]}
                if counts and (unchanged or self.flushing or leaves):
                    flushed = self._change_commit(unchanged, leaves, leaving is True)
                for observer in self.observers:
                    observer.finished(counts, unchanged)
            except Exception as error:
                with self._lock:
                    self._require_wanted()
                    self._note_unused(used_by_any)
                    failed = isinstance(error, RankFailureError)
                    if failed and self._vote is not None and used is None and not any(leaves):
                        # Another rank may have got the whole message, and count the step.
                        self._flushed = False
                        self._end(True, (self._vote,))
                    else:
                        self.state.rollback()
                        self._discard()
                    self.meter.record(exchange.take_traffic(dense_bytes), self.step)
                raise
            with self._lock:
                if self.abandoned:
                    self._require_wanted()
                self._flushed = flushed
                self._end(counts, reasons)
                self.meter.record(exchange.take_traffic(dense_bytes), self.step)
        for callback in self._callbacks:
            callback(counts)
        return counts

    def _ask(self, where: str, advice: str, may_skip: bool, late: bool) -> Reason:
        """Send this rank's part of the message that ends the step; the result reads all parts."""
        for observer in self.observers:
            # Before the message: what fails here on one rank fails on all.
            observer.finishing()
        exchange, watch, lrs = self.exchange, self._watch, self._step_lrs
        taken_back, self._taken_back = self._taken_back, False
        unchanged = _LATE if late else self._unchanged
        same: Callable[[], bool] | None = None
        if lrs:
            same = exchange.same_at_end(zlib.crc32(repr(lrs).encode()).to_bytes(4, "big"))
        fates: list[int] = []
        # Without a message at its end, a step is not worth one for this alone.
        if self._takes_back and exchange.must_conclude:
            fates = exchange.max_at_end([taken_back, not taken_back])
        decide = exchange.conclude(watch.finite(), where, unchanged)
        self.void = decide.flags[:2].ne(0).any() if late and decide.flags is not None else None

        def counts() -> bool:
            finite = decide.wait()
            if same is not None and not same():
                exchange.verify(where, {"lr": lrs}, _SAME_LR)
            if all(fates) and fates:
                fate = {"gradients of the last step": "cleared" if taken_back else "applied"}
                exchange.verify(where, fate, _SAME_FATE)
            if not finite and not may_skip:
                residual = () if self._combined else self.state.pending("error", undone=late)
                shows = self.now.residual_shows_nonfinite
                shown = [part for part in residual if shows(self.parameters[part[0]].dtype)]
                problem = f"{unchanged} {advice}".rstrip()
                raise watch.error(f"{self._what} at {where}", problem, shown)
            return finite

        return counts

    def _note_unused(self, used_by_any: Sequence[int]) -> None:
        # Not strict: if the collective failed, nothing is known about any parameter.
        flagged = zip(self.parameters, used_by_any, strict=False)
        self.unused = tuple(name for name, is_used in flagged if not is_used)

    def _change_commit(
        self, unchanged: Collection[str], leaves: Collection[int], leaving: bool
    ) -> bool:
        if unchanged:
            self.state.undo(unchanged)
        if any(leaves):
            self._tell_changed()
            hand_over(self.state, self.exchange, self.parameters, self.owned(), leaving)
        if not self.flushing:
            return False
        self._tell_changed()  # what is left of the residual is dropped if it is rounding
        return is_sent(self.state, self.exchange, self.parameters)

    def settle(self) -> None:
        """Decide whether the last step counts. A flush that it ended is followed by the method."""
        self.decide()
        for observer in self.observers:
            # Without the lock, which never waits for other ranks. It may change the method.
            observer.settle()
        # A step that was kept can still be taken back with those that follow it.
        if self._flushed and not self.steps_kept:
            self._end_flush()

    def decide(self) -> None:
        super().decide()
        if self.status is Status.TAKEN_BACK:
            self._tell_changed()  # what was seen of this step says nothing

    def _tell_changed(self) -> None:
        for observer in self.observers:
            observer.changed()  # the next step does not continue the last one

    def average_all(self, tensors: Mapping[str, Tensor], *, lr: LR = None, **options: Any) -> bool:
        """Run one complete step: replace all `tensors` with their means over the ranks, in place.

        Args:
            tensors: for each of :attr:`parameters`, a tensor of the same shape.
            lr: passed to :meth:`begin`.
            options: passed to :meth:`finish`.

        Returns:
            Whether the step counts. If not, and on error, the tensors keep their values.

        Raises:
            SpecError: if a tensor is missing.
        """
        missing = [name for name in self.parameters if tensors.get(name) is None]
        if missing:
            problem = f"average_all needs a tensor for each parameter, and lacks {listed(missing)}"
            raise SpecError(f"{problem}: if a gradient is None, pass zeros")
        self.begin(lr=lr)
        # The buckets are copies. The tensors are written only once the step is known to count.
        buckets = [Bucket.read(self.shape_of(group), tensors) for group in self.buckets]
        for bucket in buckets:
            self.average(bucket)
        counts = self.finish(**options)
        for bucket in buckets if counts else ():
            if self.void is not None:
                fill_where(self.void.to(bucket.flat.device), bucket.flat, 0.0)
            bucket.write(tensors)
        return counts

    def on_finish(self, callback: Callable[[bool], None]) -> None:
        """Register a function that is called at the end of :meth:`finish` with its return value."""
        self._callbacks.append(callback)

    def use(self, aggregator: str | Component) -> str:
        """Change the method between two steps. All ranks make the same call.

        If the new method has slots for the whole residual, it continues with it. Otherwise,
        ``ef(identity)`` runs first, until the residual has been sent.

        Returns:
            A sentence on what happens to the residual, for the user.

        Raises:
            SpecError: if the method cannot be built.
        """
        method = parse_aggregator(aggregator)
        self.settle()
        # In the first step, compiling would run inside a backward pass.
        rehearse_all(method, self.parameters.values())
        self.aggregator = method
        self._flush(False)
        # A slot can exist without any values, so look for a value and not for a slot.
        if not any(True for debt in self.state.debts() for _ in self.state.items(debt)):
            return "There is no residual yet."
        if self.state.debts() <= {slot.name for slot in self.slots()}:
            return f"The residual is kept: {method} continues with it."
        self._flush(True)
        return (
            f"{method} cannot continue with the residual: the next steps send it with {FLUSH}, as "
            "far as the dtype of the gradients can represent it."
        )

    def regroup(self, groups: Sequence[Group]) -> None:
        """Change which parameters are compressed together, between two steps."""
        self.settle()
        self.groups = tuple(groups)
        self._flush(self.flushing)
        self._verified = False

    def add(self, parameters: Mapping[str, Tensor], groups: Sequence[Group]) -> None:
        """Add parameters, between two steps."""
        self.parameters |= parameters
        self._nbytes += sum(parameter.nbytes for parameter in parameters.values())
        self.groups = (*self.groups, *groups)
        self.buckets = (*self.buckets, *groups)
        self.changes += 1

    def _flush(self, flushing: bool) -> None:
        """Run the user's method, or FLUSH before it, with the groups. The state follows."""
        with self._lock:
            self.flushing = flushing
            method = FLUSH if flushing else self.aggregator
            owned, before = self.owned(), self.buckets
            merged = method.whole_model and self._merged
            self.buckets = merge(self.groups, self.parameters) if merged else self.groups
            declared = {slot.name: slot for slot in self.slots(method)}
            # A server residual is stored by the shards of the old buckets, and fits no others.
            if self.buckets != before or not any(slot.sharded for slot in declared.values()):
                self.state.unshard(owned, self.exchange.world_size)
            self.state.keep(declared)
            if "thresholds" in declared:
                self._verified = False  # the ranks compare how they search
            self._run(method)

    def _end_flush(self) -> None:
        with self._lock:
            self.state.drop(self.state.debts())
            self._flushed = False
            self._flush(False)

    # --- The method that runs, and what its buckets are prepared with ---

    def _run(self, method: Aggregator) -> None:
        self.running = self.now = method
        self._stage = 0, 0
        self.forget()
        self._follow_stage()
        self.changes += 1
        self.guarded, self.grouped = not method.transparent, method.depends_on_grouping
        self._tell_changed()

    def _follow_stage(self) -> None:
        if self._stage[0] <= self.step < self._stage[1]:
            return
        starts = (*self.running.stages, sys.maxsize)
        self._stage = next(pair for pair in pairwise(starts) if pair[0] <= self.step < pair[1])
        now = self.running.at(self.step)
        if now != self.now:
            # A stage has workspaces of its own, and those of a high ratio are large.
            self.now = now
            self.forget()

    def forget(self) -> None:
        """Prepare all buckets again, because the ranks, the state or the method have changed."""
        self._prepared.clear()

    def _prepare(self, shape: BucketShape, device: torch.device) -> Prepared:
        found = self._prepared.get(shape.names)
        # `is` first: comparing two shapes compares hundreds of names.
        same = found is not None and (found.shape is shape or found.shape == shape)
        if found is not None and same and found.device == device:
            return found
        # Drop those from before DDP rebuilt its buckets.
        names = set(shape.names)
        self._prepared = {n: p for n, p in self._prepared.items() if names.isdisjoint(n)}
        prepared = self.now.prepared(shape, self.exchange, self.state, device)
        self._prepared[shape.names] = prepared
        return prepared

    def shape_of(self, group: Group) -> BucketShape:
        shape = self._shapes.get(group)
        if shape is None:
            shape = self._shapes[group] = BucketShape.of(group, self.parameters)
        return shape

    def owned(self) -> list[Shard]:
        """Return this rank's shard of each bucket."""
        world_size, rank = self.exchange.world_size, self.exchange.rank
        return [self.shape_of(group).shard(world_size, rank) for group in self.buckets]

    def slots(
        self, method: Aggregator | None = None, buckets: Sequence[Group] | None = None
    ) -> Iterator[Slot]:
        """Iterate over the slots of all buckets: the method's, then the client's."""
        world_size, rank = self.exchange.world_size, self.exchange.rank
        for shape in map(self.shape_of, self.buckets if buckets is None else buckets):
            yield from (method or self.running).slots(shape, world_size, rank)
            if self._client_slots is not None:
                yield from self._client_slots(shape)
