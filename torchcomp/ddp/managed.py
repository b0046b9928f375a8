"""Managed: average DDP's buckets over the ranks that torchft's Manager has brought together.

The manager decides who takes part in a step and whether it counts, and heals ranks that join:

1. Before the first bucket: if there is another quorum, go on with its ranks.
2. If a collective fails, tell the manager, and leave out the rest of the step.
3. After the last bucket, the step is open until the next one begins. If the manager has not counted
   it, the state then goes back to that before the step.
4. A rank that heals takes the position of a healthy one: step, method, groups. It keeps its own
   residual, which is zero if it has just started.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchcomp.aggregators import Aggregator
from torchcomp.checkpoints import checkpoint
from torchcomp.checkpoints.redistribution import Place, check_place
from torchcomp.ddp.buckets import Buckets
from torchcomp.ddp.executors import Job, StreamExecutor, ThreadExecutor
from torchcomp.engine.averager import Averager
from torchcomp.engine.bucket import Bucket, Group
from torchcomp.exchange import Exchange, InProcessExchange, ManagedExchange
from torchcomp.routes import wire
from torchcomp.specs.errors import RankFailureError, SpecError, WireError

KEY = "torchcomp"
"""The name of a model's state among those that the manager sends to a rank that joins."""


def check_manager(manager: Any) -> None:
    """Require a torchft Manager with settings under which every step has equal ranks."""
    if not callable(getattr(manager, "register_state_dict_fn", None)):
        name = type(manager).__name__
        raise SpecError(f"manager must be a torchft.Manager, not {name}", "manager")
    # Ranks that have not healed, or count zeros, would have residuals that nobody sends or heals.
    settings = manager._use_async_quorum, manager._replica_world_size_mode.name
    if (*settings, manager._group_world_size) != (False, "DYNAMIC", 1):
        wanted = "use_async_quorum=False, WorldSizeMode.DYNAMIC and one rank per replica group"
        raise SpecError(f"the manager must have {wanted}", "manager")


