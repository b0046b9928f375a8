"""Managed: average DDP's buckets over the ranks that torchft's Manager has brought together.

The manager decides who takes part in a step and whether it counts, and heals ranks that join. This
module follows it:

1. Before the first bucket: if there is another quorum, go on with its ranks.
2. If a collective fails, the manager is told, and the rest of the step is left out.
   ``should_commit()`` is then False.
3. After the last bucket, the step is undecided until the next one begins. If the manager has not
   counted it, the state then goes back to that before the step.
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
from torchcomp.ddp.manager import Ballot
from torchcomp.engine.averager import Averager
from torchcomp.engine.bucket import Bucket, Group
from torchcomp.exchange import Exchange, InProcessExchange, ManagedExchange
from torchcomp.routes import wire
from torchcomp.specs.errors import RankFailureError, SpecError, WireError

KEY = "torchcomp"
"""The name of a model's state among those that the manager sends to a rank that joins."""


class Managed(Buckets):
    """Averages every bucket over the ranks of a manager's quorum.

    Args:
        make: makes the averager of an exchange, parameters by name, and groups.
        parameters: of the model, by name.
        groups: names of the parameters that are compressed together.
        manager: the ``torchft.Manager``.
        device: of the gradients.
    """

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
        """Run a part of the step. Tell the manager of an error, and leave out the rest."""
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
        """Go on with the ranks of a new quorum."""
        manager, averager, before = self._manager, self.averager, self._quorum
        rank, world_size = manager.participating_rank(), manager.num_participants()
        exchange = self._ranks(rank, world_size, manager._pg)
        exchange.verify("torchcomp.register", self._facts)
        # After a step that failed, the same ranks often meet again: all of the quorum before, and
        # no others.
        met = exchange.same(-1 if before is None else before) and before is not None
        same_ranks = met and averager.exchange.world_size == world_size
        change_ranks(averager, exchange, same_ranks=same_ranks)
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
        """Return what a rank that heals from this one takes over."""
        return {**peer_state(self.averager), "quorum": self._ballot.quorum}

    def _heal(self, peer: Mapping[str, Any]) -> None:
        """Take over the state of a healthy rank, besides its residual."""
        met = self._ballot.heal(peer["step"], peer["quorum"])
        if not met:
            # It has missed a step of the others. Estimates start again on all ranks, and what it
            # has handed over may not count.
            self._quorum = self._last_step = None
        load_peer_state(self.averager, peer, met)

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


# What elastic ranks change in an averager, between two steps.


def change_ranks(averager: Averager, exchange: Exchange, *, same_ranks: bool = False) -> None:
    """Go on over another exchange, without sending any values.

    With `same_ranks`, the state stays. Otherwise, this rank keeps its residual, and its server
    residual is added to it. Both are multiplied by the ratio of the numbers of ranks: if a rank
    that joins has none, and all others go on, the mean over the ranks of what is unsent does not
    change. Estimates start again on all ranks, because a rank that joins has none.
    """
    averager.settle()
    state, before, running = averager.state, averager.exchange, averager.running
    with averager._lock:
        averager._require_wanted()
        state.rollback()
        if not same_ranks:
            state.unshard(running.owned(before), before.world_size)
            state.drop(state.slots().keys() - state.debts())
            ratio = exchange.world_size / before.world_size
            state.scale_debts(dict.fromkeys(averager.parameters, ratio))
        exchange.checksum = averager._checksum
        averager.exchange, averager._verified = exchange, False
        running.forget()
        averager._tell_changed()


def peer_state(averager: Averager) -> dict[str, Any]:
    """Return what a rank that joins must have in common with the others."""
    averager.settle()
    return {
        "spec": str(averager.aggregator),
        "step": averager.step,
        "seed": averager.seed,
        "scale": averager.scale,
        "flushing": averager.flushing,
        "groups": [list(group) for group in averager.groups],
    }


def load_peer_state(averager: Averager, peer: Mapping[str, Any], met: bool) -> None:
    """Take over the :func:`peer_state` of another rank. This rank keeps its own residual.

    `met` says whether that rank has counted the last step that this one has taken.
    """
    averager.settle()
    if met and averager.flushing and not peer["flushing"]:
        # This rank has missed the message that says so.
        averager._end_flush()
    averager.units.rescale(averager.state, peer["scale"])
    averager.running.groups = checkpoint.groups_of(peer["groups"])
    averager.use(peer["spec"])
    averager._flush(peer["flushing"])
    averager.step, averager.seed = peer["step"], peer["seed"]
