"""Settlement: does the last step count? What decides it, and what follows from it."""

import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcomp import host
from torchcomp.exchange import Exchange
from torchcomp.nonfinite import FiniteWatch
from torchcomp.state import State
from torchcomp.stats import Meter, Stats
from torchcomp.traffic import Traffic
from torchcomp.units import Units

Reason = Callable[[], bool]
"""Returns whether the step counts, or raises what is wrong with it. It can wait for other ranks."""

LATE = (
    "This was found one step later: the residual is that before the step. The averaged gradients "
    "were set to zero, so the optimizer has applied at most its momentum and weight decay."
)
"""What became of a step that the host checks when the next one begins."""

_SAME_LR = "The learning rate must be the same function of the step on all ranks."
_DIVERGED = (
    "This was found one step later, when the optimizer had already applied other updates on each "
    "rank: load a checkpoint."
)
_SAME_FATE = (
    "On some ranks, an optimizer has stepped with the gradients of the last step, and on others "
    "these gradients were cleared: the replicas are no longer equal."
)


class Status(Enum):
    """What is known of a step."""

    IN_FLIGHT = "in flight"  # it has not ended
    OPEN = "open"  # it has ended, and counts unless a reason says otherwise
    COUNTED = "counted"
    TAKEN_BACK = "taken back"


class Settlement:
    """Whether the last step counts.

    A step is in flight until it ends. It is then open as long as a reason can still take it back,
    such as a check whose result is on its way, or the vote of a manager. :meth:`ask` decides.

    Args:
        lock: held while the state changes.

    Attributes:
        status: what is known of the last step.
    """

    def __init__(self, lock: "threading.RLock") -> None:
        self._lock = lock
        # Held while reasons are asked, which can wait for ranks. A thread whose backward pass was
        # abandoned can still be in there.
        self._asking = threading.RLock()
        self._reasons: tuple[Reason, ...] = ()
        self.status = Status.COUNTED

    def begin(self) -> None:
        """Note that a step begins."""
        self.status, self._reasons = Status.IN_FLIGHT, ()

    def end(self, *reasons: Reason) -> None:
        """End the step in flight. It counts, unless one of the reasons says otherwise."""
        self._reasons, self.status = reasons, Status.OPEN if reasons else Status.COUNTED

    def discard(self) -> None:
        """Note that the step in flight ends without a result, or that the last one is undone."""
        self.status, self._reasons = Status.TAKEN_BACK, ()

    def ask(self, take_back: Callable[[], None]) -> None:
        """Ask all reasons, if the step is open. Take it back if it does not count.

        Args:
            take_back: undoes the last step. Called with the lock held.

        Raises:
            Exception: what a reason raises. The step is then taken back as well.
        """
        with self._asking:
            reasons, counts = self._reasons, False
            if self.status is not Status.OPEN:
                return
            try:
                counts = all(reason() for reason in reasons)
            finally:
                with self._lock:
                    # Not if another state was loaded, or the step abandoned, in the meantime.
                    if self._reasons is reasons:
                        self._reasons = ()
                        self.status = Status.COUNTED
                        if not counts:
                            take_back()