class Managed(Buckets):
    """Averages every bucket over the ranks of a manager's quorum."""

    gathers = False
    _one_order = True  # DDP has rebuilt its buckets on all ranks but those that have just joined

    def __init__(
        self,
        make: Callable[..., Averager],
        parameters: Mapping[str, Tensor],
        groups: Sequence[Group],
        manager: Any,
        device: torch.device,
    ) -> None:
        self._manager, self._device = manager, device
        # Of the last step, when it ended: step and quorum, and the manager's counters, which are
        # None if it was decided; then what the rank that heals this one says of it.
        self._open: tuple[int, int | None] = 0, None
        self._counters_then: tuple[int, int] | None = None
        self._healed: bool | None = None
        averager = make(self._ranks(0, 1, None), parameters, groups, vote=self._counts)
        executor = StreamExecutor(device) if device.type == "cuda" else ThreadExecutor()
        alone = InProcessExchange.alone(device)
        super().__init__(averager, alone, Place.in_order(0), parameters, [executor])
        self._quorum: int | None = None
        self._failed, self._leaving = False, False
        self._last_step: int | None = None
        try:
            manager.register_state_dict_fn(KEY, self._heal, self._peer_state)
        except AssertionError:
            problem = "a manager heals one model, and this one has one of torchcomp.register"
            raise SpecError(problem, "manager") from None

    def _ranks(self, rank: int, world_size: int, group: Any) -> Exchange:
        return ManagedExchange(group, rank, world_size, self._device)

    # --- The manager's vote on the last step ---

    def _counters(self) -> tuple[int, int]:
        # One of them changes with every vote.
        return self._manager.current_step(), self._manager._commit_failures

    def _require_vote(self, what: str) -> None:
        if self._counters_then == self._counters():
            raise RuntimeError(
                f"{what} came before the vote on the last step. Under a manager, each step has "
                "start_quorum(), one backward pass without model.no_sync(), and should_commit()"
            )

    def _voted_yes(self) -> bool:
        then = self._counters_then
        return then is not None and self._counters()[0] > then[0]

    def _counts(self) -> bool:
        counts = self._voted_yes() if self._healed is None else self._healed
        self._counters_then = None
        return counts

    # --- One step ---

    def begin(self, scale: float, lrs: dict[str, float] | None) -> None:
        self._manager.wait_quorum()
        # As in torchft's own collectives, the rest of a step is left out after an error.
        self._failed = self._manager.errored() is not None
        self._unless_failed(partial(self._begin, scale, lrs))

    def average(self, bucket: Bucket) -> None:
        self._unless_failed(partial(super().average, bucket))

    def finish(self, end: Callable[..., bool]) -> None:
        self._unless_failed(partial(self._finish, end))

    def _unless_failed(self, job: Job) -> None:
        if not self._failed:
            try:
                job()
            except (RankFailureError, WireError) as error:
                self._failed = True
                self._manager.report_error(error)
        if self._failed:
            self.averager.unused = ()

    def _begin(self, scale: float, lrs: dict[str, float] | None) -> None:
        self._require_vote("a backward pass")
        if self._manager._quorum_id != self._quorum:
            self._follow()
        super().begin(scale, lrs)

    def _follow(self) -> None:
        manager, averager, before = self._manager, self.averager, self._quorum
        rank, world_size = manager.participating_rank(), manager.num_participants()
        exchange = self._ranks(rank, world_size, manager._pg)
        shapes = [(name, tuple(p.shape), p.dtype) for name, p in self.parameters.items()]
        exchange.verify("torchcomp.register", {"parameters": shapes, "wire version": wire.VERSION})
        # After a step that failed, the same ranks often meet again. The state then stays.
        met = exchange.same(-1 if before is None else before) and before is not None
        averager.settle()
        state, old = averager.state, averager.exchange
        with averager._lock:
            averager._require_wanted()
            state.rollback()
            if not (met and old.world_size == world_size):
                # If a rank that joins has no residual, and all others go on, the mean over the
                # ranks of what is unsent does not change.
                state.unshard(averager.owned(), old.world_size)
                ratio = exchange.world_size / old.world_size
                state.scale_debts(dict.fromkeys(averager.parameters, ratio))
                # Estimates start again on all ranks, because a rank that joins has none.
                state.keep(())
            exchange.checksum = averager._checksum
            averager.exchange, averager._verified = exchange, False
            averager.forget()
            averager._tell_changed()
        self._quorum = manager._quorum_id

    def _finish(self, end: Callable[..., bool]) -> None:
        try:
            counts = end(leaving=self._leaving)
        finally:
            if self.averager.undecided:
                self._open, self._healed = (self.averager.step, self._quorum), None
                self._counters_then = self._counters()
        if counts and self._leaving:
            self._last_step = self.averager.step

    # --- Between two steps ---

    def start(self) -> None:
        super().start()
        # Roll the last step back if the manager has decided by now that it does not count.
        if self._counters_then != self._counters():
            self.averager.settle()

    def abandon(self, step: int) -> None:
        super().abandon(step)
        if not self.averager.undecided:
            self._counters_then = self._healed = None

    def leave(self) -> None:
        self._leaving = True

    @property
    def left(self) -> bool:
        self._require_vote("handle.left")
        # After a no, do not settle the step yet: the rank that heals this one can have counted it.
        if self.averager.undecided and not self._voted_yes():
            return False
        # A step that is rolled back sets the counter back, and the next one hands over again.
        return self._last_step is not None and self.averager.step >= self._last_step

    def _peer_state(self) -> dict[str, Any]:
        averager = self.averager
        averager.settle()
        return {
            "spec": str(averager.aggregator),
            "step": averager.step,
            "seed": averager.seed,
            "scale": averager.units.scale,
            "flushing": averager.flushing,
            "groups": [list(group) for group in averager.groups],
            "quorum": self._open[1],
        }

    def _heal(self, peer: Mapping[str, Any]) -> None:
        # Whether both have met in the last step of the rank that heals this one.
        then = self._counters_then
        met = then is not None and (peer["step"], peer["quorum"]) == self._open
        if then is not None:
            self._healed = met or self._manager._commit_failures <= then[1]
        if not met:
            # It has missed a step of the others. Estimates start again on all ranks, and what it
            # has handed over may not count.
            self._quorum = self._last_step = None
        averager = self.averager
        averager.settle()
        if met and averager.flushing and not peer["flushing"]:
            # This rank has missed the message that says so.
            averager._end_flush()
        averager.units.rescale(averager.state, peer["scale"])
        averager.groups = tuple(map(tuple, peer["groups"]))
        averager.use(peer["spec"])
        averager._flush(peer["flushing"])
        averager.step, averager.seed = peer["step"], peer["seed"]

    def state_dict(self) -> dict[str, Any]:
        self._require_vote("state_dict")
        return super().state_dict()

    def load_state_dict(self, state: Any, method: Aggregator | None = None) -> None:
        # Of any rank and number of ranks: those of the next quorum are not known yet.
        checkpoint.HEADER(state, "the state dict")
        averager, before, rank = self.averager, self.averager.exchange, state["rank"]
        checkpoint.require(rank < state["world_size"], "rank", "below world_size", rank)
        averager.exchange = self._ranks(rank, state["world_size"], None)
        try:
            check_place(state, Place.in_order(rank))
            averager.load_state_dict(state, method)
        except Exception:
            averager.exchange = before
            raise
        self._counters_then = self._healed = self._quorum = None
