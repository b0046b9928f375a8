"""The eight methods, each built from a problem, a server, a message's size and a step size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.two_direction.methods.agd import AGD, FISTA, ConstantMomentumAGD
from recipes.two_direction.methods.diana import DIANA
from recipes.two_direction.methods.ef14 import EF14
from recipes.two_direction.methods.ef21 import EF21
from recipes.two_direction.methods.ef21p import EF21P
from recipes.two_direction.methods.ef21p_diana import EF21PDIANA
from torchcomp.compressors import Compressor, Identity, RandK, TopK
from torchcomp.engine.keys import Key
from torchcomp.two_direction import TwoDirectionMethod
from torchcomp.two_direction.method import Gradients, Method
from torchcomp.two_direction.parameter_server import ParameterServer


class Problem(Protocol):
    """The mean of n functions, one per worker."""

    d: int
    n: int
    mu: float

    def gradients(self, workers: range) -> Gradients:
        """Return the function that evaluates the gradients of these workers."""

    def value(self, x: Tensor) -> float:
        """Return f(x), up to a constant factor and a constant."""


class Messages(NamedTuple):
    """How many values the compressed messages have; d values down are a dense message."""

    up: int  # of a worker
    down: int  # of the server


# About a gigabyte: 100 workers draw 65 indices of two bytes each.
@lru_cache(maxsize=70_000)
def _drawn(keys: tuple[Key, ...], numel: int, k: int) -> NDArray[np.integer]:
    chosen = RandK(k=k, unbiased=True).supports(keys, numel)
    return chosen.astype(np.min_scalar_type(numel))


@dataclass(frozen=True)
class RememberingRandK(RandK):
    """RandK that draws once for all runs with a seed: for 100 workers, drawing is the main cost."""

    def supports(self, keys: Sequence[Key], numel: int) -> NDArray[np.int64]:
        return _drawn(tuple(keys), numel, self.kept(numel)).astype(np.int64)


def random(k: int) -> RandK:
    """Return the unbiased compressor of the workers."""
    return RememberingRandK(k=k, unbiased=True)


def _largest(f: Problem, sent: Messages) -> Compressor:
    return Identity() if sent.down == f.d else TopK(k=sent.down)


def _start(f: Problem, server: ParameterServer) -> tuple[Any, ...]:
    return f.gradients(server.mine), torch.zeros(f.d, dtype=torch.float64), server


def _agd(f: Problem, server: ParameterServer, sent: Messages, step: float) -> Method:
    # A constant momentum needs strong convexity.
    if f.mu == 0:
        return FISTA(*_start(f, server), gamma=step)
    return ConstantMomentumAGD(*_start(f, server), gamma=step, mu=f.mu)


METHODS: dict[str, Callable[[Problem, ParameterServer, Messages, float], Method]] = {
    "2Direction": lambda f, server, sent, step: TwoDirectionMethod(
        *_start(f, server), random(sent.up), _largest(f, sent), lbar=1 / step, mu=f.mu
    ),
    "AGD": _agd,
    "AGD, three sequences": lambda f, server, sent, step: AGD(
        *_start(f, server), lbar=1 / step, mu=f.mu
    ),
    "EF21-P + DIANA": lambda f, server, sent, step: EF21PDIANA(
        *_start(f, server), random(sent.up), _largest(f, sent), gamma=step
    ),
    "DIANA": lambda f, server, sent, step: DIANA(*_start(f, server), random(sent.up), gamma=step),
    "EF21-P": lambda f, server, sent, step: EF21P(
        *_start(f, server), _largest(f, sent), gamma=step
    ),
    "EF21": lambda f, server, sent, step: EF21(*_start(f, server), TopK(k=sent.up), gamma=step),
    "EF14": lambda f, server, sent, step: EF14(*_start(f, server), TopK(k=sent.up), gamma=step),
}
ACCELERATED = ("2Direction", "AGD", "AGD, three sequences")
"""The accelerated methods. Their step size cannot exceed 1/mu."""
