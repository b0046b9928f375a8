"""Units: the loss scale and the learning rates that residuals follow."""

from collections.abc import Mapping

from torch import Tensor

from torchcomp.engine.state import State
from torchcomp.specs.checks import check_at_least_0

LR = float | Mapping[str, float] | None
"""Learning rate of a step: one for all parameters, or one by name. None: not given."""


class Units:
    """The units in which a state is kept.

    Attributes:
        scale: loss scale of the gradients.
        lrs: the learning rates in the residual, by parameter name: its unit is that of an update.
            Empty if it has the unit of the gradients.
        before: `scale` and `lrs` before the step in flight, or before the last one.
    """

    def __init__(self) -> None:
        self.scale = 1.0
        self.lrs: dict[str, float] = {}
        self.before = self.scale, self.lrs

    def follow(
        self, state: State, scale: float, lrs: Mapping[str, float], names: Mapping[str, object]
    ) -> Mapping[str, float]:
        """Convert a state to the loss scale and the learning rates of the step that begins.

        `lrs` is empty if they are not given; `names` has all parameters.

        Returns:
            The factors by which the residual has changed, by parameter name.
        """
        ratio = scale / self.scale
        self.rescale(state, scale)
        changed = self._follow_lrs(state, lrs) if lrs or self.lrs else {}
        if ratio == 1:
            return changed
        return {name: ratio * changed.get(name, 1.0) for name in names}

    def go_back(self, state: State) -> None:
        """Convert a state to the units :attr:`before`."""
        scale, lrs = self.before
        self.rescale(state, scale)
        self._follow_lrs(state, lrs)
        self.lrs = lrs

    def rescale(self, state: State, scale: float) -> None:
        """Convert residuals and estimates, which have the unit of the scaled gradients."""
        if scale != self.scale:
            state.scale(scale / self.scale)
            self.scale = scale

    def _follow_lrs(self, state: State, lrs: Mapping[str, float]) -> Mapping[str, float]:
        """Convert the residual from the unit of the last update to that of the next."""
        nonzero = {name: lr for name, lr in lrs.items() if lr}
        ratios = {name: self.lrs.get(name, lr) / lr for name, lr in nonzero.items()}
        changed = {name: ratio for name, ratio in ratios.items() if ratio != 1}
        if changed:
            state.scale_debts(changed)
        # Without learning rates, what is unsent comes from steps whose learning rate is not known.
        self.lrs = self.lrs | nonzero if lrs else {}
        return changed


def by_name(lr: float | Mapping[str, float], parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the learning rate of each parameter.

    Raises:
        SpecError: if one is missing, negative or not finite.
    """
    lrs = lr if isinstance(lr, Mapping) else dict.fromkeys(parameters, lr)
    for name in parameters:
        check_at_least_0(f"lr of '{name}'", lrs.get(name))
    return {name: float(lrs[name]) for name in parameters}
