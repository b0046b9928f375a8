"""Managed: average DDP's buckets over the ranks that torchft's Manager has brought together.

The manager decides who takes part in a step and whether it counts, and heals ranks that join. This
module follows it, and does not import torchft:

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
from torch.nn.parallel import DistributedDataParallel

from torchcomp.aggregators import Aggregator
from torchcomp.checkpoints import checkpoint
from torchcomp.checkpoints.redistribution import Place, check_place
from torchcomp.ddp.buckets import Buckets
from torchcomp.ddp.executors import Job, StreamExecutor, ThreadExecutor
from torchcomp.engine.averager import Averager
from torchcomp.engine.bucket import Bucket, Group
from torchcomp.exchange import Exchange, InProcessExchange, ManagedExchange
from torchcomp.routes import wire
from torchcomp.specs.errors import RankFailureError, SpecError, UnsupportedModelError, WireError

KEY = "torchcomp"
"""The name of a model's state among those that the manager sends to a rank that joins."""


_NEEDED = (
    "wait_quorum",
    "errored",
    "report_error",
    "current_step",
    "participating_rank",
    "num_participants",
    "register_state_dict_fn",
)


def check_manager(manager: Any) -> None:
    """Require a torchft Manager with settings under which every step has equal ranks."""
    missing = [name for name in _NEEDED if not callable(getattr(manager, name, None))]
    if missing:
        raise SpecError(
            f"manager must be a torchft.Manager, not {type(manager).__name__}: it has no "
            f"{', '.join(missing)}",
            "manager",
        )
    mode = manager._replica_world_size_mode.name
    problems = {
        "use_async_quorum=True lets a rank that joins take part in a step before it has healed, "
        "with other weights. Pass use_async_quorum=False": manager._use_async_quorum,
        f"world_size_mode={mode} counts zeros for spare ranks, and their residuals would never be "
        "sent. Pass WorldSizeMode.DYNAMIC": mode != "DYNAMIC",
        f"its replica groups have {manager._group_world_size} ranks, and each would have a "
        "residual of its own that nobody heals. Use one rank per replica "
        "group": manager._group_world_size != 1,
    }
    for problem, present in problems.items():
        if present:
            raise SpecError(f"this manager cannot be used: {problem}", "manager")


def check_one_rank(model: DistributedDataParallel) -> None:
    """Require that DDP itself averages over no other rank, because a manager's ranks change."""
    ranks = model.process_group.size()
    if ranks != 1:
        raise UnsupportedModelError(
            "with a manager, the ranks of its quorum exchange, but the model's own process group "
            f"has {ranks} ranks. With torchft, build torch.nn.parallel.DistributedDataParallel("
            "module, process_group=ProcessGroupDummy(0, 1))"
        )


