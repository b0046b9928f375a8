"""Averaging: how a synchronisation turns the ranks' parameters into shared ones.

It has two halves. :meth:`exchange` talks to the other ranks and changes nothing that lasts;
:meth:`commit` then makes its result count. What fails in between is rolled back.
"""

from typing import Any, Protocol

from torchcomp.bucket import Bucket, Group
from torchcomp.exchange import Exchange
from torchcomp.local_sgd.weights import Weights
from torchcomp.nonfinite import FiniteWatch

UNCHANGED = "No rank has averaged its parameters, and the error memory is what it was."


class Averaging(Protocol):
    """What :class:`torchcomp.LocalSGD` needs of a way to average.

    Attributes:
        needs_equal_start: whether the ranks must hold the same parameters at the first step.
    """

    needs_equal_start: bool

    def begin_round(self) -> None:
        """A round begins with the next local step."""

    def add(self, group: Group) -> None:
        """Average a group of parameters more from now on; they are among the weights already."""

    def exchange(self, step: int) -> None:
        """Exchange what the ranks have to say after `step` steps.

        Raises:
            NonFiniteError: on all ranks, if something is not finite.
            WireError: on all ranks, if a message was not intact.
        """

    def commit(self, rate: float) -> None:
        """Give the parameters their new values; `rate` is what an outer step reads."""

    def rollback(self) -> None:
        """Forget a synchronisation that failed."""

    def error_norms(self) -> dict[str, float]:
        """Euclidean norm of this rank's error memory, by parameter."""

    def owner_norms(self) -> dict[str, float]:
        """The same of what this rank owes as the owner of shards."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive: lists with an entry for each group, and tensors by parameter."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that has been checked, for the parameters that the weights hold."""


class PlainAverage:
    """The mean of the parameters over the ranks, in float32 or wider. See :class:`Averaging`.

    Args:
        weights: the parameters.
        groups: which of them travel together.
        exchange: the ranks.
        what: what the weights are, for errors.
    """

    needs_equal_start = False

    def __init__(
        self,
        weights: Weights,
        groups: tuple[Group, ...],
        exchange: Exchange,
        what: str = "the parameters",
    ) -> None:
        self._weights = weights
        self._groups = groups
        self._exchange = exchange
        self._what = what
        self._means: list[Bucket] = []

    def begin_round(self) -> None:
        pass

    def add(self, group: Group) -> None:
        self._groups = (*self._groups, group)

    def exchange(self, step: int) -> None:
        watch = FiniteWatch(self._exchange)
        self._means = [self._weights.read(group) for group in self._groups]
        for bucket in self._means:
            watch.before(bucket)
            self._exchange.sum(bucket.flat)
            # Not times the reciprocal, as gradients are: its rounding errs to one side, and weights
            # that are averaged thousands of times would grow by it.
            bucket.flat.div_(self._exchange.world_size)
            watch.after(bucket)
        where = f"{self._what} after step {step}"
        if not watch.conclude(where, UNCHANGED):
            raise watch.error(where, UNCHANGED)

    def commit(self, rate: float) -> None:
        for bucket in self._means:
            self._weights.write(bucket)
        self._means = []

    def rollback(self) -> None:
        self._means = []

    def error_norms(self) -> dict[str, float]:
        return {}

    def owner_norms(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        buckets = [list(group) for group in self._groups]
        thresholds: list[list[int]] = [[] for _ in buckets]
        nothing = {name: dict[str, Any]() for name in ("strides", "error", "owner")}
        return {"buckets": buckets, "thresholds": thresholds, **nothing}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._groups = self._weights.groups_of(state)