class Steps:
    """A sequence of steps, each of which counts or not, and the state after the last one.

    A step that has ended can still be undone, for three reasons: a check or a vote decides later
    that it does not count (:meth:`decide`), no optimizer has used its gradients
    (:meth:`take_back`), or its backward pass raised (:meth:`abandon`).

    Attributes:
        state: the slots of this rank.
        step: number of steps that finished without an error.
        void: whether the last step does not count, a scalar bool on the device, if it ended without
            a decision of the host. The caller then replaces the means where this is true.
        abandoned: whether the step in flight was abandoned; see :meth:`abandon`. Set it to False
            before the next one.
        steps_kept: number of steps before the last one that count or not together with it; see
            :meth:`keep_before`.
        units: the loss scale and the learning rates that the state follows.
        meter: counts the bytes.
    """

    def __init__(self) -> None:
        # A step can run in another thread than that of the user, who can abandon it at any time.
        self.abandoned = False
        self._lock = threading.RLock()  # held while the state changes
        self.state = State(self._lock)
        self._settlement = Settlement(self._lock)
        self.step = self.steps_kept = 0
        self.void: Tensor | None = None
        self.units = Units()
        self.meter = Meter()
        self._taken_back = False  # whether the ranks have not compared the last `take_back` yet
        # Whether the last step sends all that was left, as the last one of a flush.
        self._flushed = False
        # Whether the last step keeps its number if it turns out not to count: a scaler skips it.
        self._keeps_number = False
        # The ranks are compared when a step begins, not where they can start to differ: loading a
        # checkpoint is a local call, so only the next collective shows that another rank did not.
        self._verified = False
        self._settling: int | None = None  # the thread that tells what it has settled

    @property
    def scale(self) -> float:
        """Loss scale of the gradients of the last step, which the state follows."""
        return self.units.scale

    @property
    def lrs(self) -> Mapping[str, float]:
        """Learning rates, by parameter name, whose update the residual's unit is.

        Empty if the residual has the unit of the gradients.
        """
        return self.units.lrs

    @property
    def stats(self) -> Stats:
        """Counters of this rank after its last step: bytes of that step, and totals.

        Any thread can read them at any time.
        """
        return self.meter.stats

    @property
    def undecided(self) -> bool:
        """Whether it is still open if the last step counts."""
        return self._settlement.status is Status.OPEN

    @property
    def counted(self) -> bool:
        """Whether the last step counts."""
        return self._settlement.status is Status.COUNTED

    @property
    def settling(self) -> bool:
        """Whether this thread is in :meth:`tell`, where the method may change."""
        return self._settling == threading.get_ident()

    @contextmanager
    def tell(self) -> Iterator[None]:
        """Tell the user what an observer has found, while the last step is settled.

        All ranks enter this alike. What they are told can make them change the method, although
        the next backward pass runs already. So they are compared when its step begins.
        """
        before, self._settling = self._settling, threading.get_ident()
        try:
            yield
        finally:
            self._settling, self._verified = before, False

    def decide(self) -> None:
        """Decide whether the last step counts: undo it if not, and raise what is wrong with it.

        The step counter and the state then are those before the step.
        """
        if self._settlement.status is Status.OPEN:
            try:
                self._settlement.ask(self._undo)
            finally:
                self._keeps_number = False

    def take_back(self) -> None:
        """Undo the last step, because its gradients were cleared before an optimizer stepped.

        Steps before it that :meth:`keep_before` has joined to it are undone as well. All ranks must
        make the same call; if they do not, the end of the next step raises on all of them.
        """
        self.decide()
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
        self.decide()
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
                self._keeps_number = False
                self._undo()
            elif self._settlement.status is not Status.IN_FLIGHT:
                return
            # Ranks can be abandoned before and after they follow a new scale. Their states match
            # only in the units from before the step.
            self.units.go_back(self.state)
            self._settlement.discard()

    def residual_norms(self, slot: str = "error") -> dict[str, float]:
        """Return the Euclidean norm of this rank's residual by parameter name.

        The host waits for all that the device was given. Any thread can call this at any time: the
        residual is that after the last step that has finished.

        Args:
            slot: "error" for the residual of this rank's gradients, or "server_error" for the
                server residual of the shards that this rank owns.
        """
        # Held until the norms are read: the next step writes to the tensors of this one.
        with self._lock:
            parts = dict(self.state.items(slot))
            if not parts:
                return {}
            # The stream of the exchange can still be writing them, and this thread has another one.
            host.wait_for_all_streams(parts.values())
            norms = torch._foreach_norm(list(parts.values()))
            # Parameters can be on several devices. The copies to the first do not wait.
            gathered = torch.stack([norm.to(norms[0].device) for norm in norms])
            return dict(zip(parts, gathered.tolist(), strict=True))

    def replace(self, step: int, traffic: Mapping[str, int]) -> None:
        """Continue from an empty state. A step in flight must not outlive the old one."""
        self.state, self.step, self.steps_kept = State(self._lock), step, 0
        self._settlement.discard()
        self._flushed = self._taken_back = False
        self.meter.load_state_dict(traffic, step)

    # For the step that runs. The lock is held, except in the first one.

    def _require_wanted(self) -> None:
        if self.abandoned:
            raise RuntimeError("this step was abandoned, because its backward pass raised")

    def _end(self, counts: bool, reasons: tuple[Reason, ...]) -> None:
        """End the step in flight. The reasons decide later whether it counts."""
        if counts:
            self.state.commit()
            if self.void is not None:
                self.state.revert_where(self.void)
        else:
            self.state.rollback()
        self.step += 1
        if counts or reasons:
            self._settlement.end(*reasons)
        else:
            self._settlement.discard()

    def _discard(self) -> None:
        """End the step in flight, which raises."""
        self.state.rollback()
        self._settlement.discard()

    def _undo(self) -> None:
        """Undo the last step."""
        self._flushed = False
        if self.void is not None:
            # The host undoes the step from here on, and not the device.
            self.state.revert_where(self.void)
            self.void = None
        self.state.revert()
        self._settlement.discard()
        if not self._keeps_number:
            self.step -= 1
            self.meter.record(Traffic(), self.step)

    def _record(self, exchange: Exchange, dense_bytes: int) -> None:
        """Count the bytes of a step. A step that is discarded has sent its bytes all the same."""
        self.meter.record(exchange.take_traffic(dense_bytes), self.step)


