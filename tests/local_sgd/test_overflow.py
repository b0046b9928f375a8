"""sync.backward computes a micro-batch again if it overflows, and never skips a step."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.local_sgd.script import Script, batch, loss_of, mlp, synchronised_steps
from tests.support.models import seeded
from tests.support.outcomes import assert_refused, same
from tests.support.ranks import on_threads

TOTAL = 8
FITS, LARGE = 1024.0, 8192.0
"""A scale at which gradients are finite, and one at which they overflow."""


class Remedied(Script):
    """A script that calls ``sync.backward``."""

    def __init__(self, scale=FITS, growth=2000, enabled=True, **options):
        options["scaler"] = torch.amp.GradScaler(
            "cpu", init_scale=scale, growth_interval=growth, enabled=enabled
        )
        super().__init__(total_steps=TOTAL, **options)
        self.computed = 0

    def loss(self, step):
        self.computed += 1
        overflow = float("inf") if FITS < self.scaler.get_scale() <= LARGE else 1.0
        return loss_of(self.model, *batch(self.rank, step)) * overflow

    def backward(self, step, scale=1.0):
        return self.sync.backward(lambda: self.loss(step) * scale)

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


def test_float16_gradients_that_overflow_are_computed_at_a_smaller_scale():
    def body():
        script = Remedied(scale=2.0**30, build=lambda: mlp().float())
        inputs, targets = batch(script.rank, 0)

        def compute():
            script.computed += 1
            with torch.autocast("cpu", dtype=torch.float16):
                outputs = script.model(inputs.float())
            return (outputs.float() - targets.float()).square().mean()

        script.sync.backward(compute)
        finite = all(gradient.isfinite().all() for gradient in script.gradients())
        return script.scaler.get_scale(), script.computed, finite

    for scale, computed, finite in on_threads(2, body):
        assert finite
        assert computed > 1
        assert scale == 2.0 ** (31 - computed)


def test_it_returns_the_unscaled_loss_and_lets_the_scale_grow():
    def body():
        script = Remedied(growth=2)
        loss = script.backward(0)
        wanted = script.loss(0)
        script.backward(0)
        return loss.item() == wanted.item(), script.scaler.get_scale()

    assert on_threads(2, body) == [(True, 2 * FITS)] * 2


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
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


@pytest.mark.parametrize("tries", [0, -1, 1.5, None, True])
def test_an_invalid_number_of_tries(tries):
    def body():
        script = Remedied()
        script.sync.backward(lambda: script.loss(0), tries=tries)

    assert_refused(2, body, torchcomp.SpecError, repr(tries), field="tries")


def test_it_needs_the_scaler():
    def body():
        script = Script()
        script.sync.backward(lambda: loss_of(script.model, *batch(0, 0)))

    assert_refused(2, body, torchcomp.SpecError, "scaler=scaler", field="scaler")
