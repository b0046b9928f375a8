"""Learning-rate schedules of the QSR paper: Gu et al., ICLR 2024 (arXiv 2310.14423).

Its eta_max is `peak`, at the end of warm-up. Its eta_min is `final`, at the end of the run.
"""

import math
from collections.abc import Callable
from functools import partial

from torchcomp.specs.checks import check_at_least_0, check_choice, check_count, check_positive
from torchcomp.specs.errors import SpecError

# From the number of steps taken so far to the learning rate of the next step.
LRFunction = Callable[[int], float]

DECAYS = ("cosine", "linear", "step-cosine")
"""Half a cosine wave, a straight line, and that cosine rounded to powers of two."""


def warmed_up(step: int, *, after: LRFunction, peak: float, final: float, steps: int) -> float:
    """Linear warm-up from `final` to `peak` in `steps` steps; then `after`, of the run's step."""
    return final + (peak - final) * step / steps if step < steps else after(step)


def decaying(
    decay: str, *, peak: float, total_steps: int, warmup_steps: int = 0, final: float = 1e-6
) -> LRFunction:
    """Return the learning rate as a function of the step, counted from 0.

    Args:
        decay: the decay after warm-up, one of :data:`DECAYS`.
        peak: learning rate at the end of warm-up, above 0.
        total_steps: optimizer steps of the run, with warm-up.
        warmup_steps: steps of linear warm-up from `final` to `peak`; fewer than `total_steps`.
        final: learning rate at step 0 (with warm-up) and at step `total_steps`; at most `peak`.

    Raises:
        SpecError: if an argument is out of range.
    """
    check_choice("decay", decay, DECAYS)
    check_positive("peak", peak)
    check_at_least_0("final", final)
    check_count("total_steps", total_steps)
    check_count("warmup_steps", warmup_steps, 0, total_steps - 1)
    if final > peak:
        raise SpecError(f"final={final:g} must be at most peak={peak:g}", "final")
    if decay == "step-cosine" and final == 0:  # it takes the logarithm
        raise SpecError('final must be above 0 with decay="step-cosine"', "final")
    # The decay takes the steps that warm-up leaves, and reaches `final` at step `total_steps`.
    length = total_steps - warmup_steps

    def decayed(step: int) -> float:
        done = step - warmup_steps
        if decay == "linear":
            return final + (peak - final) * (1 - done / length)
        cosine = final + (peak - final) * 0.5 * (1 + math.cos(math.pi * done / length))
        # round() to an integer, not 2 ** floor(): the nearest power of two on a log scale.
        return 2.0 ** round(math.log2(cosine)) if decay == "step-cosine" else cosine

    return partial(warmed_up, after=decayed, peak=peak, final=final, steps=warmup_steps)