class Question(NamedTuple):
    """What the ranks decide about a step.

    Attributes:
        watch: what has looked for a NaN on this rank.
        lrs: learning rates of the step, which must be equal on all ranks; empty if not given.
        taken_back: whether the last step was taken back, which must be the same on all ranks. None
            if no rank can take one back.
        where: the name of the step, for error messages.
        what: what has the NaN, for the error message: "a gradient at step 3".
        unchanged: a sentence on what a discarded step leaves unchanged.
        advice: what to do about a NaN, for the error message.
        may_skip: answer False instead of raising if there is a NaN or an infinity.
        residuals: returns the residuals that show the NaN of a gradient, by parameter name.
    """

    watch: FiniteWatch
    lrs: Mapping[str, float]
    taken_back: bool | None
    where: str
    what: str
    unchanged: str
    advice: str
    may_skip: bool
    residuals: Callable[[], Iterable[tuple[str, Tensor]]]


def ask(exchange: Exchange, question: Question) -> tuple[Reason, Tensor | None]:
    """Send this rank's part of the message, without waiting for the others.

    Returns:
        A function that waits for the others and says whether the step counts. It raises, on all
        ranks, what is wrong with the step. And the flags on the device: the step does not count if
        one of the first two is not 0. None if no message was sent.
    """
    watch, lrs, where = question.watch, question.lrs, question.where
    same: list[tuple[Callable[[], bool], dict[str, Any], str]] = []
    if lrs:
        digest = zlib.crc32(repr(lrs).encode()).to_bytes(4, "big")
        found_late = question.unchanged is LATE
        problem = f"{_SAME_LR} {_DIVERGED if found_late else question.unchanged}"
        same.append((exchange.same_at_end(digest), {"lr": lrs}, problem))
    fates: list[int] = []
    # Without a message at its end, a step is not worth one for this alone.
    if question.taken_back is not None and exchange.must_conclude:
        fates = exchange.max_at_end([question.taken_back, not question.taken_back])
    decide = exchange.conclude_later(watch.finite(), where, question.unchanged)

    def counts() -> bool:
        finite = decide()
        for matches, values, problem in same:
            if not matches():
                exchange.verify(where, values, problem)
        if all(fates) and fates:
            fate = {"gradients of the last step": "cleared" if question.taken_back else "applied"}
            exchange.verify(where, fate, _SAME_FATE)
        if not finite and not question.may_skip:
            suffix = f" {question.advice}" if question.advice else ""
            raise watch.error(question.what, question.unchanged + suffix, question.residuals())
        return finite

    return counts, decide.flags
