"""2Direction's step sizes: the estimates that theory needs, and the tuning that replaces them."""

import math

import pytest
import torch

from recipes.two_direction.methods.agd import AGD, ConstantMomentumAGD
from recipes.two_direction.methods.diana import DIANA
from recipes.two_direction.methods.ef14 import EF14
from recipes.two_direction.methods.ef21 import EF21
from recipes.two_direction.methods.ef21p import EF21P
from recipes.two_direction.methods.ef21p_diana import EF21PDIANA
from recipes.two_direction.smoothness import largest_eigenvalue, least_squares, logistic_regression
from recipes.two_direction.tuning import MethodRun, tune
from tests.two_direction.quadratics import quadratics
from torchcomp.compressors import RandK, TopK
from torchcomp.errors import SpecError
from torchcomp.two_direction import Simulated, TwoDirectionMethod

F = quadratics(condition=5.0)


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_least_squares():
    shards = list(normal(3, 30, 7).unbind())
    each = [torch.linalg.eigvalsh(a.t() @ a / 30) for a in shards]
    whole = torch.linalg.eigvalsh(sum(a.t() @ a for a in shards) / 90)
    ours = least_squares(shards, l2=0.25)
    assert ours.smoothness == pytest.approx(whole[-1].item() + 0.25, rel=1e-6)
    assert ours.lmax == pytest.approx(max(e[-1].item() for e in each) + 0.25, rel=1e-6)
    assert ours.mu == pytest.approx(whole[0].item() + 0.25, rel=1e-9)


@pytest.mark.parametrize("sparse", [False, True])
def test_logistic_regression_bounds_the_hessian(sparse):
    a = normal(1, 40, 5)
    shards = [shard.to_sparse() if sparse else shard for shard in a]
    ours = logistic_regression(shards, l2=0.1)

    def loss(x):
        scores = a[0] @ x.view(5, 3)
        return -torch.log_softmax(scores, 1)[:, 0].mean() + 0.05 * x.square().sum()

    hessian = torch.autograd.functional.hessian(loss, normal(15) / 10)
    spectrum = torch.linalg.eigvalsh(hessian)
    assert ours.mu - 1e-12 <= spectrum[0]
    assert spectrum[-1] <= ours.smoothness
    assert ours.smoothness == pytest.approx(0.5 * largest_eigenvalue([a[0]]) + 0.1)


def test_one_logits_hessian_reaches_its_bound_at_0():
    a = normal(1, 40, 5)[0]

    def loss(x):
        return torch.nn.functional.softplus(a @ x).mean()

    hessian = torch.autograd.functional.hessian(loss, torch.zeros(5, dtype=torch.float64))
    ours = logistic_regression([a], one_logit=True)
    assert torch.linalg.eigvalsh(hessian)[-1].item() == pytest.approx(ours.smoothness)


def test_crowded_eigenvalues_are_exact_where_they_can_be():
    crowd = torch.cat([torch.linspace(0.9999, 1, 30), torch.linspace(0, 0.5, 30)]).double()
    basis = torch.linalg.qr(normal(60, 60))[0]
    a = basis * (60 * crowd).sqrt() @ basis.t()
    assert largest_eigenvalue([a]) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    ("shard", "named"),
    [
        (normal(4, 3).numpy(), r"shards\[1\] .*torch\.Tensor.* ndarray"),
        (torch.ones(4, 3, dtype=torch.int64), r"shards\[1\] .*torch\.int64"),
        (normal(4), r"shards\[1\] .*\(4,\)"),
        (normal(0, 3), r"shards\[1\] .*\(0, 3\)"),
        (normal(4, 3) * torch.nan, r"shards\[1\] .*finite"),
        (normal(4, 3) * 1e200, r"squares.*torch.float64"),
        (torch.full((4, 3), torch.inf).to_sparse(), r"shards\[1\] .*finite"),
        (normal(4, 3).float(), r"^shards .*float32.*float64"),
        (normal(5, 3), r"^shards .*4.*5"),
    ],
)
@pytest.mark.parametrize("estimate", [least_squares, logistic_regression, largest_eigenvalue])
def test_shards_that_are_no_features_are_refused(estimate, shard, named):
    with pytest.raises(SpecError, match=named):
        estimate([normal(4, 3), shard])


def test_what_an_estimate_cannot_use_is_refused():
    with pytest.raises(SpecError, match=r"shards\[0\] .*to_dense\(\)"):
        least_squares([normal(4, 3).to_sparse()])
    with pytest.raises(SpecError, match=r"^shards .*none"):
        largest_eigenvalue([])


def test_unequal_shards_are_refused():
    unequal = [torch.ones(4, 2), torch.ones(3, 2)]
    for estimate in (least_squares, logistic_regression):
        with pytest.raises(SpecError, match=r"^shards .*3.*4"):
            estimate(unequal)
        with pytest.raises(SpecError, match=r"l2 .*-1\.0"):
            estimate(unequal[:1], l2=-1.0)


def on_data(kind, **arguments):
    def build(problem, estimate):
        return kind(*problem, **arguments, gamma=0.5 / estimate.smoothness)

    return build


