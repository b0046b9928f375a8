"""Averaging: the engine behind a handle, and where its rank is among all ranks."""

from collections.abc import Mapping
from typing import Any

from torchcomp import checkpoint
from torchcomp.aggregators import Aggregator
from torchcomp.auto import Choice
from torchcomp.averager import Averager
from torchcomp.exchange import Exchange
from torchcomp.redistribution import Layout, Place, check_place, two_levels


class Averaging:
    """An averager, and how its ranks are those of the job.

    The averager's ranks are all ranks, or, with two levels, those of equal position in all nodes.

    Attributes:
        averager: the engine.
        everyone: exchange among all ranks, for between two steps.
        place: where this rank is.
        layouts: shape and strides of each whole parameter, by name. The averager has pieces of them
            if there are two levels.
        gathers: whether `everyone` are all ranks. Under a manager, it is this rank alone.
        choice: what ``"auto"`` has chosen, if it has.
    """

    gathers = True
    choice: Choice | None = None

    def __init__(
        self,
        averager: Averager,
        everyone: Exchange,
        place: Place,
        layouts: Mapping[str, Layout],
    ) -> None:
        self.averager = averager
        self.everyone = everyone
        self.place = place
        self.layouts = layouts

    @property
    def two_levels(self) -> bool:
        """Whether the averager's ranks are nodes."""
        return self.place.node_size > 1

    def settle(self) -> None:
        """Roll the last step back if a manager has decided by now that it does not count."""

    def abandon(self, step: int) -> None:
        """Discard what was done after `step` steps; see :meth:`.Averager.abandon`."""
        self.averager.abandon(step)

    def join(self) -> None:
        """Wait until the host has run every submitted job."""

    def use(self, aggregator: Aggregator) -> str:
        """Change the method between two steps; see :meth:`.Averager.use`."""
        return self.averager.use(aggregator)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank; see :meth:`.Averager.state_dict`."""
        state = self.averager.state_dict()
        if not self.two_levels:
            return state
        own = checkpoint.header(state["spec"], self.everyone)
        return {**state, **own, "two_levels": two_levels(self.place, self.layouts)}

    def load_state_dict(self, state: Any) -> None:
        """Restore the state of this rank; see :meth:`.Averager.load_state_dict`."""
        method = self._method_to_load(state)
        checkpoint.check_header(state, str(method), self.everyone, checkpoint.ADVICE)
        check_place(state, self.place)
        own = checkpoint.header(str(method), self.averager.exchange)
        self.averager.load_state_dict({**state, **own}, method)

    def _method_to_load(self, state: Any) -> Aggregator:
        """Return the method that a state must have."""
        return self.averager.aggregator

    def leave(self) -> None:
        """Hand the residual of this rank to the others at the end of the next step."""
        raise RuntimeError(
            "leave() is for torchcomp.register(..., manager=manager). Without a manager, the ranks "
            "change between two runs: torchcomp.redistribute(states, world_size) converts states"
        )

    @property
    def left(self) -> bool:
        """Whether the residual was handed over, in a step that counts."""
        return False

    def close(self, timeout: float | None = None) -> None:
        """End threads and, without a timeout, connections. Can be called more than once.

        Args:
            timeout: seconds after which it no longer waits for jobs. Connections then remain,
                because a job that another rank never joins would keep them, and this call, waiting.
        """
        if timeout is None:
            self.averager.exchange.close()
            self.everyone.close()
