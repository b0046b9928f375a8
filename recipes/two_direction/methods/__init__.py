"""The eight methods, each built from a problem, a server, compressors and a step size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

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
from recipes.two_direction.theory import Probabilities
from torchcomp.compressors import Compressor, Identity, RandK, TopK
from torchcomp.engine.keys import Key
from torchcomp.two_direction import TwoDirectionMethod
from torchcomp.two_direction.method import Gradients, Method
from torchcomp.two_direction.parameter_server import ParameterServer

_REMEMBERED_BYTES = 10**9


class Problem(Protocol):
    """The mean of n functions, one per worker."""

    d: int
    n: int
    mu: float

    def gradients(self, workers: range) -> Gradients:
        """Return the function that evaluates the gradients of these workers."""

    def value(self, x: Tensor) -> float:
        """Return f(x), up to a constant factor and a constant."""


@dataclass(frozen=True)
class Messages:
    """What the compressed messages contain.

    Attributes:
        k_up: values of a worker's message.
        k_down: values of the server's message.
        chance: p and tau of 2Direction; None for p = tau = 1/(omega + 1).
    """

    k_up: int
    k_down: int
    chance: Probabilities | None = None

    @property
    def random(self) -> RandK:
        """The unbiased compressor of the workers."""
        return RememberingRandK(k=self.k_up, unbiased=True)

    def largest(self, d: int) -> Compressor:
        """Return the contractive compressor of the server."""
        return Identity() if self.k_down == d else TopK(k=self.k_down)


class _Draws:
    """Draws of RandK for all workers, by their keys, up to a total size."""

    def __init__(self) -> None:
        self.known: dict[tuple[object, ...], NDArray[np.integer]] = {}
        self.nbytes = 0

    def add(self, address: tuple[object, ...], chosen: NDArray[np.int64]) -> None:
        small = chosen.astype(np.min_scalar_type(int(chosen.max())))
        if self.nbytes + small.nbytes > _REMEMBERED_BYTES:
            self.known.clear()
            self.nbytes = 0
        self.known[address] = small
        self.nbytes += small.nbytes


_DRAWS = _Draws()


@dataclass(frozen=True)
class RememberingRandK(RandK):
    """RandK that draws once for all runs with a seed: with 100 workers, drawing is the main cost.

    The draws and messages are those of :class:`RandK`.
    """

    def supports(self, keys: Sequence[Key], numel: int) -> NDArray[np.int64]:
        address = (*keys, numel, self.kept(numel))
        if address not in _DRAWS.known:
            _DRAWS.add(address, super().supports(keys, numel))
        return _DRAWS.known[address].astype(np.int64)


Build = Callable[[Problem, ParameterServer, Messages, float], Method]


def _two_direction(f: Problem, server: ParameterServer, sent: Messages, step: float) -> Method:
    chance = vars(sent.chance) if sent.chance else {}
    up, down = sent.random, sent.largest(f.d)
    theory = {"lbar": 1 / step, "mu": f.mu, **chance}
    return TwoDirectionMethod(f.gradients(server.mine), _x0(f), server, up, down, **theory)


def _ef21p_diana(f: Problem, server: ParameterServer, sent: Messages, step: float) -> Method:
    up, down = sent.random, sent.largest(f.d)
    return EF21PDIANA(f.gradients(server.mine), _x0(f), server, up, down, gamma=step)


def _agd(f: Problem, server: ParameterServer, sent: Messages, step: float) -> Method:
    gradients = f.gradients(server.mine)
    # A constant momentum needs strong convexity.
    if f.mu == 0:
        return FISTA(gradients, _x0(f), server, gamma=step)
    return ConstantMomentumAGD(gradients, _x0(f), server, gamma=step, mu=f.mu)


def _three_sequences(f: Problem, server: ParameterServer, sent: Messages, step: float) -> Method:
    return AGD(f.gradients(server.mine), _x0(f), server, lbar=1 / step, mu=f.mu)


def _diana(f: Problem, server: ParameterServer, sent: Messages, step: float) -> Method:
    return DIANA(f.gradients(server.mine), _x0(f), server, sent.random, gamma=step)


def _ef21(f: Problem, server: ParameterServer, sent: Messages, step: float) -> Method:
    return EF21(f.gradients(server.mine), _x0(f), server, TopK(k=sent.k_up), gamma=step)


def _ef14(f: Problem, server: ParameterServer, sent: Messages, step: float) -> Method:
    return EF14(f.gradients(server.mine), _x0(f), server, TopK(k=sent.k_up), gamma=step)


def _ef21p(f: Problem, server: ParameterServer, sent: Messages, step: float) -> Method:
    return EF21P(f.gradients(server.mine), _x0(f), server, sent.largest(f.d), gamma=step)


def _x0(f: Problem) -> Tensor:
    return torch.zeros(f.d, dtype=torch.float64)


METHODS: dict[str, Build] = {
    "2Direction": _two_direction,
    "AGD": _agd,
    "AGD, three sequences": _three_sequences,
    "EF21-P + DIANA": _ef21p_diana,
    "DIANA": _diana,
    "EF21-P": _ef21p,
    "EF21": _ef21,
    "EF14": _ef14,
}
ACCELERATED = ("2Direction", "AGD", "AGD, three sequences")
"""The accelerated methods. Their step size cannot exceed 1/mu."""
