"""PowerSGD, EF21 and DGC with DDP: several buckets over gloo, bucket rebuild, resume."""

from typing import Any

import pytest
import torch
from torch import Tensor

import torchcomp
from tests.aggregators.runs import Named, assert_equal, assert_near, first_q
from tests.support.cases import some
from tests.support.models import (
    gradients,
    kept,
    local_gradients,
    loss_of,
    mlp,
    rebuilt_buckets,
    rows,
    seeded,
    weights,
    wrap,
)
from tests.support.outcomes import raised_by, reloaded
from tests.support.ranks import on_processes, on_threads
from torchcomp import NonFiniteError
from torchcomp.reference import History, dgc, ef21, powersgd, top_share

SEED = 3
STEPS = 30
RESUMED = 10
POWERSGD = "powersgd(rank=1)"
EF21 = 'ef21(topk(0.1, scope="tensor"))'
DGC = 'dgc(topk(0.1, scope="tensor"), momentum=0.8)'
SLOTS = {POWERSGD: "error", EF21: "estimate", DGC: "error"}


def means_of(spec: str, dense: History) -> tuple[list[Named], list[Named]]:
    """Return the means that the paper's method applies, and the final state of each rank."""
    if spec == POWERSGD:
        return powersgd(dense, 1, first_q)
    if spec == EF21:
        return ef21(dense, top_share(0.1))
    means, residuals, _ = dgc(dense, top_share(0.1), 0.8)
    return means, residuals


class Script:
    """One rank's DDP script."""

    def __init__(self, spec: str, seed: int = SEED, module_seed: int = 0) -> None:
        self.model = wrap(seeded(mlp(), module_seed))
        self.handle = torchcomp.register(self.model, spec, seed=seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02)

    def train(self, steps: range, factor: float = 1.0) -> tuple[list[Named], list[Named]]:
        """Return this rank's own gradients, and those that DDP passes to the optimizer."""
        own, applied = [], []
        for step in steps:
            batch = rows(step) * factor
            own.append(local_gradients(self.model, (batch,)))
            self.model.zero_grad()
            loss_of(self.model(batch)).backward()
            applied.append(gradients(self.model))
            self.optimizer.step()
        return own, applied

    def resumed(self, spec: str) -> "Script":
        """Return another script that resumes from the current state."""
        other = Script(spec, SEED + 1, 1)
        other.model.module.load_state_dict(self.model.module.state_dict())
        other.handle.load_state_dict(reloaded(self.handle.state_dict()))
        return other


def trained(spec: str) -> tuple[list[Named], list[Named], Named]:
    script = Script(spec)
    own, applied = script.train(range(STEPS))
    assert rebuilt_buckets(script.model) > 2
    state = script.handle.state_dict()
    script.handle.close()
    return own, applied, kept(state, SLOTS[spec])


def check(spec: str, outcomes: list[tuple[list[Named], list[Named], Named]]) -> None:
    own, applied, residuals = zip(*outcomes, strict=True)
    means, expected = means_of(spec, [list(step) for step in zip(*own, strict=True)])
    for rank in range(len(own)):
        for actual, mean in zip(applied[rank], means, strict=True):
            assert_near(actual, mean, 1e-9)
        assert_near(residuals[rank], expected[rank], 1e-9)


@pytest.mark.parametrize("spec", SLOTS)
def test_equals_the_paper_through_the_bucket_rebuild(spec: str) -> None:
    check(spec, on_threads(3, trained, spec))


def over_gloo(spec: str) -> tuple[tuple[list[Named], list[Named], Named], Tensor]:
    """Train and resume, with a failed step and steps with zero gradients after the resume."""
    outcome = trained(spec)
    script = Script(spec)
    script.train(range(4))
    other = script.resumed(spec)
    for each in (script, other):
        before = each.handle.state_dict()
        spoilt = rows(4) * (float("inf") if torch.distributed.get_rank() == 1 else 1.0)
        error = raised_by(lambda each=each, x=spoilt: loss_of(each.model(x)).backward())
        assert isinstance(error, NonFiniteError), repr(error)
        after = each.handle.state_dict()
        for slot in before["slots"]:
            assert_equal(kept(after, slot), kept(before, slot))
        each.train(range(5, 7), factor=0.0)
        each.train(range(7, 7 + RESUMED))
    assert torch.equal(weights(script.model.module), weights(other.model.module))
    for each in (script, other):
        each.handle.close()
    return outcome, weights(script.model.module)


@pytest.mark.parametrize("spec", some(SLOTS, of=3))
def test_over_gloo_with_several_buckets(spec: str) -> None:
    """Several buckets on gloo, a resume and an infinity: PyTorch's PowerSGD hook fails here."""
    outcomes, final = zip(*on_processes(2, over_gloo, spec), strict=True)
    check(spec, list(outcomes))
    assert torch.equal(final[0], final[1])
    assert final[0].isfinite().all()


@pytest.mark.parametrize("spec", SLOTS)
def test_counted_bytes_are_those_of_explain(spec: str) -> None:
    def body() -> tuple[int, int, int]:
        script = Script(spec)
        script.train(range(4))
        stats = script.handle.stats
        plan = torchcomp.explain(spec, model=script.model, world_size=3)
        script.handle.close()
        return stats.bytes_sent, plan.bytes_sent, plan.dense_bytes_sent

    for counted, planned, dense in on_threads(3, body):
        assert counted == pytest.approx(planned, abs=8)
        assert counted < dense


def test_dgc_applies_the_mean_gradient_in_its_first_step_if_everything_is_sent() -> None:
    """In the first step, the velocity is the gradient, as in SGD with momentum."""

    def body() -> Any:
        script = Script("dgc(topk(1.0), momentum=0.9)")
        own, applied = script.train(range(1))
        script.handle.close()
        return own[0], applied[0]

    own, applied = zip(*on_threads(2, body), strict=True)
    assert_near(applied[0], {n: (own[0][n] + own[1][n]) / 2 for n in own[0]}, 1e-12)