class Ballot:
    """What a ``torchft.Manager`` has decided on the last step."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.quorum: int | None = None
        self._step = 0
        # The manager's counters when the last step ended; None if it was decided.
        self._before: tuple[int, int] | None = None
        self._decided: bool | None = None

    def _counters(self) -> tuple[int, int]:
        # One of them changes with every vote.
        return self._manager.current_step(), self._manager._commit_failures

    def open(self, step: int, quorum: int | None) -> None:
        """Begin to wait for the decision on a step."""
        self._step, self.quorum = step, quorum
        self._before, self._decided = self._counters(), None

    def close(self) -> None:
        self._before = self._decided = None

    @property
    def has_voted(self) -> bool:
        return self._before != self._counters()

    def require_vote(self, what: str) -> None:
        """Require that the manager has voted on the last step, before `what`."""
        if not self.has_voted:
            raise RuntimeError(
                f"{what} came before the vote on the last step. Under a manager, each step has one "
                "start_quorum(), one backward pass that exchanges gradients, and one "
                "should_commit(). Accumulate gradients under model.no_sync()"
            )

    def heal(self, step: int, quorum: int | None) -> bool:
        """Note the last step of the rank that heals this one. Return whether both met in it."""
        met = self._before is not None and (step, quorum) == (self._step, self.quorum)
        if self._before is not None:
            self._decided = met or self._manager._commit_failures <= self._before[1]
        return met

    @property
    def voted_yes(self) -> bool:
        """Whether the manager has counted the last step, as long as no other rank has healed it."""
        return self._before is not None and self._manager.current_step() > self._before[0]

    def counts(self) -> bool:
        counted = self.voted_yes if self._decided is None else self._decided
        self._before = None
        return counted


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
        self._ballot = Ballot(manager)
        ranks = self._ranks(0, 1, None)
        averager = make(ranks, parameters, groups, vote=self._ballot.counts)
        executor = StreamExecutor(device) if device.type == "cuda" else ThreadExecutor()
        alone = InProcessExchange.alone(device)
        super().__init__(averager, alone, Place.in_order(0), parameters, [executor])
        self._quorum: int | None = None
        self._failed, self._leaving = False, False
        self._last_step: int | None = None
        self._facts = {
            "parameters": [(name, tuple(p.shape), p.dtype) for name, p in parameters.items()],
            "wire version": wire.VERSION,
        }
        try:
            manager.register_state_dict_fn(KEY, self._heal, self._peer_state)
        except AssertionError:
            raise SpecError(
                "this manager has a model of torchcomp.register already, and heals one model only",
                "manager",
            ) from None

    def _ranks(self, rank: int, world_size: int, group: Any) -> Exchange:
        return ManagedExchange(group, rank, world_size, self._device)

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
        self._ballot.require_vote("a backward pass")
        if self._manager._quorum_id != self._quorum:
            self._follow()
        super().begin(scale, lrs)

    def _follow(self) -> None:
        manager, averager, before = self._manager, self.averager, self._quorum
        rank, world_size = manager.participating_rank(), manager.num_participants()
        exchange = self._ranks(rank, world_size, manager._pg)
        exchange.verify("torchcomp.register", self._facts)
        # After a step that failed, the same ranks often meet again: all of the quorum before, and
        # no others. The state then stays.
        met = exchange.same(-1 if before is None else before) and before is not None
        averager.settle()
        state, old, running = averager.state, averager.exchange, averager.running
        with averager._lock:
            averager._require_wanted()
            state.rollback()
            if not (met and old.world_size == world_size):
                # If a rank that joins has no residual, and all others go on, the mean over the
                # ranks of what is unsent does not change.
                state.unshard(running.owned(old), old.world_size)
                ratio = exchange.world_size / old.world_size
                state.scale_debts(dict.fromkeys(averager.parameters, ratio))
                # Estimates start again on all ranks, because a rank that joins has none.
                state.drop(state.slots().keys() - state.debts())
            exchange.checksum = averager._checksum
            averager.exchange, averager._verified = exchange, False
            running.forget()
            averager._tell_changed()
        self._quorum = manager._quorum_id

    def _finish(self, end: Callable[..., bool]) -> None:
        try:
            counts = end(leaving=self._leaving)
        finally:
            if self.averager.undecided:
                self._ballot.open(self.averager.step, self._quorum)
        if counts and self._leaving:
            self._last_step = self.averager.step

    # --- Between two steps ---

    def start(self) -> None:
        super().start()
        # Roll the last step back if the manager has decided by now that it does not count.
        if self._ballot.has_voted:
            self.averager.settle()

    def abandon(self, step: int) -> None:
        super().abandon(step)
        if not self.averager.undecided:
            self._ballot.close()

    def leave(self) -> None:
        self._leaving = True

    @property
    def left(self) -> bool:
        self._ballot.require_vote("handle.left")
        # After a no, do not settle the step yet: the others can have counted it. The rank that
        # heals this one says so.
        if self.averager.undecided and not self._ballot.voted_yes:
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
            "quorum": self._ballot.quorum,
        }

    def _heal(self, peer: Mapping[str, Any]) -> None:
        met = self._ballot.heal(peer["step"], peer["quorum"])
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
        averager.running.groups = tuple(map(tuple, peer["groups"]))
        averager.use(peer["spec"])
        averager._flush(peer["flushing"])
        averager.step, averager.seed = peer["step"], peer["seed"]

    def state_dict(self) -> dict[str, Any]:
        self._ballot.require_vote("state_dict")
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
        self._ballot.close()
        self._quorum = None
