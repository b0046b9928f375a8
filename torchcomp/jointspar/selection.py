"""Selection: which layers a step keeps, and what the exchange learns about them."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from torchcomp.algorithms.bandit import Mask
from torchcomp.algorithms.kl_projection import Vector
from torchcomp.algorithms.layers import Layers
from torchcomp.checkpoint import ONE_STEP
from torchcomp.exchange import Exchange

_CHECK_EVERY = 100
"""Steps between two comparisons of p over the ranks: drift would otherwise end in a hang."""


class Selection:
    """The set S_t of one step.

    Args:
        layers: the layers in order.
        shared: whether all ranks keep the same layers.

    Attributes:
        kept: whether this rank keeps each layer.
        p: the probabilities that they were drawn with.
        exchanged: whether any rank keeps each layer; None until the ranks have agreed.
    """

    def __init__(self, layers: Layers, shared: bool) -> None:
        self.layers = layers
        self.shared = shared
        self._layer_of = {
            name: place for place, names in enumerate(layers.values()) for name in names
        }
        self.draw(np.ones(len(layers), dtype=bool), np.ones(len(layers)), 0)

    def draw(self, kept: Mask, p: Vector, step: int) -> None:
        """Take a new set.

        Args:
            kept: 1-D, one entry for each layer.
            p: the probabilities that it was drawn with.
            step: steps that counted so far.
        """
        self.kept, self.p, self._step = kept, p, step
        self._verified = step % _CHECK_EVERY != 0
        self.forget()

    def forget(self) -> None:
        """Forget what an exchange that does not count has learned."""
        self.exchanged: Mask | None = self.kept if self.shared else None
        self._own: dict[str, Tensor] = {}
        self._means: dict[str, Tensor] = {}

    def doubt(self) -> None:
        """Compare the ranks' sets again: a rank alone may have loaded a state."""
        self._verified = False

    def names(self, mask: Mask) -> list[str]:
        """Parameters of the layers in `mask`, in the order of the layers."""
        return [name for name, place in self._layer_of.items() if mask[place]]

    def layer(self, name: str) -> int:
        """The place of a parameter's layer."""
        return self._layer_of[name]

    # The exchange runs in another thread or on another stream.

    def agree(self, exchange: Exchange) -> Mask:
        """Which layers the ranks exchange: all that any of them keeps. Collective.

        Raises:
            RankMismatchError: if ranks that should share a set hold different ones.
        """
        if self.shared and not self._verified:
            facts = {"step": self._step, "kept": self.kept.nonzero()[0], "p": self.p.tolist()}
            exchange.require_same("the layers of a step", facts, ONE_STEP)
            self._verified = True
        if self.exchanged is None:
            flags = torch.from_numpy(self.kept.astype(np.uint8)).to(exchange.device)
            self.exchanged = exchange.any_rank(flags).cpu().numpy().astype(bool)
        return self.exchanged

    def note_own(self, parts: Mapping[str, Tensor]) -> None:
        """Keep the norms of this rank's gradients, by parameter name."""
        self._own.update(_norms(parts))

    def note_mean(self, parts: Mapping[str, Tensor]) -> None:
        """Keep the norms of the mean of gradients that were divided by p, by parameter name."""
        self._means.update(_norms(parts))

    # After the exchange.

    def means_are_finite(self) -> bool:
        """Whether the step can be applied; the same answer on all ranks."""
        return (
            bool(torch.stack(list(self._means.values())).isfinite().all()) if self._means else True
        )

    def norms(self) -> dict[str, float]:
        """|g| of each parameter kept, before the division by p: of the mean, or of this rank."""
        noted = self._means if self.shared else self._own
        values = torch.stack(list(noted.values())).tolist() if noted else []
        factors = [self.p[self._layer_of[name]] if self.shared else 1.0 for name in noted]
        return {
            name: value * float(factor)
            for name, value, factor in zip(noted, values, factors, strict=True)
        }


def _norms(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # In float64, so that a finite gradient has a finite norm.
    return {
        name: torch.linalg.vector_norm(part, dtype=torch.float64) for name, part in parts.items()
    }
