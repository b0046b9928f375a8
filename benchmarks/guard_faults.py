"""Faults for the guard to find, planted in a run of compressed gradients between two steps.

Each is a function of the run. It changes the objects of this process and never changes them back: a
run with a fault has a process of its own.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torchcomp
from torchcomp.bucket import Bucket
from torchcomp.codec import Codec
from torchcomp.compressors.base import Encoded
from torchcomp.keys import Key
from torchcomp.prepared import Prepared
from torchcomp.state import State

CULPRIT = 1
"""The rank of the faults that are those of one rank."""


@dataclass(frozen=True)
class Run:
    """What a fault is planted in, on one rank.

    Attributes:
        handle: of the trained model.
        parameters: of the model, by name.
        layer: the parameter of faults in one layer.
        rank: of this process.
    """

    handle: torchcomp.Handle
    parameters: Mapping[str, Tensor]
    layer: str
    rank: int

    @property
    def is_culprit(self) -> bool:
        return self.rank == CULPRIT


def error_feedback_off(run: Run) -> None:
    """The residual is zero in every step."""
    _after_each_bucket(run, lambda bucket: [part.zero_() for _, part in _written(run, bucket)])


def wrong_scale(run: Run) -> None:
    """The mean is twice as large."""
    _after_each_bucket(run, lambda bucket: bucket.flat.mul_(2))


def wrong_scale_of_a_layer(run: Run) -> None:
    """The mean of one layer is larger by a tenth."""

    def scale(bucket: Bucket) -> None:
        if run.layer in bucket.names:
            bucket.parts()[run.layer].mul_(1.1)

    _after_each_bucket(run, scale)


def zeros_sent(run: Run) -> None:
    """One rank sends zeros, as if they were its values."""
    if not run.is_culprit:
        return
    encode_sum = Codec.encode_sum

    def encode(self: Codec, g: Tensor, e: Tensor, rest: Tensor, key: Key) -> Encoded:
        encoded = encode_sum(self, g, e, rest, key)
        for part in (part for parts in encoded.parts for part in parts):
            # Indices stay valid. A message of integers has a scale.
            if part.dtype.is_floating_point:
                part.zero_()
        torch.add(g, e, out=rest)
        return self.pack(encoded)

    Codec.encode_sum = encode  # type: ignore[method-assign]


def zero_gradients(run: Run) -> None:
    """The gradients of one rank are zero, as with a loss that is multiplied by zero."""
    if run.is_culprit:
        for parameter in run.parameters.values():
            parameter.register_hook(torch.zeros_like)


def stale_residual(run: Run) -> None:
    """The residual is never updated again."""
    State.commit = State.rollback  # type: ignore[method-assign]


def old_residual(run: Run) -> None:
    """One rank gets its residual of another step, once: here, half of it."""
    if run.is_culprit:
        for slot in run.handle.averager.state.debts():
            for _, part in run.handle.averager.state.items(slot):
                part.mul_(0.5)


def starved_layer(run: Run) -> None:
    """Of one layer, one value is sent per step: its ratio is too small."""
    _keep_in_residual(run, 1)


def lost_layer(run: Run) -> None:
    """One layer is never sent."""
    _keep_in_residual(run, 0)


def desynchronised(run: Run) -> None:
    """One value of one parameter differs on one rank."""
    if run.is_culprit:
        with torch.no_grad():
            run.parameters[run.layer].view(-1)[0] += 1e-3


def _after_each_bucket(run: Run, then: Callable[[Bucket], object]) -> None:
    """Call `then` with each bucket after the method has averaged it."""
    kind = type(run.handle.averager.aggregator)
    aggregate = kind.aggregate

    def changed(self: Any, g: Tensor, bucket: Prepared, key: Key) -> None:
        aggregate(self, g, bucket, key)
        then(Bucket(bucket.shape, g))

    kind.aggregate = changed  # type: ignore[method-assign]


def _written(run: Run, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """Iterate over what the step has written to this rank's residual, by parameter."""
    pending = run.handle.averager.state.pending("error")
    yield from ((name, part) for name, part in pending if name in bucket.names)


def _keep_in_residual(run: Run, count: int) -> None:
    """Move all but the `count` largest values of a layer from the mean to the residual."""

    def move(bucket: Bucket) -> None:
        if run.layer not in bucket.names:
            return
        mean = bucket.parts()[run.layer]
        kept = torch.zeros_like(mean)
        at = mean.abs().topk(count).indices
        kept[at] = mean[at]
        residual = dict(_written(run, bucket))[run.layer]
        residual.add_((mean - kept).to(residual.dtype))
        mean.copy_(kept)

    _after_each_bucket(run, move)


@dataclass(frozen=True)
class Fault:
    """A fault, and what the guard is to say of it.

    Attributes:
        plant: plants it.
        kinds: kinds of alarms that are right.
        layer: whether they must name the layer, and nothing else.
        culprit: whether they must name the rank, and nothing else.
        by_layer: whether only a method that selects from each layer separately can have it.
    """

    plant: Callable[[Run], None]
    kinds: tuple[str, ...]
    layer: bool = False
    culprit: bool = False
    by_layer: bool = False


FAULTS = {
    "error feedback off": Fault(error_feedback_off, ("imbalance",)),
    "wrong scale": Fault(wrong_scale, ("imbalance",)),
    "wrong scale of a layer": Fault(wrong_scale_of_a_layer, ("imbalance",), layer=True),
    "a rank sends zeros": Fault(zeros_sent, ("imbalance", "silent rank")),
    "a rank has no gradient": Fault(zero_gradients, ("silent rank",), culprit=True),
    "stale residual": Fault(stale_residual, ("residual changed",)),
    "an old residual, once": Fault(old_residual, ("residual changed",), culprit=True),
    "ratio too small for a layer": Fault(starved_layer, ("starved",), layer=True, by_layer=True),
    "a layer is never sent": Fault(lost_layer, ("starved",), layer=True),
    "desynchronised replica": Fault(desynchronised, ("replicas",), layer=True, culprit=True),
}
