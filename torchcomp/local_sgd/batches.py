"""Batches: what a rank has done with its data, to recognise one that has lost step with others."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

_log = logging.getLogger(__package__)

_SUSPICIOUS = 10
"""Batches dropped before the first turn of an optimizer, after which one asks for which it was."""


@dataclass
class Batches:
    """Counts what only a rank that has lost step does more often than the others.

    Ranks may well differ in what they do for one step: accumulate another number of micro-batches,
    compute activations again, look at an output.

    Attributes:
        dropped: batches whose gradients were thrown away, and no optimizer's turn came between.
        missing: steps before which no forward pass in training has been.
    """

    dropped: int = 0
    missing: int = 0
    _forward: bool = field(default=False, repr=False)
    _gradients: bool = field(default=False, repr=False)
    _turns: int = field(default=0, repr=False)

    def forward(self, cleared: Callable[[], bool]) -> None:
        """A forward pass in training begins; `cleared` tells whether no gradient is held."""
        if self._gradients and cleared():
            self._drop()
        self._forward = True

    def gradients(self) -> None:
        """A backward pass has added gradients."""
        self._gradients = True

    def turn(self) -> None:
        """An optimizer has had its turn with them."""
        self._gradients = False
        self._turns += 1

    def step(self) -> None:
        """All optimizers have had their turns."""
        self.missing += not self._forward
        self._forward = False

    def _drop(self) -> None:
        self._gradients = False
        self.dropped += 1
        if not self._turns and self.dropped == _SUSPICIOUS:
            _log.warning(
                "%d batches have gone backward, and no optimizer that LocalSGD was given has "
                "stepped: nothing is averaged so. If another optimizer trains the model, hand that "
                "one over, torchcomp.LocalSGD(model, optimizer, ...)",
                self.dropped,
            )
