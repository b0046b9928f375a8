"""Learning-rate schedules as pure functions of the step, as defined in the QSR paper.

The paper's eta_max is `peak`, reached at the end of warm-up. Its eta_min is `final`, reached at the
end of the run.

Source: Gu, Lyu, Arora, Zhang, Huang, ICLR 2024 (arXiv 2310.14423).
"""

import math
from collections.abc import Callable
from functools import partial

from torchcomp.checks import check_at_least_0, check_choice, check_count, check_positive
from torchcomp.errors import SpecError

# From the number of steps taken so far to the learning rate of the next step.
LRFunction = Callable[[int], float]


def cosine(step: int, *, peak: float, final: float, total: int) -> float:
    """Half a cosine wave from `peak` at step 0 to `final` at step `total`."""
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * step / total))


def linear(step: int, *, peak: float, final: float, total: int) -> float:
    """A straight line from `peak` at step 0 to `final` at step `total`."""
    return final + (peak - final) * (1 - step / total)


def step_cosine(step: int, *, peak: float, final: float, total: int) -> float:
    """:func:`cosine` with log2 rounded to an integer: the learning rate is a power of two.

    The cosine must stay above 0.
    """
    # round() to an integer, not 2 ** floor(): the nearest power of two on a log scale.
    return 2.0 ** round(math.log2(cosine(step, peak=peak, final=final, total=total)))


DECAYS = {"cosine": cosine, "linear": linear, "step-cosine": step_cosine}


def warmed_up(step: int, *, after: LRFunction, peak: float, final: float, steps: int) -> float:
    """Linear warm-up from `final` to `peak` in `steps` steps, followed by `after`."""
    # `after` is called with the step of the run, not with the steps since the end of warm-up.
    return final + (peak - final) * step / steps if step < steps else after(step)


def decaying(
    decay: str, *, peak: float, total_steps: int, warmup_steps: int = 0, final: float = 1e-6
) -> LRFunction:
    """Return the learning rate as a function of the step, counted from 0.

    Args:
        decay: the decay after warm-up, a key of :data:`DECAYS`.
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
        raise SpecError(
            f"final must be at most peak, but final={final:g} is above peak={peak:g}", "final"
        )
    if decay == "step-cosine" and final == 0:
        raise SpecError(
            'final must be above 0 with decay="step-cosine", which takes its logarithm', "final"
        )
    # The decay takes the steps that warm-up leaves, and reaches `final` at step `total_steps`.
    length = total_steps - warmup_steps

    def decayed(step: int) -> float:
        return DECAYS[decay](step - warmup_steps, peak=peak, final=final, total=length)

    return partial(warmed_up, after=decayed, peak=peak, final=final, steps=warmup_steps)
