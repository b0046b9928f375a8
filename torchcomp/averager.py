"""Averager: averages named tensors over the ranks with one compression method, step after step."""

import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchcomp import checkpoint
from torchcomp.aggregators import EF, Aggregator
from torchcomp.aggregators.rehearsal import rehearse_all
from torchcomp.bucket import DEFAULT_CAPS, Bucket, BucketShape, Group, Shard, merge, partition
from torchcomp.checks import check_at_least_0
from torchcomp.component import Component
from torchcomp.compressors import Identity
from torchcomp.draws import Ahead
from torchcomp.errors import CheckpointError, RankFailureError, SpecError
from torchcomp.exchange import Exchange
from torchcomp.keys import Key, check_seed
from torchcomp.nonfinite import FiniteWatch
from torchcomp.observer import Observer
from torchcomp.profiling import bucket_number, label
from torchcomp.residuals import hand_over, is_sent
from torchcomp.spec import parse_aggregator
from torchcomp.state import Kind, Slot, State
from torchcomp.stats import Meter, Stats
from torchcomp.traffic import Traffic, sum_bytes

LR = float | Mapping[str, float] | None
"""Learning rate of a step: one for all parameters, or one by name. None: not given."""

UNCHANGED = "This step was discarded: the residual and the parameters did not change."
LATE = (
    "This was found one step later, because of check='late': the residual is that before the step, "
    "but the optimizer has applied the step. Load parameters and optimizer from a checkpoint."
)

