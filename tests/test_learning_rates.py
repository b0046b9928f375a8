"""Learning rates: the QSR paper's formulas at every step of its runs, in float64."""

import numpy as np
import pytest

from torchcomp.specs.errors import SpecError
from torchcomp.specs.learning_rates import DECAYS, decaying

FINAL = 1e-6

# Steps, warm-up steps and peak learning rates of three runs of the QSR paper (arXiv 2310.14423).
VIT = {"total": 93_600, "warmup": 10_000, "peak": 0.008}
VIT_LARGE_BATCH = {"total": 23_400, "warmup": 2_500, "peak": 0.016}
RESNET152 = {"total": 62_400, "warmup": 1_560, "peak": 0.8}


def by_hand(decay, *, total, warmup, peak):
    """All learning rates of a run, from step 0 to `total`: the formulas applied to a vector."""
    t = np.arange(total + 1, dtype=np.float64)
    done = (t - warmup) / (total - warmup)
    shape = 1 - done if decay == "linear" else (1 + np.cos(np.pi * done)) / 2
    rates = FINAL + (peak - FINAL) * shape
    if decay == "step-cosine":
        rates = np.exp2(np.rint(np.log2(rates)))
    rising = t < warmup
    rates[rising] = FINAL + (peak - FINAL) * t[rising] / warmup
    return rates


def decayed(decay, *, total, warmup, peak):
    return decaying(decay, peak=peak, final=FINAL, total_steps=total, warmup_steps=warmup)


@pytest.mark.parametrize("run", [VIT, VIT_LARGE_BATCH, RESNET152])
@pytest.mark.parametrize("decay", DECAYS)
def test_decay_of_the_papers_runs_at_every_step(decay, run):
    rate = decayed(decay, **run)
    rates = np.array([rate(t) for t in range(run["total"] + 1)])
    # Powers of two are exact. The others can differ in the last bits of NumPy's cosine.
    tolerance = 0 if decay == "step-cosine" else 1e-13
    np.testing.assert_allclose(rates, by_hand(decay, **run), rtol=0, atol=tolerance * run["peak"])
    assert rates[0] == FINAL
    assert rates[-1] == (2.0**-20 if decay == "step-cosine" else FINAL)


def test_step_cosine_falls_by_halves():
    rate = decayed("step-cosine", **VIT)
    rates = [rate(t) for t in range(VIT["warmup"], VIT["total"] + 1)]
    assert sorted(set(rates), reverse=True) == [2.0**power for power in range(-7, -21, -1)]
    assert rates == sorted(rates, reverse=True)
    # Below 2**-7.5 the exponent is rounded to -8 instead of -7.
    last = VIT["warmup"] + rates.count(2.0**-7) - 1
    cosine = decayed("cosine", **VIT)
    assert cosine(last) >= 2**-7.5 > cosine(last + 1)


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"decay": "cosinus"}, "decay", r'"cosine".*"linear".*"step-cosine".*cosinus'),
        ({"peak": 0.0}, "peak", r"0\.0"),
        ({"final": -1.0}, "final", r"-1\.0"),
        ({"final": 2.0}, "final", "final=2.*peak=1"),
        ({"decay": "step-cosine", "final": 0.0}, "final", "step-cosine"),
        ({"total_steps": 0}, "total_steps", "0"),
        ({"warmup_steps": 10}, "warmup_steps", "0.*9.*10"),
    ],
)
def test_bad_arguments_are_refused(changes, field, words):
    with pytest.raises(SpecError, match=words) as caught:
        decaying(**({"decay": "cosine", "peak": 1.0, "total_steps": 10} | changes))
    assert caught.value.field == field
