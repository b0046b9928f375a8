"""Settlement: does the last step count? What decides it, and what follows from it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

import torch
from torch import Tensor

from torchcomp.engine.state import State, Units
from torchcomp.engine.stats import Meter, Stats
from torchcomp.exchange.traffic import Traffic

Reason = Callable[[], bool]
"""Returns whether the step counts, or raises what is wrong with it. It can wait for other ranks."""


class Status(Enum):
    """What is known of a step."""

    IN_FLIGHT = "in flight"  # it has not ended
    OPEN = "open"  # it has ended, and counts unless a reason says otherwise
    COUNTED = "counted"
    TAKEN_BACK = "taken back"


class Steps:
    """A sequence of steps, each of which counts or not, and the state after the last one."""

    def __init__(self) -> None:
        # The step in flight was abandoned. Its owner sets this to False before the next one.
        self.abandoned = False
        # Held while the state changes. A step can run in another thread than that of the user, who
        # can abandon it at any time.
        self._lock = threading.RLock()
        # Held while reasons are asked, which can wait for ranks, maybe in a thread whose step was
        # abandoned.
        self._asking = threading.RLock()
        self._reasons: tuple[Reason, ...] = ()
        self.status = Status.COUNTED  # of the last step
        self.state = State(self._lock)
        self.step = 0  # number of steps that finished without an error
        self.steps_kept = 0  # before the last one, that count or not together with it
        # Whether the last step does not count, a scalar bool on the device, if it ended without a
        # decision of the host. The caller then replaces the means where this is true.
        self.void: Tensor | None = None
        self.units, self.meter = Units(), Meter()
        self._taken_back = False  # whether the ranks have not compared the last `take_back` yet
        self._flushed = False  # whether the last step was the last one of a flush
        self._keeps_number = False  # the last step, if it does not count: a scaler skips it
        # The ranks are compared when a step begins, not where they can start to differ: loading a
        # checkpoint is a local call, so only the next collective shows that another rank did not.
        self._verified = False
        self._settling: int | None = None  # the thread that tells what it has settled

    @property
    def stats(self) -> Stats:
        """Counters after the last step; see :class:`torchcomp.Stats`. Any thread can read them."""
        return self.meter.stats

    @property
    def undecided(self) -> bool:
        return self.status is Status.OPEN

    @property
    def settling(self) -> bool:
        """Whether this thread is in :meth:`tell`, where the method may change."""
        return self._settling == threading.get_ident()

    @contextmanager
    def tell(self) -> Iterator[None]:
        """Tell the user what an observer has found. All ranks enter, and may change the method.

        The next backward pass can run already, so they are compared when its step begins.
        """
        before, self._settling = self._settling, threading.get_ident()
        try:
            yield
        finally:
            self._settling, self._verified = before, False

    def decide(self) -> None:
        """Ask all reasons whether the last step counts. If not, or if one raises, undo it."""
        if self.status is not Status.OPEN:  # without the lock, which can be held for long
            return
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
                        self.status, self._reasons = Status.COUNTED, ()
                        if not counts:
                            self._undo()
                    self._keeps_number = False

    def take_back(self) -> None:
        """Undo the last step, and those joined to it: their gradients were cleared unused.

        All ranks must make the same call; if not, the end of the next step raises on all of them.
        """
        self.decide()
        with self._lock:
            self._taken_back = True
            if self.status is Status.COUNTED:
                self._undo()
            self.state.restore_before()
            self.step, self.steps_kept = self.step - self.steps_kept, 0

    def keep_before(self) -> None:
        """Join the last step, whose gradients no optimizer has used, to the one that adds to it."""
        self.decide()
        with self._lock:
            if self.status is Status.COUNTED:
                self.state.keep_before()
                self.steps_kept += 1

    def forget_before(self) -> None:
        """Note that an optimizer has used the gradients of the last step."""
        if self.steps_kept:
            with self._lock:
                self.state.forget_before()
                self.steps_kept = 0

    def abandon(self, step: int) -> None:
        """Discard the step that began when :attr:`step` was `step`, also if it has just ended.

        Another thread may still be running it: from here on, it changes nothing.
        """
        with self._lock:
            self.abandoned = True
            if self.step > step:
                self._keeps_number = False
                self._undo()
            elif self.status is not Status.IN_FLIGHT:
                return
            # Ranks can be abandoned before and after they follow a new scale. Their states match
            # only in the units from before the step.
            self.units.go_back(self.state)
            self._discard()

    def residual_norms(self, slot: str = "error") -> dict[str, float]:
        """Return the Euclidean norm of this rank's residual by parameter name.

        The host waits for all that the device was given. Any thread can call this at any time: the
        residual is that after the last step that has finished. The slot "server_error" has the
        server residual of the shards that this rank owns.
        """
        # Held until the norms are read: the next step writes to the tensors of this one.
        with self._lock:
            parts = dict(self.state.items(slot))
            if not parts:
                return {}
            # The stream of the exchange can still be writing them.
            for device in {part.device for part in parts.values() if part.is_cuda}:
                torch.cuda.synchronize(device)
            norms = torch._foreach_norm(list(parts.values()))
            # Parameters can be on several devices. The copies to the first do not wait.
            gathered = torch.stack([norm.to(norms[0].device) for norm in norms])
            return dict(zip(parts, gathered.tolist(), strict=True))

    # The lock is held in what follows, except in the first one.

    def _require_wanted(self) -> None:
        if self.abandoned:
            raise RuntimeError("this step was abandoned, because its backward pass raised")

    def _end(self, counts: bool, reasons: tuple[Reason, ...]) -> None:
        self._discard()
        if counts:
            self.state.commit()
            if self.void is not None:
                self.state.revert_where(self.void)
        else:
            self.state.rollback()
        self.step += 1
        if reasons:
            self.status, self._reasons = Status.OPEN, reasons
        elif counts:
            self.status = Status.COUNTED

    def _discard(self) -> None:
        self.status, self._reasons = Status.TAKEN_BACK, ()

    def _undo(self) -> None:
        self._flushed = False
        if self.void is not None:
            # The host undoes the step from here on, and not the device.
            self.state.revert_where(self.void)
            self.void = None
        self.state.revert()
        self._discard()
        if not self._keeps_number:
            self.step -= 1
            self.meter.record(Traffic(), self.step)