RANDOM, LARGEST = RandK(k=2, unbiased=True), TopK(k=2)
ON_DATA = {
    "2Direction": lambda problem, e: TwoDirectionMethod(
        *problem, RANDOM, LARGEST, lbar=e.smoothness, mu=e.mu
    ),
    "AGD": lambda problem, e: AGD(*problem, lbar=e.smoothness, mu=e.mu),
    "EF21-P + DIANA": on_data(EF21PDIANA, up=RANDOM, down=LARGEST),
    "DIANA": on_data(DIANA, up=RANDOM),
    "EF21": on_data(EF21, up=LARGEST),
    "EF21-P": on_data(EF21P, down=LARGEST),
}


@pytest.mark.parametrize("name", ON_DATA)
@pytest.mark.parametrize("kind", ["ridge", "logistic"])
def test_converges_to_1e_10_on_data(kind, name):
    a, l2 = normal(4, 20, 6), 0.02
    targets = torch.sign(normal(4, 20))
    estimate = {"ridge": least_squares, "logistic": logistic_regression}[kind](list(a), l2)

    def gradients(x):
        scores = torch.einsum("nmf,f->nm", a, x)
        pull = scores - targets if kind == "ridge" else -targets * torch.sigmoid(-targets * scores)
        return torch.einsum("nmf,nm->nf", a, pull) / 20 + l2 * x

    x0 = torch.zeros(6, dtype=torch.float64)
    method = ON_DATA[name]((gradients, x0, Simulated(4)), estimate)
    for _ in range(200):
        method.step()
    slope = gradients(method.solution).mean(0)
    # The gap of a strongly convex function is at most |slope|^2 / (2 mu).
    assert slope.square().sum() / (2 * estimate.mu) < 1e-10


# --- Tuning ---------------------------------------------------------------------------------------


def exhaustive(build, target, powers):
    """Run every step size to its end."""
    costs = {}
    for i in powers:
        run = MethodRun(build(2.0**i), F.gap, target)
        run.advance(6_000)
        if run.reached:
            costs[i] = run.cost
    return min(costs, key=costs.__getitem__), min(costs.values())


BUILDS = {
    "AGD": lambda step: AGD(F.gradients, F.x0, Simulated(F.n), lbar=1 / step, mu=F.mu),
    "momentum": lambda step: ConstantMomentumAGD(
        F.gradients, F.x0, Simulated(F.n), gamma=step, mu=F.mu
    ),
    "EF21-P + DIANA": lambda step: EF21PDIANA(
        F.gradients, F.x0, Simulated(F.n), RandK(k=4, unbiased=True), TopK(k=4), gamma=step
    ),
}


@pytest.mark.parametrize("name", BUILDS)
def test_tuning_finds_what_trying_everything_finds(name):
    powers = range(-3, 3)
    expected = exhaustive(BUILDS[name], 1e-6, powers)
    tuned = tune(BUILDS[name], F.gap, target=1e-6, budget=6_000, powers=powers)
    assert (tuned.power, tuned.run.cost) == expected
    assert sorted([*tuned.abandoned, tuned.power]) == list(powers)
    # No run went much further than the winner.
    assert max(tuned.abandoned.values()) <= 1.5 * tuned.run.cost + 100


def test_tuning_outlives_a_leader_that_diverges():
    """Large steps are ahead of all others at first and then explode."""
    one = quadratics(n=1, d=30, condition=30.0)
    up, down = RandK(k=1, unbiased=True), TopK(k=30)

    def build(step):
        server, x0 = Simulated(1), one.x0
        return TwoDirectionMethod(one.gradients, x0, server, up, down, lbar=1 / step, mu=one.mu / 4)

    target = 1e-2 * one.gap(one.x0)
    tuned = tune(build, one.gap, target=target, budget=10**6, powers=[-6, 1])
    assert tuned.power == -6
    assert tuned.run.reached


def test_tuning_outlives_a_leader_that_stalls():
    """EF14's large steps are ahead at first and then never reach the target."""
    two = quadratics(n=2, d=4, condition=3.0)

    def build(step):
        return EF14(two.gradients, two.x0, Simulated(2), TopK(k=1), gamma=step)

    tuned = tune(build, two.gap, target=1e-4, budget=4000, powers=[-6, -3])
    assert (tuned.power, tuned.run.reached) == (-6, True)
    assert tuned.abandoned[-3] >= 4000


def test_tuning_takes_the_lowest_if_no_run_reaches_the_target():
    tuned = tune(BUILDS["AGD"], F.gap, target=0.0, budget=1000, powers=[-3, -1])
    assert tuned.power == -1
    assert not tuned.run.reached


def test_a_run_ends_where_the_function_does():
    def broken(x):
        return F.gradients(x) * (torch.nan if x.norm() > 1 else 1)

    run = MethodRun(AGD(broken, F.x0, Simulated(F.n), lbar=0.2, mu=F.mu), F.gap, 0.0)
    run.advance(10_000)
    assert run.broken
    assert run.curve[-1].value == math.inf


def test_tuning_without_candidates_or_survivors_is_refused():
    with pytest.raises(SpecError, match=r"^powers "):
        tune(BUILDS["AGD"], F.gap, target=0.0, budget=10, powers=[])
    with pytest.raises(SpecError, match=r"19, 20"):
        tune(BUILDS["EF21-P + DIANA"], F.gap, target=0.0, budget=10**6, powers=[19, 20])
