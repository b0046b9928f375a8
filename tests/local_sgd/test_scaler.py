"""A GradScaler can skip steps on one rank, and sync.backward never does: step counts stay equal."""

from functools import partial

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.local_sgd.script import Script, batch, loss_of, mlp, sgd, synchronised_steps
from tests.support.models import seeded
from tests.support.outcomes import assert_refused, same
from tests.support.ranks import on_threads

TOTAL = 8
skips = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


def trained(passed, used, overflow=None):
    """Train with a scaler, which is passed to LocalSGD or not."""
    script = Script(total_steps=TOTAL, scaler=passed)
    script.scaler, untouched = used, script.weights()
    try:
        return [
            script.step(step, float("inf") if (script.rank, step) == overflow else 1.0)
            for step in range(TOTAL)
        ]
    except torchcomp.SpecError:
        assert torch.equal(script.weights(), untouched)
        raise


@skips
@pytest.mark.parametrize("passed", [False, True])
def test_a_scaler_that_was_not_passed_raises_on_every_rank_before_training(passed):
    scalers = [torch.amp.GradScaler("cpu") for _ in range(2)]
    body = partial(trained, scalers[0] if passed else None, scalers[1], (1, 0))
    assert_refused(2, body, torchcomp.SpecError, "scaler=scaler", field="scaler")


def test_a_disabled_scaler_may_be_passed_or_not():
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for passed in (scaler, None):
        assert synchronised_steps(on_threads(2, trained, passed, scaler)) == [3, 6, 8]


def test_steps_of_another_optimizer_and_steps_that_the_scaler_refuses_do_not_count():
    def body():
        script, weights = Script("every(2)", total_steps=6, scaler=torch.amp.GradScaler("cpu")), []
        other = mlp()
        other_optimizer = sgd(other.parameters())
        for step in range(5):
            script.optimizer.zero_grad()
            script.backward(step)
            script.scaler.scale(other(torch.ones(1, 6).double()).sum()).backward()
            script.scaler.step(other_optimizer)
            script.scaler.step(script.optimizer)
            with pytest.raises(RuntimeError, match=r"step\(\)"):
                script.scaler.step(script.optimizer)
            script.scaler.update()
            weights.append(script.weights())
        return weights

    assert synchronised_steps(on_threads(2, body)) == [2, 4]


FITS, LARGE = 1024.0, 8192.0
"""A scale at which gradients are finite, and one at which they overflow."""


class Remedied(Script):
    """A script that calls ``sync.backward``."""

    def __init__(self, enabled=True, **options):
        scaler = torch.amp.GradScaler("cpu", init_scale=FITS, enabled=enabled)
        super().__init__(total_steps=TOTAL, scaler=scaler, **options)
        self.computed = 0

    def loss(self, step):
        self.computed += 1
        overflow = float("inf") if FITS < self.scaler.get_scale() <= LARGE else 1.0
        self.last = loss_of(self.model, *batch(self.rank, step)) * overflow
        return self.last

    def backward(self, step, scale=1.0):
        assert self.sync.backward(lambda: self.loss(step)) is self.last

    def optimizer_step(self):
        self.optimizer.step()

    def gradients(self):
        return [p.grad.clone() for p in self.model.parameters()]


def accumulated(remedy, overflows=()):
    """The weights after each step of three micro-batches, the computations, and the final scale.

    The (rank, step, micro-batch) triples in `overflows` start at the scale LARGE.
    """
    script, weights = Remedied() if remedy else Script(total_steps=TOTAL), []
    for step in range(TOTAL):
        script.optimizer.zero_grad()
        for micro in range(3):
            if (script.rank, step, micro) in overflows:
                script.scaler.update(LARGE)
            script.backward(10 * step + micro)
        script.optimizer_step()
        weights.append(script.weights())
    return weights, remedy and (script.computed, script.scaler.get_scale())


def test_an_overflow_on_one_rank_changes_no_weight_and_no_clock():
    overflows = {(1, 4, 0), (2, 5, 1), (2, 7, 2)}
    runs, counts = zip(*on_threads(3, accumulated, True, overflows), strict=True)
    plain, _ = zip(*on_threads(3, accumulated, False), strict=True)
    assert synchronised_steps(runs) == [3, 6, 8]
    assert same(runs, plain)
    # From LARGE to FITS, the scale is halved three times. No other micro-batch is computed again.
    assert counts == tuple((3 * TOTAL + 3 * again, FITS) for again in range(3))


@pytest.mark.parametrize(("view", "enabled"), [(True, True), (False, True), (True, False)])
def test_micro_batches_that_fail_leave_the_gradients_of_the_others(view, enabled):
    def body():
        script = Remedied(enabled=enabled, gradient_as_bucket_view=view)
        plain = DistributedDataParallel(seeded(mlp()))
        for step in range(2):
            script.backward(step)
            with plain.no_sync():
                loss_of(plain, *batch(script.rank, step)).backward()
        before = script.gradients()
        assert same(before, [p.grad for p in plain.parameters()])
        tries = 5 if enabled else 1
        message = rf"\b{tries} tries.*\b{FITS / 2**tries if enabled else 1:g}\b"
        with pytest.raises(torchcomp.NonFiniteError, match=message):
            script.sync.backward(lambda: script.loss(2) * float("nan"), tries=5)
        assert script.computed == 2 + tries
        assert same(before, script.gradients())
        with pytest.raises(ZeroDivisionError):
            script.sync.backward(lambda: 1 / 0)
        return same(before, script.gradients())

    assert on_threads(2, body) == [True, True]