# Sends a residual that the current method has no slot for. Every value is sent uncompressed, so one
# step is usually enough; see `is_sent`.
_FLUSH = EF(Identity())
_SAME_LR = "The learning rate must be the same function of the step on all ranks."


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
        merged: whether buckets can have other parameters than `groups`: a method that works on the
            whole model then gets all groups as one bucket.
        what: what is averaged ("a gradient"), for error messages.
        unchanged: a sentence on what a discarded step leaves unchanged, for error messages.
        late: whether a step is checked when the next one begins. The host then never waits at the
            end of a step, but it raises errors after the step was applied: see
            :meth:`finish`.
        vote: returns whether the last step counts for all ranks, if that is decided after it has
            finished, such as by torchft's Manager. It is asked when the next step begins, and by
            :meth:`use`, :meth:`regroup` and :meth:`state_dict`. If not, the state goes back to that
            before the step.
        client_slots: returns, for the shape of a bucket, the slots that the caller opens in
            :attr:`state`. Declaring them adds them to checkpoints.

    Attributes:
        buckets: the groups that the current method compresses: :attr:`groups`, or all of them
            merged into one bucket per dtype and device.
        state: the slots of this rank.
        step: number of steps that finished without an error.
        scale: loss scale of the gradients of the last step, which the state follows.
        lrs: learning rates, by parameter name, whose update the residual's unit is. Empty if the
            residual has the unit of the gradients.
        unused: names of the parameters that no rank used in the last step; see :meth:`finish`.
        abandoned: whether the step in flight was abandoned; see :meth:`abandon`. Set it to False
            before the next one.
        observer: what watches the steps; None if nothing does. Set it before the first step.

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
        client_slots: Callable[[BucketShape], tuple[Slot, ...]] | None = None,
    ) -> None:
        self.exchange = exchange
        self.parameters = dict(parameters)
        self.groups = tuple(groups or partition(self.parameters.items(), DEFAULT_CAPS))
        self.buckets = self.groups
        # A step can run in another thread than that of the user, who can abandon it at any time.
        self.abandoned = False
        self._lock = threading.RLock()  # held while the state changes
        self._settling = threading.RLock()  # held while it is settled, which can wait for ranks
        self.state = State(self._lock)
        self._ahead = Ahead()
        self.step = 0
        self.unused: tuple[str, ...] = ()
        self.seed = check_seed(seed)
        self._merged = merged
        self._what, self._unchanged = what, unchanged
        self._late, self._vote = late, vote
        # Returns whether the last step counts, or raises if it does not; None if that is decided.
        self._undecided: Callable[[], bool] | None = None
        self._client_slots = client_slots
        self.observer: Observer | None = None
        self._shapes: dict[Group, BucketShape] = {}
        self._nbytes = sum(parameter.nbytes for parameter in self.parameters.values())
        self.scale = 1.0
        self.lrs: dict[str, float] = {}
        # Those before the step in flight, or before the last one; and whether one is in flight.
        self._units_before: tuple[float, dict[str, float]] = self.scale, self.lrs
        self._in_flight = False
        self._was_abandoned = False  # the last step
        self._step_lrs: dict[str, float] = {}  # of the step in flight, if they were given
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
        self._now = self._active

    @property
    def aggregator(self) -> Aggregator:
        """The method that the user chose; its ``str`` is the spec."""
        return self._aggregator

    @property
    def flushing(self) -> bool:
        """Whether the residual of another method is sent before :attr:`aggregator` runs."""
        return self._flushing

    @property
    def guarded(self) -> bool:
        """Whether a NaN discards the step. A transparent method passes it on, as plain DDP does."""
        return not self._active.transparent

    @property
    def grouped(self) -> bool:
        """Whether the result depends on :attr:`buckets`. If not, any bucketing can be used."""
        return self._active.depends_on_grouping

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
            self._require_wanted()
            self._step_lrs = _by_name(lr, self.parameters)
            self.state.rollback()
            if (self._in_flight or self._was_abandoned) and self.observer is not None:
                # Here, and not where it was abandoned: its thread could still report a bucket.
                self.observer.changed()
            self._was_abandoned = False
            verified = self._verified
        self.exchange.reset()
        self._averaged, self.unused = 0, ()
        self._watch, self._combined = watch or FiniteWatch(self.exchange), watch is not None
        if not verified:
            values = {"spec": self._aggregator, "step": self.step, "seed": self.seed}
            values |= {"groups": self.groups, "buckets": self.buckets, "flushing": self._flushing}
            # The scale that the state has, before it follows that of this step.
            values |= {"lr": self._step_lrs, "scale": self.scale}
            # Each rank's threshold search starts from the previous thresholds. If they differed,
            # the ranks would run different collectives.
            found = [(name, t.tolist()) for name, t in self.state.items("thresholds")]
            on_level = {"thresholds": sorted(found), "checksum of equal slots": self._digest()}
            self.exchange.verify("the first step", values, checkpoint.ONE_STEP, on_level)
            self._verified = True
        with self._lock:
            self._require_wanted()
            self._units_before, self._in_flight = (self.scale, dict(self.lrs)), True
            ratio = scale / self.scale
            self._rescale(scale)
            changed = self._follow(self._step_lrs)
        now = self._active.at(self.step)
        if now != self._now:
            # A stage has workspaces of its own, and those of a high ratio are large.
            self.state.free_scratch()
            self._now = now
        if self.observer is not None:
            names = changed if ratio == 1 else self.parameters
            self.observer.begin({name: ratio * changed.get(name, 1.0) for name in names})

    def _rescale(self, scale: float) -> None:
        """Convert residuals and estimates, which have the unit of the scaled gradients."""
        if scale != self.scale:
            self.state.scale(scale / self.scale)
            self.scale = scale

    def _follow(self, lrs: Mapping[str, float]) -> Mapping[str, float]:
        """Convert the residual, which is in the unit of the last update, to that of the next.

        Returns:
            What the residual was multiplied by, by parameter name, where it changed.
        """
        if not lrs:
            # From now on, what is unsent comes from steps whose learning rate is not known.
            self.lrs = {}
        nonzero = {name: lr for name, lr in lrs.items() if lr}
        ratios = {name: self.lrs.get(name, lr) / lr for name, lr in nonzero.items()}
        changed = {name: ratio for name, ratio in ratios.items() if ratio != 1}
        if changed:
            self.state.scale_debts(changed)
        self.lrs |= nonzero
        return changed

    def average(self, bucket: Bucket) -> None:
        """Replace the values of a bucket with the method's estimate of their mean, in place.

        All ranks must average the same buckets in the same order. If :attr:`grouped`, these must be
        the :attr:`buckets`.
        """
        with bucket_number(self._averaged), label("average"):
            self._average(bucket)
        self._averaged += 1

    def _average(self, bucket: Bucket) -> None:
        self._require_wanted()
        method, observer = self._now, self.observer
        # A method that is dense for its first steps only is checked in all of them.
        guarded = self.guarded
        # If the method's residual shows which parameters were non-finite, this pass over the
        # gradients is not needed.
        shown = self._combined or method.residual_shows_nonfinite(bucket.flat.dtype)
        if guarded and not shown:
            self._watch.before(bucket)
        if observer is not None:
            observer.before(bucket, method)
        key = Key(self.seed, self.step, rank=self.exchange.rank, ahead=self._ahead)
        method.aggregate(bucket, self.exchange, self.state, key)
        if observer is not None:
            observer.after(bucket, method)
        if guarded:
            self._watch.after(bucket)

    @label("finish")
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

        If the averager was built with ``late=True``, the step counts at first. What is wrong with
        it is raised by the next :meth:`begin`, :meth:`use`, :meth:`regroup` or :meth:`state_dict`.
        The state and :attr:`step` are then rolled back, but the caller has used the means. A flush
        is never late, nor is a step with `may_skip` or `used`.

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
        if dense_bytes is None:
            dense_bytes = sum_bytes(self._nbytes, self.exchange.world_size)
        where = where or f"step {self.step + 1}"
        flags = [] if used is None else [name in used for name in self.parameters]
        used_by_any = self.exchange.max_at_end(flags) if flags else []
        leaves = [] if leaving is None else self.exchange.max_at_end([leaving])
        late = self._late and used is None and not (may_skip or self._flushing)
        try:
            try:
                counts = self._conclude(where, f" {advice}" if advice else "", may_skip, late)
            finally:
                # Not strict: if the collective failed, nothing is known about any parameter.
                flagged = zip(self.parameters, used_by_any, strict=False)
                self.unused = tuple(name for name, is_used in flagged if not is_used)
            flushed = counts and self._prepare_commit(leaves, leaving is True)
        except Exception as error:
            if self.observer is not None:
                self.observer.finished(False, ())
            with self._lock:
                self._require_wanted()
                lost = isinstance(error, RankFailureError)
                if self._vote and lost and used is None and not any(leaves):
                    # Another rank may have got the whole message, and count the step.
                    self._end(True, False)
                else:
                    self.state.rollback()
                # A step that is discarded has sent its bytes all the same.
                self._meter.record(self.exchange.take_traffic(dense_bytes), self.step)
            raise
        if not counts and self.observer is not None:
            self.observer.finished(False, ())
        with self._lock:
            self._require_wanted()
            self._end(counts, flushed)
            self._meter.record(self.exchange.take_traffic(dense_bytes), self.step)
        for callback in self._callbacks:
            callback(counts)
        return counts

    def _conclude(self, where: str, advice: str, may_skip: bool, late: bool) -> bool:
        """Combine the checks of the step over the ranks; return whether it counts, or raise."""
        check_lrs = self._compare_lrs(where)
        # Before the concluding message: what fails here on one rank fails on all.
        if self.observer is not None:
            self.observer.finishing()
        undecided: Callable[[], bool] | None = None
        if late:
            counts, undecided = True, self._conclude_later(where, advice, check_lrs)
        else:
            counts = self.exchange.conclude(self._watch.finite(), where, self._unchanged)
            check_lrs(self._unchanged)
            if not counts and not may_skip:
                what, traces = f"{self._what} at {where}", self._traces(self.state.pending("error"))
                raise self._watch.error(what, self._unchanged + advice, traces)
        # Here, because a step that has just failed is not open.
        self._undecided = undecided
        return counts

    def _prepare_commit(self, leaves: Collection[int], leaving: bool) -> bool:
        """Change what the step is about to commit; return whether it is the last of a flush."""
        unchanged = {*self.unused, *(n for n, lr in self._step_lrs.items() if not lr)}
        if unchanged:
            self.state.undo(unchanged)
        if any(leaves):
            hand_over(self.state, self.exchange, self.parameters, self._owned(), leaving)
        flushed = self._flushing and is_sent(self.state, self.exchange, self.parameters)
        if self.observer is not None:
            if self._flushing or any(leaves):  # the residual has changed after the last bucket
                self.observer.changed()
            self.observer.finished(True, unchanged)
        return flushed

    def _end(self, counts: bool, flushed: bool) -> None:
        """End the step. `flushed` says whether it has sent all that a flush had left."""
        if counts:
            self.state.commit()
        else:
            self.state.rollback()
        self.step += 1
        self._in_flight, self._flushed = False, flushed
        if self._vote is not None:
            self._undecided = self._vote

    def abandon(self, step: int) -> None:
        """Discard the step in flight, although another thread may still be running it.

        From here on, that thread changes nothing. A step that has just ended is taken back.

        Args:
            step: the value of :attr:`step` when the step in flight began.
        """
        with self._lock:
            self.abandoned = True
            if self.step > step:
                self._take_back()
            elif not self._in_flight:
                return
            # Ranks can be abandoned before and after they follow a new scale. Their states match
            # only in the units from before the step.
            scale, lrs = self._units_before
            self._rescale(scale)
            self._follow(lrs)
            self.lrs, self._in_flight = lrs, False
            self._was_abandoned = True

    def _require_wanted(self) -> None:
        if self.abandoned:
            raise RuntimeError("this step was abandoned, because its backward pass raised")

    def _take_back(self) -> None:
        """Undo the last step."""
        with self._lock:
            self._undecided, self._flushed = None, False
            self.state.revert()
            self.step -= 1
            self._meter.record(Traffic(), self.step)
            if self.observer is not None:
                self.observer.changed()

    def _compare_lrs(self, where: str) -> Callable[[str], None]:
        """Add the learning rates of the step to the concluding message.

        Returns:
            A function for after that message: raises on every rank if the learning rates differ.
            Its argument is what state this leaves, for the error.
        """
        lrs = self._step_lrs
        digest = zlib.crc32(repr(lrs).encode()).to_bytes(4, "big")
        same = self.exchange.same_at_end(digest) if lrs else None

        def check(unchanged: str) -> None:
            if same is not None and not same():
                self.exchange.verify(where, {"lr": lrs}, f"{_SAME_LR} {unchanged}")

        return check

    def _conclude_later(
        self, where: str, advice: str, check_lrs: Callable[[str], None]
    ) -> Callable[[], bool]:
        """Send the concluding message. What is returned reads the result."""
        decide, watch = self.exchange.conclude_later(self._watch.finite(), where, LATE), self._watch

        def settle() -> bool:
            if not decide():
                traces = self._traces(self.state.items("error"))
                raise watch.error(f"{self._what} at {where}", LATE + advice, traces)
            check_lrs(LATE)
            return True

        return settle

    @property
    def undecided(self) -> bool:
        """Whether it is still open if the last step counts."""
        return self._undecided is not None

    def settle(self) -> None:
        """Roll back the last step if it should not have counted, and raise what is wrong with it.

        The step counter and the state then are those before the step. If it counts, and it was the
        last one of a flush, the method that the user chose runs from here on.
        """
        # A thread that was abandoned can still be waiting for the result.
        with self._settling:
            undecided = self._undecided
            if undecided is not None:
                counts = False
                try:
                    counts = undecided()
                finally:
                    self._decide(undecided, counts)
            if self.observer is not None:
                self.observer.settle()  # without the lock, which never waits for other ranks
            with self._lock:
                if self._flushed:
                    self._end_flush()

    def _decide(self, undecided: Callable[[], bool], counts: bool) -> None:
        with self._lock:
            # Not if another state was loaded meanwhile.
            if self._undecided is undecided:
                self._undecided = None
                if not counts:
                    self._take_back()

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
        shape = self._shapes.get(group)
        if shape is None:
            shape = self._shapes[group] = BucketShape.of(group, self.parameters)
        return shape

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
        self._aggregator, self._flushing = method, False
        self._install(method)
        # A slot can exist without any values, so look for a value and not for a slot.
        if not any(True for debt in self.state.debts() for _ in self.state.items(debt)):
            return "There is no residual yet."
        if self.state.debts() <= {slot.name for slot in self._declared(method, self.buckets)}:
            return f"The residual is kept: {method} continues with it."
        self._flushing = True
        self._install(_FLUSH)
        return (
            f"{method} cannot continue with the residual: the next steps send it with {_FLUSH}, as "
            "far as the dtype of the gradients can represent it."
        )

    def change_ranks(self, exchange: Exchange, *, same_ranks: bool = False) -> None:
        """Go on over another exchange, between two steps, without sending any values.

        If its ranks are others, this rank keeps its residual, and its server residual is added to
        it. Both are multiplied by the ratio of the numbers of ranks. If a rank that joins has none,
        and all others go on, the mean over the ranks of what is unsent does not change. Estimates
        start again on all ranks, because a rank that joins has none.

        Args:
            exchange: the collectives.
            same_ranks: whether its ranks are those of the last exchange. The state then stays.
        """
        self.settle()
        with self._lock:
            self._require_wanted()
            self.state.rollback()
            if not same_ranks:
                before = self.exchange.world_size
                self.state.unshard(self._owned(), before)
                self.state.drop(self.state.slots().keys() - self.state.debts())
                self.state.scale_debts(dict.fromkeys(self.parameters, exchange.world_size / before))
                self.state.free_scratch()
                self._ahead.clear()
            self.exchange, self._verified = exchange, False

    def position(self) -> dict[str, Any]:
        """Return what a rank that joins must have in common with the others; see :meth:`adopt`."""
        self.settle()
        return {
            "spec": str(self._aggregator),
            "step": self.step,
            "seed": self.seed,
            "scale": self.scale,
            "flushing": self._flushing,
            "groups": [list(group) for group in self.groups],
        }

    def adopt(self, position: Mapping[str, Any], met: bool) -> None:
        """Take the :meth:`position` of another rank. This rank keeps its own residual.

        Args:
            position: of the other rank.
            met: whether that rank has counted the last step that this one has taken.
        """
        self.settle()
        if met and self._flushing and not position["flushing"]:
            # This rank has missed the message that says so.
            self._end_flush()
        self._rescale(position["scale"])
        self.groups = _groups(position["groups"])
        self.use(position["spec"])
        self._flushing = position["flushing"]
        self._install(_FLUSH if self._flushing else self._aggregator)
        self.step, self.seed = position["step"], position["seed"]

    def regroup(self, groups: Sequence[Group]) -> None:
        """Change which parameters are compressed together, between two steps.

        All ranks must make the same call.

        Args:
            groups: names of the parameters of each group. Each parameter must be in one group.
        """
        self.settle()
        self.groups = tuple(groups)
        self._install(self._active)
        self._verified = False

    def add(self, parameters: Mapping[str, Tensor], groups: Sequence[Group]) -> None:
        """Add parameters, between two steps. All ranks must make the same call."""
        self.parameters |= parameters
        self._nbytes += sum(parameter.nbytes for parameter in parameters.values())
        self.groups = (*self.groups, *groups)
        self.buckets = (*self.buckets, *groups)

    def _install(self, method: Aggregator) -> None:
        with self._lock:
            buckets = self._buckets(method)
            # Before `self.buckets` changes: the server residual is stored by the old buckets'
            # shards.
            owned, self._active = self._owned(), method
            self.buckets, before = buckets, self.buckets
            self._ahead.clear()
            if self.observer is not None:
                self.observer.changed()
            declared = {slot.name: slot.sharded for slot in self._declared(method, buckets)}
            # A server residual fits only the shards of the same buckets. Otherwise, add it to this
            # rank's own residual.
            if buckets != before or not any(declared.values()):
                self.state.unshard(owned, self.exchange.world_size)
            # Unsent gradient is never dropped here, even if the new method has no slot for it:
            # `use` starts a flush.
            others = self.state.slots().keys() - self.state.debts()
            self.state.drop(others - declared.keys())

    def _buckets(self, method: Aggregator) -> tuple[Group, ...]:
        """Return the groups that a method compresses."""
        whole = method.whole_model and self._merged
        return merge(self.groups, self.parameters) if whole else self.groups

    def _end_flush(self) -> None:
        """From the next step on, run the method that the user chose, without a residual."""
        self.state.drop(self.state.debts())
        self._flushing = self._flushed = False
        self._install(self._aggregator)

    def _owned(self) -> list[Shard]:
        """Return this rank's shard of each bucket."""
        rank, ranks = self.exchange.rank, self.exchange.world_size
        return [self.shape_of(group).shards(ranks)[rank] for group in self.buckets]

    def _declared(self, method: Aggregator, buckets: Sequence[Group]) -> Iterator[Slot]:
        """Iterate over the slots of all buckets: the method's, then the client's."""
        for group in buckets:
            shape = self.shape_of(group)
            yield from method.slots(shape, self.exchange.world_size, self.exchange.rank)
            if self._client_slots is not None:
                yield from self._client_slots(shape)

    def _digest(self) -> int:
        """Return a checksum of the slots that are the same on all ranks."""
        names = {s.name for s in self._declared(self._active, self.buckets) if s.equal}
        parts = {f"{slot} {name}": p for slot in names for name, p in self.state.items(slot)}
        return checkpoint.digest_of(dict(sorted(parts.items())))

    def _traces(self, parts: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the residuals that show a NaN of a gradient, by parameter name."""
        for name, part in () if self._combined else parts:
            if self._now.residual_shows_nonfinite(self.parameters[name].dtype):
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
            return self._state()

    def _state(self) -> dict[str, Any]:
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
        slots: dict[str, tuple[Kind, bool, dict[str, Tensor]]] = {}
        for slot in self._declared(method, _groups(state["buckets"])):
            # `redistribute` drops caches, so they can be missing. They never change a result.
            if slot.kind is not Kind.CACHE or slot.name in state["slots"]:
                parts = checkpoint.load_slot(slot, state, self.parameters)
                slots.setdefault(slot.name, (slot.kind, slot.sharded, {}))[2].update(parts)
        for name, saved in state["slots"].items():
            unknown = sorted(set(saved["tensors"]) - set(slots[name][2] if name in slots else ()))
            if unknown or name not in slots:
                raise CheckpointError(
                    f"a damaged checkpoint: slots['{name}'] has tensors that {aggregator} "
                    f"does not use: {checkpoint.listed(unknown)}"
                )
        return partial(self._restore, aggregator, state, slots)

    def _restore(
        self,
        aggregator: Aggregator,
        state: Mapping[str, Any],
        slots: Mapping[str, tuple[Kind, bool, dict[str, Tensor]]],
    ) -> None:
        self.groups, self.buckets = _groups(state["groups"]), _groups(state["buckets"])
        self.step, self.seed, self.scale = state["step"], state["seed"], float(state["scale"])
        self.lrs = dict(state["lrs"])
        self._meter.load_state_dict(state["traffic"], self.step)
        self._aggregator, self._flushing = aggregator, state["flushing"]
        self._active = _FLUSH if self._flushing else aggregator
        # A fresh one: workspaces and a step in flight must not outlive the old state.
        self.state = State(self._lock)
        self._undecided, self._flushed, self._in_flight = None, False, False
        for name, (kind, sharded, parts) in slots.items():
            self.state.load(name, kind, sharded, parts)
        self._verified = False
        if self.observer is not None:
            self.observer.changed()

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


def _by_name(lr: LR, parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the learning rate of each parameter; empty if none was given.

    Raises:
        SpecError: if one is missing, negative or not finite.
    """
    if lr is None:
        return {}
    lrs = lr if isinstance(lr, Mapping) else dict.fromkeys(parameters, lr)
    for name in parameters:
        check_at_least_0(f"lr of '{name}'", lrs.get(name))
    return {name: float(lrs[name]) for name in parameters}


def _groups(names: Sequence[Sequence[str]]) -> tuple[Group, ...]:
    return tuple(tuple(group) for group in names)
