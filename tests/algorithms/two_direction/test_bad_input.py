"""Every argument that cannot work is refused before anything starts, with the reason."""

import math

import pytest
import torch

from tests.algorithms.two_direction.quadratics import quadratics
from torchcomp.algorithms import (
    DIANA,
    EF14,
    EF21,
    EF21P,
    EF21PDIANA,
    ConstantMomentumAGD,
    Simulated,
    TwoDirectionMethod,
    diana,
    ef21p_diana,
    parameters,
)
from torchcomp.compressors import Cast, RandK, TopK
from torchcomp.errors import SpecError

F = quadratics()
UNBIASED, CONTRACTIVE = RandK(k=3, unbiased=True), TopK(k=3)


def two_direction(**changes):
    options = {"up": UNBIASED, "down": CONTRACTIVE, "lbar": 4.0, "mu": 0.1, **changes}
    return TwoDirectionMethod(F.gradients, F.x0, Simulated(F.n), **options)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"mu": -0.1}, "mu must be at least 0 and at most lbar = 4"),
        ({"mu": 4.1}, "no function is more convex than smooth"),
        ({"mu": math.nan}, "mu must be"),
        ({"lbar": 0.0}, "lbar must be a finite number above 0"),
        ({"lbar": math.inf}, "lbar must be a finite number above 0"),
        ({"p": 0.0}, "p must be a number above 0 and at most 1"),
        ({"p": 1.5}, "p must be a number above 0 and at most 1"),
        ({"tau": 0.0}, "tau must be a number above 0 and at most 1"),
        ({"tau": "much"}, "tau must be a number above 0 and at most 1"),
        ({"gamma0": 0.0}, "gamma0 must be a finite number above 0"),
        ({"gamma0": 1e-300}, "gamma0 must lie from 1e-100 to 1e100"),
        ({"alpha": 0.5}, r"alpha = 0.5 contradicts 'topk\(k=3\)', which guarantees 0.25"),
        (
            {"omega": 1.0},
            r"omega = 1 contradicts 'randk\(k=3, unbiased=true\)', which guarantees 3",
        ),
        ({"up": TopK(k=3)}, "up: .* not unbiased"),
        ({"up": Cast("bf16")}, "up: .* not unbiased"),
        ({"down": UNBIASED}, "down: .* not contractive"),
        ({"down": TopK(k=3, scope="tensor")}, "works on each parameter by itself"),
        ({"up": "randk"}, "up must be a compressor"),
        ({"up": RandK(k=13, unbiased=True)}, "keeps 13 entries, and there are only 12 coord"),
        ({"down": TopK(k=13)}, "keeps 13 entries, and there are only 12 coordinates"),
        ({"alpha": 0.0}, "alpha must be a number above 0 and at most 1"),
        ({"omega": math.inf}, "omega must be a finite number of at least 0"),
    ],
)
def test_2direction(changes, told):
    with pytest.raises(SpecError, match=f"(?i){told}"):
        two_direction(**changes)


def test_worse_constants_than_declared_are_taken():
    assert two_direction(alpha=0.1, omega=9.0).constants.beta == pytest.approx(0.1)


@pytest.mark.parametrize(
    "build",
    [
        lambda server: EF21(F.gradients, F.x0, server, UNBIASED, gamma=0.1),
        lambda server: EF14(F.gradients, F.x0, server, UNBIASED, gamma=0.1),
        lambda server: EF21P(F.gradients, F.x0, server, UNBIASED, gamma=0.1),
        lambda server: EF21PDIANA(F.gradients, F.x0, server, UNBIASED, UNBIASED, gamma=0.1),
    ],
)
def test_contractive_where_it_must_be(build):
    with pytest.raises(SpecError, match="not contractive"):
        build(Simulated(F.n))


def test_unbiased_where_it_must_be_and_steps_above_zero():
    with pytest.raises(SpecError, match="not unbiased"):
        DIANA(F.gradients, F.x0, Simulated(F.n), CONTRACTIVE, gamma=0.1)
    with pytest.raises(SpecError, match="gamma must be a finite number above 0"):
        DIANA(F.gradients, F.x0, Simulated(F.n), UNBIASED, gamma=-0.1)
    with pytest.raises(SpecError, match="mu must be a finite number above 0"):
        ConstantMomentumAGD(F.gradients, F.x0, Simulated(F.n), gamma=0.1, mu=0.0)
    with pytest.raises(SpecError, match="at most 1/gamma = 10"):
        ConstantMomentumAGD(F.gradients, F.x0, Simulated(F.n), gamma=0.1, mu=11.0)


@pytest.mark.parametrize("k", [0, -1, 2.5])
def test_k_out_of_range(k):
    with pytest.raises(SpecError, match="k must be a whole number of at least 1"):
        RandK(k=k, unbiased=True)


@pytest.mark.parametrize("n", [0, -1, 2.0, True])
def test_workers_out_of_range(n):
    with pytest.raises(SpecError, match="n must be a whole number of at least 1"):
        Simulated(n)


@pytest.mark.parametrize(
    ("x0", "told"),
    [
        (torch.zeros(2, 3), "must be a vector"),
        (torch.zeros(3, dtype=torch.int64), "floating-point"),
        (torch.zeros(0), "must be a vector"),
        ([0.0, 1.0], "must be a vector"),
        (torch.tensor([0.0, math.inf]), "NaN or an infinity"),
    ],
)
def test_starts_that_cannot_be(x0, told):
    with pytest.raises(SpecError, match=told):
        TwoDirectionMethod(F.gradients, x0, Simulated(4), UNBIASED, CONTRACTIVE, lbar=1.0, mu=0.0)


@pytest.mark.parametrize(
    "gradients",
    [
        lambda x: None,
        lambda x: x,
        lambda x: torch.zeros(3, 12).double(),
        lambda x: F.a[:, 0].float(),
    ],
)
def test_gradients_of_another_shape(gradients):
    with pytest.raises(SpecError, match=r"tensor of shape \(4, 12\), one row for each worker"):
        TwoDirectionMethod(gradients, F.x0, Simulated(4), UNBIASED, CONTRACTIVE, lbar=1.0, mu=0.0)


def test_parameters():
    with pytest.raises(SpecError, match="r must be a number from 0 to 1"):
        parameters.priced_probabilities(9.0, d=650, k_up=65, k_down=65, r=1.1)
    with pytest.raises(SpecError, match="k_down must be a whole number from 1 to 650"):
        parameters.priced_probabilities(9.0, d=650, k_up=65, k_down=0, r=0.5)
    with pytest.raises(SpecError, match="tau must be a number above 0"):
        parameters.lbar(1.0, 1.0, n=4, alpha=0.1, omega=9.0, p=0.1, tau=0.0)
    with pytest.raises(SpecError, match="mu must be at least 0 and at most L = 2"):
        ef21p_diana.step_size(2.0, 3.0, 2.5, alpha=0.1, omega=9.0, n=4)
    with pytest.raises(SpecError, match="omega must be a finite number of at least 0"):
        diana.step_size(2.0, -1.0, 4)
