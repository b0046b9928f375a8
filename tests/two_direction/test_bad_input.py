"""Invalid arguments raise an error with the argument's name and value before a run starts."""

import math

import pytest
import torch

from recipes.two_direction.methods import diana, ef21p_diana
from recipes.two_direction.methods.agd import ConstantMomentumAGD
from recipes.two_direction.methods.diana import DIANA
from recipes.two_direction.methods.ef14 import EF14
from recipes.two_direction.methods.ef21 import EF21
from recipes.two_direction.methods.ef21p import EF21P
from recipes.two_direction.methods.ef21p_diana import EF21PDIANA
from tests.two_direction.quadratics import quadratics
from torchcomp.compressors import Cast, RandK, TopK
from torchcomp.errors import SpecError
from torchcomp.two_direction import Simulated, TwoDirectionMethod
from torchcomp.two_direction import theory as parameters

F = quadratics()
UNBIASED, CONTRACTIVE = RandK(k=3, unbiased=True), TopK(k=3)


def two_direction(**changes):
    options = {"up": UNBIASED, "down": CONTRACTIVE, "lbar": 4.0, "mu": 0.1, **changes}
    return TwoDirectionMethod(F.gradients, F.x0, Simulated(F.n), **options)


@pytest.mark.parametrize(
    ("changes", "field", "parts"),
    [
        ({"mu": -0.1}, "mu", r"lbar = 4\b.*-0\.1"),
        ({"mu": 4.1}, "mu", r"lbar = 4\b.*4\.1"),
        ({"mu": math.nan}, "mu", r"lbar = 4\b.*nan"),
        ({"lbar": 0.0}, "lbar", r"0\.0"),
        ({"lbar": math.inf}, "lbar", "inf"),
        ({"p": 0.0}, "p", r"0\.0"),
        ({"p": 1.5}, "p", r"1\.5"),
        ({"tau": 0.0}, "tau", r"0\.0"),
        ({"tau": "much"}, "tau", "much"),
        ({"gamma0": 0.0}, "gamma0", r"0\.0"),
        ({"gamma0": 1e-300}, "gamma0", r"1e-100.*1e100.*1e-300"),
        ({"alpha": 0.5}, "alpha", r"0\.5\b.*topk\(k=3\).*0\.25"),
        ({"omega": 1.0}, "omega", r"1\b.*randk\(k=3, unbiased=true\).*\b3\b"),
        ({"up": TopK(k=3)}, "up", r"topk\(k=3\).*unbiased.*omega"),
        ({"up": Cast("bf16")}, "up", r"cast.*unbiased.*omega"),
        ({"down": UNBIASED}, "down", r"randk\(k=3.*contractive.*alpha"),
        ({"down": TopK(k=3, scope="tensor")}, "down", 'scope="tensor"'),
        ({"up": "randk"}, "up", "'randk'"),
        ({"up": RandK(k=13, unbiased=True)}, "up", r"\b13\b.*\b12\b"),
        ({"down": TopK(k=13)}, "down", r"\b13\b.*\b12\b"),
        ({"alpha": 0.0}, "alpha", r"0\.0"),
        ({"omega": math.inf}, "omega", "inf"),
    ],
)
def test_2direction(changes, field, parts):
    with pytest.raises(SpecError, match=f"(?i)^{field}\\b.*{parts}") as caught:
        two_direction(**changes)
    assert caught.value.field == field


def test_constants_can_be_worse_than_the_compressors_declare():
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
def test_contractive_compressors_are_required(build):
    with pytest.raises(SpecError, match=r"randk\(k=3.*contractive.*alpha"):
        build(Simulated(F.n))


def test_an_unbiased_compressor_and_positive_step_sizes_are_required():
    with pytest.raises(SpecError, match=r"up\b.*topk\(k=3\).*unbiased.*omega"):
        DIANA(F.gradients, F.x0, Simulated(F.n), CONTRACTIVE, gamma=0.1)
    with pytest.raises(SpecError, match=r"gamma\b.*-0\.1"):
        DIANA(F.gradients, F.x0, Simulated(F.n), UNBIASED, gamma=-0.1)
    with pytest.raises(SpecError, match=r"mu\b.*0\.0"):
        ConstantMomentumAGD(F.gradients, F.x0, Simulated(F.n), gamma=0.1, mu=0.0)
    with pytest.raises(SpecError, match=r"mu\b.*1/gamma = 10\b.*11"):
        ConstantMomentumAGD(F.gradients, F.x0, Simulated(F.n), gamma=0.1, mu=11.0)


@pytest.mark.parametrize("k", [0, -1, 2.5])
def test_k_out_of_range(k):
    with pytest.raises(SpecError, match=rf"\bk\b.*\b1\b.*{k}"):
        RandK(k=k, unbiased=True)


@pytest.mark.parametrize("n", [0, -1, 2.0, True])
def test_workers_out_of_range(n):
    with pytest.raises(SpecError, match=rf"\bn\b.*\b1\b.*{n}"):
        Simulated(n)


@pytest.mark.parametrize(
    ("x0", "parts"),
    [
        (torch.zeros(2, 3), r"\(2, 3\)"),
        (torch.zeros(3, dtype=torch.int64), r"torch\.int64"),
        (torch.zeros(0), r"\(0,\)"),
        ([0.0, 1.0], r"\[0\.0, 1\.0\]"),
        (torch.tensor([0.0, math.inf]), "NaN"),
    ],
)
def test_invalid_starting_points(x0, parts):
    with pytest.raises(SpecError, match=rf"x0\b.*{parts}") as caught:
        TwoDirectionMethod(F.gradients, x0, Simulated(4), UNBIASED, CONTRACTIVE, lbar=1.0, mu=0.0)
    assert caught.value.field == "x0"


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
    with pytest.raises(SpecError, match=r"gradients\(point\).*torch\.float64.*\(4, 12\)"):
        TwoDirectionMethod(gradients, F.x0, Simulated(4), UNBIASED, CONTRACTIVE, lbar=1.0, mu=0.0)


def test_parameters():
    with pytest.raises(SpecError, match=r"^r\b.*1\.1"):
        parameters.priced_probabilities(9.0, d=650, k_up=65, k_down=65, r=1.1)
    with pytest.raises(SpecError, match=r"k_down\b.*1.*650.*\b0\b"):
        parameters.priced_probabilities(9.0, d=650, k_up=65, k_down=0, r=0.5)
    with pytest.raises(SpecError, match=r"tau\b.*0\.0"):
        parameters.lbar(1.0, 1.0, n=4, alpha=0.1, omega=9.0, p=0.1, tau=0.0)
    with pytest.raises(SpecError, match=r"mu\b.*\bL = 2\b.*2\.5"):
        ef21p_diana.step_size(2.0, 3.0, 2.5, alpha=0.1, omega=9.0, n=4)
    with pytest.raises(SpecError, match=r"omega\b.*-1\.0"):
        diana.step_size(2.0, -1.0, 4)
