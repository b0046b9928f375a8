"""Averager: averages named tensors over the ranks with one compression method, step after step."""

import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from torchcomp import checkpoint
from torchcomp.aggregators import EF, Aggregator
from torchcomp.aggregators.rehearsal import rehearse_all
from torchcomp.bucket import DEFAULT_CAPS, Bucket, BucketShape, Group, partition
from torchcomp.component import Component
from torchcomp.compressors import Identity
from torchcomp.errors import RankFailureError, SpecError
from torchcomp.exchange import Exchange
from torchcomp.keys import Key, check_seed
from torchcomp.method_in_use import ClientSlots, MethodInUse
from torchcomp.nonfinite import FiniteWatch
from torchcomp.observer import Observer
from torchcomp.profiling import OFF, span
from torchcomp.residuals import hand_over, is_sent
from torchcomp.settlement import Reason, Settlement, Status
from torchcomp.spec import parse_aggregator
from torchcomp.state import State
from torchcomp.stats import Meter, Stats
from torchcomp.traffic import Traffic
from torchcomp.units import LR, Units, by_name

UNCHANGED = "This step was discarded: the residual and the parameters did not change."
LATE = (
    "This was found one step later: the residual is that before the step. The averaged gradients "
    "were set to zero, so the optimizer has applied at most its momentum and weight decay."
)

# Sends a residual that the current method has no slot for. Every value is sent uncompressed, so one
# step is usually enough; see `is_sent`.
_FLUSH = EF(Identity())
_SAME_LR = "The learning rate must be the same function of the step on all ranks."
_NO_RATIOS: Mapping[str, float] = {}
_SAME_FATE = (
    "On some ranks, an optimizer has stepped with the gradients of the last step, and on others "
    "these gradients were cleared: the replicas are no longer equal."
)


