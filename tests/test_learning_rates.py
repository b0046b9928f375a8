"""Learning rates: the sheet's formulas at every step of the published runs, in float64."""

import numpy as np
import pytest

import torchcomp
from torchcomp.errors import SpecError
from torchcomp.learning_rates import DECAYS, decaying

FINAL = 1e-6

# T, W and peak rates of "A Quadratic Synchronization Rule for Distributed Deep Learning".
VIT = {"total": 93_600, "warmup": 10_000, "peak": 0.008}
VIT_LARGE_BATCH = {"total": 23_400, "warmup": 2_500, "peak": 0.016}
RESNET152 = {"total": 62_400, "warmup": 1_560, "peak": 0.8}


def by_hand(decay, *, total, warmup, peak):
    """All rates of a run, from step 0 to step `total`: the sheet's formulas over a whole vector."""
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
    # A power of two is exact; the others differ by the last bits of NumPy's cosine.
    tolerance = 0 if decay == "step-cosine" else 1e-13
    np.testing.assert_allclose(rates, by_hand(decay, **run), rtol=0, atol=tolerance * run["peak"])
    assert rates[0] == FINAL
    assert rates[-1] == (2.0**-20 if decay == "step-cosine" else FINAL)


def test_step_cosine_falls_by_halves():
    rate = decayed("step-cosine", **VIT)
    rates = [rate(t) for t in range(VIT["warmup"], VIT["total"] + 1)]
    assert sorted(set(rates), reverse=True) == [2.0**power for power in range(-7, -21, -1)]
    assert rates == sorted(rates, reverse=True)
    # Half a power of two below the peak, 2**-7.5, is where 2**-7 ends.
    last = VIT["warmup"] + rates.count(2.0**-7) - 1
    cosine = decayed("cosine", **VIT)
    assert cosine(last) >= 2**-7.5 > cosine(last + 1)


@pytest.mark.parametrize(
    ("decay", "syncs"), [("cosine", 9_711), ("linear", 8_741), ("step-cosine", 9_880)]
)
def test_synchronisations_of_the_papers_vit(decay, syncs):
    steps = torchcomp.sync_steps(
        "qsr(alpha=0.0175, h_base=4)",
        lr=decayed(decay, **VIT),
        total_steps=VIT["total"],
        warmup_steps=VIT["warmup"],
    )
    assert len(steps) == syncs


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"decay": "cosinus"}, 'decay must be one of "cosine", "linear", "step-cosine"'),
        ({"peak": 0.0}, "peak must be a finite number above 0"),
        ({"final": -1.0}, "final must be a finite number of at least 0"),
        ({"final": 2.0}, "final = 2 is above the peak, 1"),
        ({"decay": "step-cosine", "final": 0.0}, "takes the rate's logarithm"),
        ({"total_steps": 0}, "total_steps must be a whole number"),
        ({"warmup_steps": 10}, "warmup_steps must be a whole number from 0 to 9"),
    ],
)
def test_bad_arguments_are_refused(changes, told):
    with pytest.raises(SpecError, match=told):
        decaying(**({"decay": "cosine", "peak": 1.0, "total_steps": 10} | changes))
