"""DeltaAverage: what is averaged is the change of the parameters, so that it can be compressed."""

from collections.abc import Container, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from torchcomp import checkpoint
from torchcomp.aggregators import Aggregator
from torchcomp.bucket import Bucket, Group, merge, owned_shards
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.local_sgd.averaging import UNCHANGED
from torchcomp.local_sgd.weights import Weights
from torchcomp.nonfinite import FiniteWatch
from torchcomp.outer_steps import OuterStep
from torchcomp.state import State


class DeltaAverage:
    """The mean change since the last synchronisation, by an aggregator. See :class:`Averaging`.

    With x the parameters of the last synchronisation, the same on all ranks, and y this rank's:

    1. m <- the aggregator's estimate of the mean of y - x over the ranks
    2. x <- x + m, or the outer step from x along m
    3. y <- x, rounded to the dtype of the parameters, and x <- y

    m is the same on all ranks bit for bit, and so is x, whatever happened to y. Nothing is lost:
    the sum of all m plus the mean error memory (plus what owners of shards owe) is the sum of all
    mean changes, up to the rounding of float32, or of float64 where parameters have it. It is not
    where an all-reduce adds in a narrower dtype, as in ``ef(cast("bf16"))``: no memory sees what
    such a sum rounds away, up to 1e-3 of the changes.

    Args:
        weights: the parameters.
        groups: which of them are compressed together.
        exchange: the ranks.
        aggregator: the method.
        outer: the outer step; None adds m.
        seed: of the aggregator's random choices.
    """

    needs_equal_start = True

    def __init__(
        self,
        weights: Weights,
        groups: tuple[Group, ...],
        exchange: Exchange,
        aggregator: Aggregator,
        outer: OuterStep | None,
        seed: int,
    ) -> None:
        self._weights = weights
        whole = aggregator.whole_model
        self._groups = merge(groups, weights.parameters) if whole else groups
        self._exchange = exchange
        self._aggregator = aggregator
        self._outer = outer
        self._seed = seed
        self._state = State()
        self._reference: list[Bucket] = []
        self._momentum: list[Bucket] = []
        self._means: list[Bucket] = []

    def begin_round(self) -> None:
        if not self._reference:
            self._reference = self._read()
        if self._outer is not None and not self._momentum:
            self._momentum = self._zeros(self._groups)

    def add(self, group: Group) -> None:
        self._groups = (*self._groups, group)
        if self._reference:
            self._reference.append(self._weights.read(group))
        if self._momentum:
            self._momentum.append(self._zeros([group])[0])

    def exchange(self, step: int) -> None:
        watch = FiniteWatch(self._exchange)
        key = Key(self._seed, step, rank=self._exchange.rank)
        self._means = self._read()
        for bucket, x in zip(self._means, self._reference, strict=True):
            bucket.flat.sub_(x.flat)
            watch.before(bucket)
            self._aggregator.aggregate(bucket, self._exchange, self._state, key)
            watch.after(bucket)
        where = f"the change of the parameters until step {step}"
        if not watch.conclude(where, UNCHANGED):
            raise watch.error(where, UNCHANGED)

    def commit(self, rate: float) -> None:
        for place, (x, m) in enumerate(zip(self._reference, self._means, strict=True)):
            if self._outer is None:
                x.flat.add_(m.flat)
            else:
                self._outer.apply(x.flat, m.flat, self._momentum[place].flat, rate)
            self._weights.write(x)
        self._means = []
        self._reference = self._read()
        self._state.commit()

    def rollback(self) -> None:
        self._means = []
        self._state.rollback()
        self._exchange.forget()

    def error_norms(self) -> dict[str, float]:
        return {name: float(part.norm()) for name, part in self._state.worker.items()}

    def owner_norms(self) -> dict[str, float]:
        return {name: float(part.norm()) for name, part in self._state.owner.items()}

    def state_dict(self) -> dict[str, Any]:
        """All that :meth:`load_state_dict` takes, zeros included.

        torch.distributed.checkpoint fills in what the new run's own state holds, and no more.
        """
        parameters = self._weights.parameters
        reference = self._reference or self._read()
        momentum = self._momentum or self._zeros(self._groups if self._outer is not None else ())
        return {
            "buckets": [list(group) for group in self._groups],
            "thresholds": [self._thresholds(group) for group in self._groups],
            "strides": checkpoint.strides(parameters),
            "error": checkpoint.shaped(self._error().items(), parameters),
            "owner": self._owed(),
            "reference": checkpoint.shaped(_items(reference).items(), parameters),
            "momentum": checkpoint.shaped(_items(momentum).items(), parameters),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parameters = self._weights.parameters
        self._groups = self._weights.groups_of(state)
        self._seed = state["seed"]
        self._state.clear()
        self._state.worker.load(checkpoint.flat(_some(state["error"], parameters), parameters))
        owed = _some(state["owner"], parameters)
        self._state.owner.load(checkpoint.on_devices(owed, parameters))
        for group, thresholds in zip(state["buckets"], state["thresholds"], strict=True):
            self._state.load_agreed(tuple(group), dict(thresholds))
        self._reference = self._filled(state["reference"])
        self._momentum = self._filled(state["momentum"]) if self._outer is not None else []

    def _read(self) -> list[Bucket]:
        return [self._weights.read(group) for group in self._groups]

    def _zeros(self, groups: Iterable[Group]) -> list[Bucket]:
        weights = self._weights
        return [weights.zeros(group, weights.sizes(group)) for group in groups]

    def _filled(self, tensors: dict[str, Tensor]) -> list[Bucket]:
        """Buckets of the values of all parameters' `tensors`."""
        parameters = self._weights.parameters
        parts = checkpoint.flat(_some(tensors, parameters), parameters)
        buckets = self._zeros(self._groups)
        for bucket in buckets:
            for name, part in bucket.parts().items():
                part.copy_(parts[name])
        return buckets

    def _error(self) -> dict[str, Tensor]:
        if not self._aggregator.remembers:
            return {}
        return {**_items(self._zeros(self._groups)), **dict(self._state.worker.items())}

    def _owed(self) -> dict[str, Tensor]:
        if not self._aggregator.owes:
            return {}
        ranks = self._exchange.rank, self._exchange.world_size
        owned = owned_shards(self._groups, self._weights.parameters, *ranks)
        zeros = _items(self._weights.zeros(s.names, s.sizes) for s in owned if s.names)
        return {**zeros, **{name: part.clone() for name, part in self._state.owner.items()}}

    def _thresholds(self, group: Group) -> list[list[int]]:
        return [[place, value] for place, value in self._state.agreed(group).items()]


def check_memory(
    state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], exchange: Exchange
) -> None:
    """Require that memories, parameters of the last synchronisation and momenta fit a model.

    Raises:
        CheckpointError: naming what does not.
    """
    checkpoint.check_memory(state, parameters, exchange)
    for part in ("reference", "momentum") if state["momentum"] else ("reference",):
        shapes = {name: list(tensor.shape) for name, tensor in state[part].items()}
        checkpoint.check_shapes(shapes, parameters)
    checkpoint.flat(state["error"], parameters)


def _some(tensors: Mapping[str, Tensor], names: Container[str]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name in names}


def _items(buckets: Iterable[Bucket]) -> dict[str, Tensor]:
    return {name: part for bucket in buckets for name, part in bucket.parts().items()}