class Averager:
    """Averages named tensors over the ranks with one compression method, step after step.

    It does not depend on a model, an optimizer or DDP. One step is a call of ``begin``, one call of
    ``average`` per bucket, and a call of ``finish``. In ``finish``, all ranks decide together
    whether the step counts. If it does not, the state is rolled back to what it was before the
    step. A training loop without DDP averages its gradients with:

        averager = torchcomp.Averager(
            "ef(topk(0.01))", torchcomp.ProcessGroupExchange(), dict(model.named_parameters())
        )
        ...
        loss.backward()
        averager.average_all({name: p.grad for name, p in model.named_parameters()})
        optimizer.step()

    Args:
        aggregator: the method, as a spec string or an object.
        exchange: the collectives of the ranks.
        parameters: tensors by name, with the shapes, dtypes and devices of the tensors that will
            be averaged. They must match on all ranks.
        groups: names of the parameters that are compressed together. By default, groups of up to
            25 MiB.
        seed: seed of the method's random choices, an integer of at least 0.
        merged: whether a method that works on the whole model gets all groups as one bucket.
        what: what is averaged ("a gradient"), for error messages.
        unchanged: a sentence on what a discarded step leaves unchanged, for error messages.
        late: whether a step is checked when the next one begins, so that the host never waits at
            the end of a step; see :meth:`finish`.
        vote: returns whether the last step counts for all ranks, if that is decided after it has
            finished, such as by torchft's Manager. It is asked when the next step begins, and by
            :meth:`use`, :meth:`regroup` and :meth:`state_dict`. If not, the state goes back to that
            before the step.
        client_slots: returns, for the shape of a bucket, the slots that the caller opens in
            :attr:`state`. Declaring them adds them to checkpoints.
        checksum: whether frames have a checksum of their payload; see :mod:`torchcomp.wire`.
        takes_back: whether the caller calls :meth:`take_back`. All ranks then compare at each step
            whether they did.

    Attributes:
        state: the slots of this rank.
        step: number of steps that finished without an error.
        unused: names of the parameters that no rank used in the last step; see :meth:`finish`.
        void: whether the last step does not count, a scalar bool on the device, if it ended without
            a decision of the host. The caller then replaces the means where this is true.
        abandoned: whether the step in flight was abandoned; see :meth:`abandon`. Set it to False
            before the next one.
        guarded: whether a NaN discards the step. A transparent method passes it on, as plain DDP.
        grouped: whether the result depends on :attr:`buckets`. If not, any bucketing can be used.
        steps_kept: number of steps before the last one that count or not together with it; see
            :meth:`keep_before`.
        changes: number of changes of the method, its buckets or the whole state.
        observer: what watches the steps, or None.

    Raises:
        SpecError: if the method cannot be built, or if an argument is invalid.
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
        client_slots: ClientSlots | None = None,
        checksum: bool = False,
        takes_back: bool = False,
    ) -> None:
        self.exchange = exchange
        self.parameters = dict(parameters)
        groups = groups or partition(self.parameters.items(), DEFAULT_CAPS)
        self._running = MethodInUse(self.parameters, groups, merged, client_slots)
        self.observer: Observer | None = None
        self.changes = 0
        # A step can run in another thread than that of the user, who can abandon it at any time.
        self.abandoned = False
        self._lock = threading.RLock()  # held while the state changes
        self.state = State(self._lock)
        self._settlement = Settlement(self._lock)
        self.step = 0
        self.unused: tuple[str, ...] = ()
        self.void: Tensor | None = None
        self.seed = check_seed(seed)
        self._what, self._unchanged = what, unchanged
        self._late, self._vote = late, vote
        self._takes_back, self._taken_back = takes_back, False
        self._skipped = False  # whether the step that is being decided is one that `may_skip`
        exchange.checksum = self._checksum = checksum
        self._nbytes = sum(parameter.nbytes for parameter in self.parameters.values())
        self._units = Units()
        self._step_lrs: dict[str, float] = {}  # of the step in flight, if they were given
        self.steps_kept = 0
        self._meter = Meter()
        self._averaged = 0  # buckets of the step in flight, for the labels of a trace
        self._callbacks: list[Callable[[bool], None]] = []
        self._watch, self._combined = FiniteWatch(exchange), False
        # The ranks are compared in the first `begin`, not here: loading a checkpoint is a local
        # call, so only the next collective can show that one rank loaded it and another did not.
        self._verified = False
        # Whether _FLUSH is active instead of the method that the user chose, and whether the last
        # step has sent all that was left. If it counts, the flush ends when it is settled.
        self._flushing = self._flushed = False
        self.use(aggregator)

    @property
    def aggregator(self) -> Aggregator:
        """The method that the user chose; its ``str`` is the spec."""
        return self._aggregator

    @property
    def flushing(self) -> bool:
        """Whether the residual of another method is sent before :attr:`aggregator` runs."""
        return self._flushing

    @property
    def scale(self) -> float:
        """Loss scale of the gradients of the last step, which the state follows."""
        return self._units.scale

    @property
    def lrs(self) -> Mapping[str, float]:
        """Learning rates, by parameter name, whose update the residual's unit is.

        Empty if the residual has the unit of the gradients.
        """
        return self._units.lrs

    @property
    def groups(self) -> tuple[Group, ...]:
        """Names of the parameters that are compressed together."""
        return self._running.groups

    @property
    def buckets(self) -> tuple[Group, ...]:
        """The groups that the method averages: :attr:`groups`, or all of them merged.

        There is one bucket for each dtype and device then.
        """
        return self._running.buckets

    # One step.

    def begin(self, scale: float = 1.0, lr: LR = None, watch: FiniteWatch | None = None) -> None:
        """Begin a step. Roll back whatever a step that raised left behind.

        Args:
            scale: loss scale of this step's gradients. When it changes, the state is rescaled.
            lr: learning rate of this step, or one by parameter name. The residual is then kept in
                the unit of the update, the learning rate times the gradient: when a learning rate
                changes from a to b, the residual in the unit of the gradients is multiplied by
                a / b. At learning rate 0, where the optimizer applies nothing, the state of a
                parameter does not change. With None, the residual has the unit of the gradients
                from this step on. Pass it in all steps, or in none.
            watch: what has checked the values of this rank already, if the caller combines those of
                several ranks before it averages. Errors then name the ranks with the NaN.

        Raises:
            SpecError: if a learning rate is negative, not finite or missing.
            RankMismatchError: if the ranks differ in a value that must match, such as the spec or
                the step. They are compared at the first step, and again after loading a checkpoint
                or :meth:`regroup`.
            NonFiniteError, WireError, RankMismatchError: those of the last step, if they are raised
                late.
        """
        self.settle()
        with self._lock:
            if self.abandoned:
                self._require_wanted()
            self._step_lrs = {} if lr is None else by_name(lr, self.parameters)
            if self._settlement.status is not Status.COUNTED:
                self.state.rollback()
                self.exchange.reset()
                # Here, and not where it was abandoned: its thread could still report a bucket.
                self._tell_changed()
            verified = self._verified
        self._averaged, self.unused, self._skipped = 0, (), False
        self._watch, self._combined = watch or FiniteWatch(self.exchange), watch is not None
        if not verified:
            self._compare_ranks()
        units, lrs = self._units, self._step_lrs
        with self._lock:
            if self.abandoned:
                self._require_wanted()
            self._settlement.begin()
            ratios, units.before = _NO_RATIOS, None
            if scale != units.scale or lrs or units.lrs:
                ratios = units.follow(self.state, scale, lrs, self.parameters)
        running = self._running
        running.at(self.step)
        self._key = Key(self.seed, self.step, rank=self.exchange.rank, ahead=running.ahead)
        if self.observer is not None:
            self.observer.begin(ratios)

    def _compare_ranks(self) -> None:
        """Raise RankMismatchError if the ranks differ in what must be the same."""
        values = {"spec": self._aggregator, "step": self.step, "seed": self.seed}
        values |= {"groups": self.groups, "buckets": self.buckets, "flushing": self._flushing}
        # The scale that the state has, before it follows that of this step.
        values |= {"lr": self._step_lrs, "scale": self.scale, "checksum": self._checksum}
        # Each rank's threshold search starts from the previous thresholds. If they differed, the
        # ranks would run different collectives.
        found = [(name, t.tolist()) for name, t in self.state.items("thresholds")]
        names = {s.name for s in self._running.slots(self.exchange) if s.equal}
        equal = {f"{slot} {name}": p for slot in names for name, p in self.state.items(slot)}
        digest = checkpoint.digest_of(dict(sorted(equal.items())))
        on_level = {"thresholds": sorted(found), "checksum of equal slots": digest}
        self.exchange.verify("the first step", values, checkpoint.ONE_STEP, on_level)
        self._verified = True

    def average(self, bucket: Bucket) -> None:
        """Replace the values of a bucket with the method's estimate of their mean, in place.

        All ranks must average the same buckets in the same order. If :attr:`grouped`, these must be
        the :attr:`buckets`.
        """
        with span("average", self._averaged) if profiler._is_profiler_enabled else OFF:
            self._average(bucket)
        self._averaged += 1

    def _average(self, bucket: Bucket) -> None:
        if self.abandoned:
            self._require_wanted()
        flat, running, observer = bucket.flat, self._running, self.observer
        prepared = running.prepared(bucket.shape, self.exchange, self.state, flat.device)
        if self.guarded and not (prepared.shows_nonfinite or self._combined):
            self._watch.before(bucket)
        if observer is not None:
            observer.before(bucket, running.now)
        running.now.aggregate(flat, prepared, self._key)
        if observer is not None:
            observer.after(bucket, running.now)
        # A method that is dense for its first steps only is checked in all of them.
        if self.guarded:
            self._watch.after(bucket)

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

        If the averager was built with ``late=True``, the host does not wait. The device decides: it
        puts the state back if the step does not count, and :attr:`void` tells the caller, who then
        sets the means to zero. What is wrong is raised by the next :meth:`begin`, :meth:`use`,
        :meth:`regroup` or :meth:`state_dict`. A flush is never late, nor is a step with `used`.

        Args:
            may_skip: return False instead of raising if there is a NaN or an infinity.
            dense_bytes: bytes that plain DDP would have sent instead. By default, the bytes of one
                all-reduce of all parameters.
            where: the name of this step, for error messages.
            advice: what to do about a NaN, for the error message.
            used: names of the parameters that took part in the step on this rank. The state of a
                parameter that took part on no rank does not change. By default, all take part.
            leaving: whether this is the last step of this rank. Its residual then passes to the
                ranks that stay, in equal parts. None, on all ranks, if no rank ever leaves.

        Returns:
            Whether the step counts.

        Raises:
            NonFiniteError: on all ranks if there is a NaN or an infinity, unless `may_skip`; names
                the ranks and the parameters.
            WireError: on all ranks if a message was damaged; names its sender.
            RankMismatchError: on all ranks if the learning rates of the step differ between them.
        """
        with span("finish") if profiler._is_profiler_enabled else OFF:
            exchange = self.exchange
            if dense_bytes is None:
                dense_bytes = 2 * (exchange.world_size - 1) * self._nbytes // exchange.world_size
            used_by_any: Sequence[int] = ()
            if used is not None:
                used_by_any = exchange.max_at_end([name in used for name in self.parameters])
            leaves = [] if leaving is None else exchange.max_at_end([leaving])
            late = self._late and used is None and not self._flushing
            counts, flushed = True, False
            reasons: tuple[Reason, ...] = ()
            try:
                verdict, self.void = self._conclude(
                    where or f"step {self.step + 1}", advice, may_skip, late
                )
                if late:
                    reasons = (verdict,)
                else:
                    counts = verdict()
                if used_by_any:
                    self._note_unused(used_by_any)
                unchanged = self._unchanged_names()
                if counts and (unchanged or self._flushing or leaves):
                    flushed = self._change_commit(unchanged, leaves, leaving is True)
                if self.observer is not None:
                    self.observer.finished(counts, unchanged)
            except Exception as error:
                self._fail(error, used is None and not any(leaves), used_by_any, dense_bytes)
                raise
            with self._lock:
                if self.abandoned:
                    self._require_wanted()
                self._end(counts, flushed, reasons)
                self._meter.record(exchange.take_traffic(dense_bytes), self.step)
        for callback in self._callbacks:
            callback(counts)
        return counts

    def _conclude(
        self, where: str, advice: str, may_skip: bool, late: bool
    ) -> tuple[Reason, Tensor | None]:
        """Send the message that concludes the step.

        Returns:
            A function that waits for the others' and says whether the step counts. It raises, on
            all ranks, what is wrong with the step. And :attr:`void`.
        """
        if self.observer is not None:
            # Before the concluding message: what fails here on one rank fails on all.
            self.observer.finishing()
        exchange, watch, lrs = self.exchange, self._watch, self._step_lrs
        unchanged, taken_back = LATE if late else self._unchanged, self._taken_back
        same: list[tuple[Callable[[], bool], dict[str, Any], str]] = []
        if lrs:
            digest = zlib.crc32(repr(lrs).encode()).to_bytes(4, "big")
            same.append((exchange.same_at_end(digest), {"lr": lrs}, f"{_SAME_LR} {unchanged}"))
        fates: list[int] = []
        # Without a message at its end, a step is not worth one for this alone.
        if self._takes_back and exchange.must_conclude:
            fates = exchange.max_at_end([taken_back, not taken_back])
        self._taken_back = False
        decide = exchange.conclude_later(watch.finite(), where, unchanged)

        def counts() -> bool:
            finite = decide()
            for matches, values, problem in same:
                if not matches():
                    exchange.verify(where, values, problem)
            if all(fates) and fates:
                fate = {"gradients of the last step": "cleared" if taken_back else "applied"}
                exchange.verify(where, fate, _SAME_FATE)
            if not finite and not may_skip:
                error = self.state.undone("error") if late else self.state.pending("error")
                suffix = f" {advice}" if advice else ""
                what = f"{self._what} at {where}"
                raise watch.error(what, unchanged + suffix, self._shown(error))
            self._skipped = not finite
            return finite

        flags = decide.flags if late else None
        return counts, None if flags is None else flags[:2].ne(0).any()

    def _note_unused(self, used_by_any: Sequence[int]) -> None:
        # Not strict: if the collective failed, nothing is known about any parameter.
        flagged = zip(self.parameters, used_by_any, strict=False)
        self.unused = tuple(name for name, is_used in flagged if not is_used)

    def _unchanged_names(self) -> Collection[str]:
        """Return the parameters whose state stays as it was before the step."""
        if not self._step_lrs:
            return self.unused
        return {*self.unused, *(name for name, lr in self._step_lrs.items() if not lr)}

    def _change_commit(
        self, unchanged: Collection[str], leaves: Collection[int], leaving: bool
    ) -> bool:
        """Change what the step is about to commit; return whether it is the last of a flush."""
        if unchanged:
            self.state.undo(unchanged)
        if any(leaves):
            self._tell_changed()
            owned = self._running.owned(self.exchange)
            hand_over(self.state, self.exchange, self.parameters, owned, leaving)
        if not self._flushing:
            return False
        self._tell_changed()  # what is left of the residual is dropped if it is rounding
        return is_sent(self.state, self.exchange, self.parameters)

    def _end(self, counts: bool, flushed: bool, reasons: tuple[Reason, ...]) -> None:
        """End the step. `flushed` says whether it has sent all that a flush had left."""
        if counts:
            self.state.commit()
            if self.void is not None:
                self.state.revert_where(self.void)
        else:
            self.state.rollback()
        self.step += 1
        self._flushed = flushed
        if self._vote is not None:
            reasons = (*reasons, self._vote)
        if counts or reasons:
            self._settlement.end(*reasons)
        else:
            self._settlement.discard()

    def _fail(
        self, error: Exception, complete: bool, used_by_any: Sequence[int], dense_bytes: int
    ) -> None:
        """End a step that raises. `complete` says whether it could count as it is."""
        with self._lock:
            self._require_wanted()
            if used_by_any:
                self._note_unused(used_by_any)
            if self._vote is not None and isinstance(error, RankFailureError) and complete:
                # Another rank may have got the whole message, and count the step.
                self._end(True, False, ())
            else:
                self.state.rollback()
                self._settlement.discard()
            # A step that is discarded has sent its bytes all the same.
            self._meter.record(self.exchange.take_traffic(dense_bytes), self.step)

    # Whether the last step counts.

    @property
    def undecided(self) -> bool:
        """Whether it is still open if the last step counts."""
        return self._settlement.status is Status.OPEN

    @property
    def counted(self) -> bool:
        """Whether the last step counts."""
        return self._settlement.status is Status.COUNTED

    def settle(self) -> None:
        """Roll back the last step if it should not have counted, and raise what is wrong with it.

        The step counter and the state then are those before the step. If it counts, and it was the
        last one of a flush, the method that the user chose runs from here on.
        """
        self._decide()
        # A step that was kept can still be taken back with those that follow it.
        if self._flushed and not self.steps_kept:
            with self._lock:
                self._end_flush()

    def _decide(self) -> None:
        if self._settlement.status is Status.OPEN:
            self._settlement.ask(self._undo)
        if self.observer is not None:
            self.observer.settle()  # without the lock, which never waits for other ranks

    def take_back(self) -> None:
        """Undo the last step, because its gradients were cleared before an optimizer stepped.

        Steps before it that :meth:`keep_before` has joined to it are undone as well. All ranks must
        make the same call; if they do not, the next :meth:`finish` raises on all of them.
        """
        self._decide()  # and no more: it may be the last step of a flush
        with self._lock:
            self._taken_back = True
            if self._settlement.status is Status.COUNTED:
                self._undo()
            self.state.restore_before()
            self.step, self.steps_kept = self.step - self.steps_kept, 0

    def keep_before(self) -> None:
        """Let :meth:`take_back` undo the last step together with the next one.

        For gradients that no optimizer has used, and that the next step adds to.
        """
        self._decide()
        with self._lock:
            if self._settlement.status is Status.COUNTED:
                self.state.keep_before()
                self.steps_kept += 1

    def forget_before(self) -> None:
        """Note that an optimizer has used the gradients of the last step."""
        if self.steps_kept:
            with self._lock:
                self.state.forget_before()
                self.steps_kept = 0

    def abandon(self, step: int) -> None:
        """Discard the step in flight, although another thread may still be running it.

        From here on, that thread changes nothing. A step that has just ended is taken back.

        Args:
            step: the value of :attr:`step` when the step in flight began.
        """
        with self._lock:
            self.abandoned = True
            if self.step > step:
                self._undo()
            elif self._settlement.status is not Status.IN_FLIGHT:
                return
            # Ranks can be abandoned before and after they follow a new scale. Their states match
            # only in the units from before the step.
            self._units.go_back(self.state)
            self._settlement.discard()

    def _require_wanted(self) -> None:
        if self.abandoned:
            raise RuntimeError("this step was abandoned, because its backward pass raised")

    def _undo(self) -> None:
        """Take back the last step. The lock is held."""
        self._flushed = False
        if self.void is not None:
            # The host undoes the step from here on, and not the device.
            self.state.revert_where(self.void)
            self.void = None
        self.state.revert()
        self._settlement.discard()
        if not self._skipped:  # a step that the scaler skips is counted, with its bytes
            self.step -= 1
            self._meter.record(Traffic(), self.step)
        self._skipped = False

    def _tell_changed(self) -> None:
        """Tell what watches that the next step does not continue the last one."""
        if self.observer is not None:
            self.observer.changed()

    def average_all(self, tensors: Mapping[str, Tensor], *, lr: LR = None, **options: Any) -> bool:
        """Run one complete step: replace all `tensors` with their means over the ranks, in place.

        Args:
            tensors: for each of :attr:`parameters`, a tensor of the same shape.
            lr: learning rate of this step, to keep it inside the residual; see :meth:`begin`.
            options: passed to :meth:`finish`.

        Returns:
            Whether the step counts. If not, and on error, the tensors keep their values.

        Raises:
            SpecError: if a tensor is missing.
        """
        missing = [name for name in self.parameters if tensors.get(name) is None]
        if missing:
            raise SpecError(
                "average_all needs a tensor for each parameter, but there is none for "
                f"{checkpoint.listed(missing)}: if a gradient is None, pass zeros"
            )
        self.begin(lr=lr)
        # The buckets are copies. The tensors are written only once the step is known to count.
        buckets = [Bucket.read(self.shape_of(group), tensors) for group in self.buckets]
        for bucket in buckets:
            self.average(bucket)
        counts = self.finish(**options)
        for bucket in buckets if counts else ():
            bucket.write(tensors)
        return counts

    def on_finish(self, callback: Callable[[bool], None]) -> None:
        """Register a function that is called at the end of :meth:`finish` with its return value."""
        self._callbacks.append(callback)

    def shape_of(self, group: Group) -> BucketShape:
        """Return the shape of a bucket of these parameters."""
        return self._running.shape_of(group)

    # Changing the method, the groups or the parameters.

    def use(self, aggregator: str | Component) -> str:
        """Change the method between two steps. All ranks must make the same call.

        If the new method has slots for the whole residual, it continues with it. Otherwise,
        ``ef(identity)`` runs first, until the residual has been sent.

        Returns:
            A sentence on what happens to the residual, for the user.

        Raises:
            SpecError: if the method cannot be built.
        """
        method = parse_aggregator(aggregator)
        self.settle()
        # Here, before training: in the first step, compiling would run inside a backward pass.
        rehearse_all(method, self.parameters.values())
        self._aggregator = method
        self._flush(False)
        # A slot can exist without any values, so look for a value and not for a slot.
        if not any(True for debt in self.state.debts() for _ in self.state.items(debt)):
            return "There is no residual yet."
        if self.state.debts() <= {slot.name for slot in self._running.slots(self.exchange, method)}:
            return f"The residual is kept: {method} continues with it."
        self._flush(True)
        return (
            f"{method} cannot continue with the residual: the next steps send it with {_FLUSH}, as "
            "far as the dtype of the gradients can represent it."
        )

    def regroup(self, groups: Sequence[Group]) -> None:
        """Change which parameters are compressed together, between two steps.

        All ranks must make the same call.

        Args:
            groups: names of the parameters of each group. Each parameter must be in one group.
        """
        self.settle()
        self._running.groups = tuple(groups)
        self._install(self._running.method)
        self._verified = False

    def add(self, parameters: Mapping[str, Tensor], groups: Sequence[Group]) -> None:
        """Add parameters, between two steps. All ranks must make the same call."""
        self.parameters |= parameters
        self._nbytes += sum(parameter.nbytes for parameter in parameters.values())
        self._running.groups = (*self.groups, *groups)
        self._running.buckets = (*self.buckets, *groups)
        self.changes += 1

    def _install(self, method: Aggregator) -> None:
        running, exchange = self._running, self.exchange
        with self._lock:
            buckets, before = running.buckets_of(method), running.buckets
            # The server residual is stored by the old buckets' shards.
            owned = running.owned(exchange)
            running.buckets = buckets
            self._run(method)
            declared = {slot.name: slot for slot in running.slots(exchange)}
            # A server residual fits only the shards of the same buckets. Otherwise, add it to this
            # rank's own residual.
            if buckets != before or not any(slot.sharded for slot in declared.values()):
                self.state.unshard(owned, exchange.world_size)
            # Unsent gradient is never dropped here, even if the new method has no slot for it:
            # `use` starts a flush.
            self.state.drop(self.state.slots().keys() - self.state.debts() - declared.keys())

    def _run(self, method: Aggregator) -> None:
        self._running.run(method, self.step)
        self.changes += 1
        self.guarded, self.grouped = not method.transparent, method.depends_on_grouping
        self._tell_changed()

    def _flush(self, flushing: bool) -> None:
        """Run the method that sends what is left of a residual, or the one that the user chose."""
        self._flushing = flushing
        self._install(_FLUSH if flushing else self._aggregator)

    def _end_flush(self) -> None:
        """From the next step on, run the method that the user chose, without a residual."""
        self.state.drop(self.state.debts())
        self._flushed = False
        self._flush(False)

    def _shown(self, parts: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the residuals that show a NaN of a gradient, by parameter name."""
        for name, part in () if self._combined else parts:
            if self._running.now.residual_shows_nonfinite(self.parameters[name].dtype):
                yield name, part

    # Counters and checkpoints.

    @property
    def stats(self) -> Stats:
        """Counters of this rank after its last step: bytes of that step, and totals.

        Any thread can read them at any time.
        """
        return self._meter.stats

    def residual_norms(self, slot: str = "error") -> dict[str, float]:
        """Return the Euclidean norm of this rank's residual by parameter name.

        The host waits for the device once. Any thread can call this at any time: the residual is
        that after the last step that has finished.

        Args:
            slot: "error" for the residual of this rank's gradients, or "server_error" for the
                server residual of the shards that this rank owns.
        """
        # Held until the norms are read: the next step writes to the tensors of this one.
        with self._lock:
            parts = dict(self.state.items(slot))
            if not parts:
                return {}
            norms = torch._foreach_norm(list(parts.values()))
            # Parameters can be on several devices. The copies to the first do not wait.
            gathered = torch.stack([norm.to(norms[0].device) for norm in norms])
            return dict(zip(parts, gathered.tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: plain tensors, numbers and strings, keyed by parameter name.

        Every rank must save its own. ``torch.load(..., weights_only=True)`` can load it.
        """
        self.settle()
        with self._lock:
            running = self._running
            slots = checkpoint.save_slots(running.slots(self.exchange), self.state, self.parameters)
            return {
                **checkpoint.header(str(self._aggregator), self.exchange),
                "step": self.step,
                "seed": self.seed,
                "scale": self.scale,
                "lrs": dict(self.lrs),
                "flushing": self._flushing,
                "groups": [list(group) for group in self.groups],
                "buckets": [list(group) for group in self.buckets],
                "parameters": checkpoint.layout_of(self.parameters),
                "traffic": self._meter.state_dict(),
                "slots": slots,
            }

    def prepare(
        self,
        state: Any,
        advice: Mapping[str, str] = checkpoint.ADVICE,
        aggregator: Aggregator | None = None,
    ) -> Callable[[], None]:
        """Check a complete state dict without changing anything.

        Args:
            state: the result of :meth:`state_dict` on this rank.
            advice: what to do if "spec" or "world_size" differs, for the error message.
            aggregator: the method of the state, if the run changes to it.

        Returns:
            A function that restores the state. It restores the groups as well, so the run
            continues bit for bit even if this object was built with other groups.

        Raises:
            CheckpointError: if the state is damaged, or if it belongs to another model, method,
                rank or world size.
        """
        aggregator = aggregator or self._aggregator
        checkpoint.check_header(state, str(aggregator), self.exchange, advice)
        checkpoint.check_engine(state, self.parameters)
        # During a flush, the checkpoint has the slots of _FLUSH and the spec of the next method.
        method = _FLUSH if state["flushing"] else aggregator
        buckets = checkpoint.groups_of(state["buckets"])
        declared = self._running.slots(self.exchange, method, buckets)
        slots = checkpoint.load_slots(declared, state, self.parameters, str(aggregator))
        return partial(self._restore, aggregator, state, slots)

    def _restore(
        self, aggregator: Aggregator, state: Mapping[str, Any], slots: checkpoint.LoadedSlots
    ) -> None:
        running, units = self._running, self._units
        running.groups = checkpoint.groups_of(state["groups"])
        running.buckets = checkpoint.groups_of(state["buckets"])
        self.step, self.seed = state["step"], state["seed"]
        units.scale, units.lrs = float(state["scale"]), dict(state["lrs"])
        self._meter.load_state_dict(state["traffic"], self.step)
        self._aggregator, self._flushing = aggregator, state["flushing"]
        # A fresh one: a step in flight must not outlive the old state.
        self.state = State(self._lock)
        self._settlement.discard()
        self._flushed, self.steps_kept, self._taken_back = False, 0, False
        for name, (kind, sharded, parts) in slots.items():
            self.state.load(name, kind, sharded, parts)
        self._run(_FLUSH if self._flushing else aggregator)
        self._verified = False

    def load_state_dict(self, state: dict[str, Any], aggregator: Aggregator | None = None) -> None:
        """Restore the result of :meth:`state_dict` on this rank. On error, nothing changes.

        Args:
            state: of this rank.
            aggregator: the method of the state, if the run changes to it.

        Raises:
            CheckpointError: see :meth:`prepare`.
        """
        restore = self.prepare(state, aggregator=aggregator)
        with self._lock:
            restore()
