"""Learning rates as pure functions of the step, as the QSR paper states them.

eta_max is the peak, at the end of warm-up, and eta_min the final rate, at the end of the run.

Source: Gu, Lyu, Arora, Zhang, Huang, ICLR 2024 (arXiv 2310.14423).
"""

import math
from collections.abc import Callable
from functools import partial

from torchcomp.checks import check_at_least_0, check_choice, check_count, check_positive
from torchcomp.errors import SpecError

LRFunction = Callable[[int], float]


def cosine(step: int, *, peak: float, final: float, total: int) -> float:
    """Half a cosine, from `peak` at step 0 to `final` at step `total`."""
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * step / total))


def linear(step: int, *, peak: float, final: float, total: int) -> float:
    """A line from `peak` at step 0 to `final` at step `total`."""
    return final + (peak - final) * (1 - step / total)


def step_cosine(step: int, *, peak: float, final: float, total: int) -> float:
    """The cosine's rate, which must stay above 0, with its exponent rounded to a power of two."""
    return 2.0 ** round(math.log2(cosine(step, peak=peak, final=final, total=total)))


DECAYS = {"cosine": cosine, "linear": linear, "step-cosine": step_cosine}


def warmed_up(step: int, *, rate: LRFunction, peak: float, final: float, steps: int) -> float:
    """A line from `final` to `peak` in `steps` steps, and then `rate`."""
    return final + (peak - final) * step / steps if step < steps else rate(step)


def decaying(
    decay: str, *, peak: float, total_steps: int, warmup_steps: int = 0, final: float = 1e-6
) -> LRFunction:
    """The rate of every step of a run, counted from 0: warm-up, then one of :data:`DECAYS`.

    Linear warm-up from `final` to `peak` is part of `total_steps`, and shorter; the decay ends at
    `final`. An argument out of its range is a SpecError.
    """
    check_choice("decay", decay, DECAYS)
    check_positive("peak", peak)
    check_at_least_0("final", final)
    check_count("total_steps", total_steps)
    check_count("warmup_steps", warmup_steps, 0, total_steps - 1)
    if final > peak:
        raise SpecError(f"final = {final:g} is above the peak, {peak:g}", "final")
    if decay == "step-cosine" and final == 0:
        raise SpecError("step-cosine takes the rate's logarithm: final must be above 0", "final")
    length = total_steps - warmup_steps

    def decayed(step: int) -> float:
        return DECAYS[decay](step - warmup_steps, peak=peak, final=final, total=length)

    return partial(warmed_up, rate=decayed, peak=peak, final=final, steps=warmup_steps)
