"""Buckets: the way of the gradients of a model between the hook and the optimizer."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from torchcomp.aggregators import Aggregator
from torchcomp.checkpoints import checkpoint
from torchcomp.checkpoints.checkpoint import layout_of
from torchcomp.checkpoints.redistribution import Place, check_place, two_levels
from torchcomp.ddp.executors import Executor, Job
from torchcomp.ddp.reordering import Reordering
from torchcomp.engine.averager import Averager
from torchcomp.engine.bucket import Bucket
from torchcomp.exchange import Exchange


class Buckets:
    """Averages the buckets of one model over all ranks, one backward pass after another.

    Jobs on the first executor call `begin`, `average` for each bucket, and `finish`. The exchange
    `everyone` is over the user's group, for between two steps.
    """

    gathers = True  # whether `everyone` is all ranks; with a manager, it is this rank alone
    _one_order = False  # whether ranks can have different DDP buckets, and need one order of groups

    def __init__(
        self,
        averager: Averager,
        everyone: Exchange,
        place: Place,
        parameters: Mapping[str, Tensor],
        executors: Sequence[Executor] = (),
    ) -> None:
        self.averager, self.everyone, self.place = averager, everyone, place
        self.parameters, self.executors = parameters, executors
        self._reordering: Reordering | None = None
        self._changes = -1  # `averager.changes` when it was made

    def begin(self, scale: float, lrs: dict[str, float] | None) -> None:
        averager = self.averager
        averager.begin(scale, lrs)
        if averager.changes != self._changes:  # a swap or a loaded checkpoint changes the groups
            self._changes, self._reordering = averager.changes, None
            if averager.grouped or self._one_order:
                shapes = [averager.shape_of(group) for group in averager.buckets]
                self._reordering = Reordering(shapes, self._one_order)
        if self._reordering is not None:
            self._reordering.begin()

    def average(self, bucket: Bucket) -> None:
        if self._reordering is None:
            self.averager.average(bucket)
            return
        for group in self._reordering.add(bucket):  # those that the bucket completes
            self.averager.average(group)

    def finish(self, end: Callable[..., bool]) -> None:
        end()

    # Around a step, in the thread of the backward pass.
    def start(self) -> None:
        for executor in self.executors:
            executor.failure = None

    def complete(self, done: Job) -> None:
        """Run `done` after everything that was submitted so far, also if that fails."""
        first, *others = self.executors
        for executor in reversed(others):
            done = partial(executor.submit, done, always=True)
        first.submit(done, always=True)

    def join(self) -> BaseException | None:
        """Wait until the host has run every submitted job; return their first exception."""
        failure = None
        for executor in self.executors:
            executor.join()
            failure = executor.failure if failure is None else failure
        return failure

    def abandon(self, step: int) -> None:
        # Jobs that have not begun will not run. One that waits for other ranks is not waited for.
        for executor in self.executors:
            executor.failure = executor.failure or RuntimeError("the backward pass raised")
        self.averager.abandon(step)

    # Between two steps.
    def state_dict(self) -> dict[str, Any]:
        state = self.averager.state_dict()
        if self.place.node_size == 1:
            return state
        own = checkpoint.header(state["spec"], self.everyone)
        return {**state, **own, "two_levels": two_levels(self.place, layout_of(self.parameters))}

    def load_state_dict(self, state: Any, method: Aggregator | None = None) -> None:
        method = method or self.averager.aggregator
        checkpoint.check_header(state, str(method), self.everyone, checkpoint.ADVICE)
        check_place(state, self.place)
        own = checkpoint.header(str(method), self.averager.exchange)
        self.averager.load_state_dict({**state, **own}, method)

    def leave(self) -> None:
        raise RuntimeError(
            "leave() is for torchcomp.register(..., manager=manager). Without a manager, "
            "torchcomp.redistribute(states, world_size) converts states between two runs"
        )

    @property
    def left(self) -> bool:
        return False

    def close(self, timeout: float | None = None) -> None:
        """End threads and connections; with a timeout in seconds for jobs, connections remain."""
        end = None if timeout is None else time.monotonic() + timeout
        # The last one first: each waits for the stream of the one before it.
        for executor in reversed(self.executors):
            executor.close(None if end is None else max(0.0, end - time.monotonic()))
        if timeout is None:
            self.averager.exchange.close()
            self.everyone.close()
