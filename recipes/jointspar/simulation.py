"""JointSpar on simulated ranks: one process, one copy of the weights, the library's sampler.

The ranks' gradients are computed one after another, so many workers fit on few cores. A test
compares the result with :class:`torchcomp.JointSpar` on DDP.
"""

from collections.abc import Callable, Sequence
from itertools import cycle

import numpy as np
import torch
from torch import Tensor, nn

from recipes.jointspar.methods import LayerSampling, Method
from torchcomp.engine.keys import Key
from torchcomp.jointspar import Sampler, default_layers


class SimulatedRanks:
    """Average the gradients of simulated ranks, which share ``module``, by a method."""

    def __init__(self, module: nn.Module, method: Method, ranks: int, seed: int) -> None:
        self._parameters = dict(module.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self.samplers: list[Sampler] = []
        if isinstance(method, LayerSampling):
            layers = default_layers(self._parameters.items())
            nbytes = [sum(self._parameters[n].nbytes for n in names) for names in layers.values()]
            costs = np.array(nbytes, float) if method.costs == "bytes" else np.ones(len(layers))
            # A shared selection has one sampler, because every rank's would be in the same state.
            keys = [Key(seed, rank=rank) for rank in range(1 if method.shared else ranks)]
            self.samplers = [Sampler(method.options, layers, costs, key) for key in keys]
            self._bytes = np.array(nbytes) / sum(nbytes)
        self._computed: list[float] = []
        self._sent: list[float] = []

    def backward(self, losses: Sequence[Callable[[], Tensor]]) -> bool:
        """Store the mean gradients in ``grad``, None in dropped layers. Return if all are finite.

        ``losses`` has a function for each rank, which returns the loss of its batch.
        """
        sums: dict[str, Tensor] = {}
        samplers = cycle(self.samplers or [None])
        for loss, sampler in zip(losses, samplers, strict=False):
            for name, gradient in self._gradients(loss(), sampler).items():
                sums[name] = sums[name] + gradient if name in sums else gradient
        means = {name: total / len(losses) for name, total in sums.items()}
        for name, parameter in self._parameters.items():
            parameter.grad = means.get(name)
        if not all(bool(mean.isfinite().all()) for mean in means.values()):
            return False
        self._learn(means)
        return True

    @property
    def computed(self) -> float:
        """Share of the layers whose gradients a rank computes, as a mean over the steps."""
        return float(np.mean(self._computed)) if self._computed else 1.0

    @property
    def sent(self) -> float:
        """Share of the model's bytes that the ranks exchange, as a mean over the steps."""
        return float(np.mean(self._sent)) if self._sent else 1.0

    @property
    def largest(self) -> float:
        """The largest gradient norm of a layer that a bandit has seen; 0 for ``dense``."""
        return max((s.bandit.largest for s in self.samplers), default=0.0)

    @property
    def extremes(self) -> tuple[float, float]:
        """The lowest and the highest probability of a layer in the next step."""
        p = [sampler.p for sampler in self.samplers] or [np.ones(1)]
        return float(np.min(p)), float(np.max(p))

    def _gradients(self, loss: Tensor, sampler: Sampler | None) -> dict[str, Tensor]:
        names = list(self._parameters) if sampler is None else sampler.names(sampler.kept)
        if not names:
            return {}
        parameters = [self._parameters[name] for name in names]
        gradients = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
        if sampler is None:
            return gradients
        if not sampler.shared:
            sampler.record_norms(gradients)
        return {n: g / float(sampler.p[sampler.layer_of[n]]) for n, g in gradients.items()}

    def _learn(self, means: dict[str, Tensor]) -> None:
        if not self.samplers:
            return
        kept = [sampler.kept for sampler in self.samplers]
        self._computed.append(float(np.mean(kept)))
        self._sent.append(float(self._bytes[np.any(kept, axis=0)].sum()))
        for sampler in self.samplers:
            if sampler.shared:
                sampler.record_norms(means)
            sampler.learn()
            sampler.draw()

    # These two methods implement the protocol torchcomp.jointspar.Sampling, which LARS uses.

    def probability(self, parameter: Tensor) -> float:
        """Return the p that divided this parameter's gradient in the last step."""
        (sampler,) = self.samplers
        return float(sampler.applied[sampler.layer_of[self._names[id(parameter)]]])

    def norm(self, parameter: Tensor) -> float:
        """Return the running average of this parameter's gradient norm, before division by p."""
        (sampler,) = self.samplers
        return sampler.norm(self._names[id(parameter)])
