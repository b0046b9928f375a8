"""sync.backward computes a micro-batch again if it overflows, and never skips a step."""

from functools import partial

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.local_sgd.script import Script, batch, loss_of, mlp, synchronised_steps, trained
from tests.support.models import seeded
from tests.support.outcomes import assert_refused
from tests.support.ranks import on_threads
from torchcomp.local_sgd.overflow import backward_until_finite

TOTAL = 8
FITS, LARGE = 1024.0, 8192.0
"""A scale at which gradients are finite, and one at which they overflow."""


class Remedied(Script):
    """A script that calls ``sync.backward``."""

    def __init__(self, scale=FITS, growth=2000, **options):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth)
        super().__init__(scaler=scaler, total_steps=TOTAL, **options)
        self.computed = 0

    def loss(self, step):
        self.computed += 1
        overflow = float("inf") if FITS < self.scaler.get_scale() <= LARGE else 1.0
        return loss_of(self.model, *batch(self.rank, step)) * overflow

    def backward(self, step, scale=1.0):
        self.sync.backward(lambda: self.loss(step) * scale)

    def optimizer_step(self):
        self.optimizer.step()


def remedied(overflows=()):
    """The weights after each step, the number of computations, and the final scale.

    The (rank, step) pairs in `overflows` start at the scale LARGE.
    """
    script, weights = Remedied(), []
    for step in range(TOTAL):
        if (script.rank, step) in overflows:
            script.scaler.update(LARGE)
        weights.append(script.step(step))
    return weights, script.computed, script.scaler.get_scale()


def test_an_overflow_on_one_rank_changes_no_weight_and_no_clock():
    runs, computed, scales = zip(*on_threads(3, remedied, {(1, 4), (2, 5), (2, 7)}), strict=True)
    plain = on_threads(3, partial(trained, TOTAL, total_steps=TOTAL))
    assert synchronised_steps(runs) == synchronised_steps(plain) == [3, 6, 8]
    for mine, wanted in zip(runs, plain, strict=True):
        assert torch.equal(torch.stack(mine), torch.stack(wanted))
    # From LARGE to FITS, the scale is halved three times.
    assert computed == (TOTAL, TOTAL + 3, TOTAL + 6)
    assert scales == (FITS,) * 3


def autocast_to_float16():
    """The final scale, the number of computations, and whether the gradients are finite."""
    script = Remedied(scale=2.0**30, build=lambda: mlp().float())
    script.optimizer.zero_grad()
    inputs, targets = batch(script.rank, 0)

    def compute():
        script.computed += 1
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = script.model(inputs.float())
        return (outputs.float() - targets.float()).square().mean()

    script.sync.backward(compute)
    gradients = torch.cat([p.grad.flatten() for p in script.model.parameters()])
    return script.scaler.get_scale(), script.computed, gradients.isfinite().all().item()


def test_float16_gradients_that_overflow_are_computed_at_a_smaller_scale():
    for scale, computed, finite in on_threads(2, autocast_to_float16):
        assert finite
        assert computed > 1
        assert scale == 2.0 ** (31 - computed)


def accumulated(remedy):
    script, weights = Remedied() if remedy else Script(total_steps=TOTAL), []
    for step in range(4):
        script.optimizer.zero_grad()
        for micro in range(3):
            if remedy and (script.rank, step, micro) == (1, 2, 1):
                script.scaler.update(LARGE)
            script.backward(10 * step + micro)
        script.optimizer_step()
        weights.append(script.weights())
    return torch.stack(weights)


def test_micro_batches_add_up_and_only_the_one_that_overflowed_is_computed_again():
    for mine, wanted in zip(
        on_threads(2, accumulated, True), on_threads(2, accumulated, False), strict=True
    ):
        assert torch.equal(mine, wanted)


def test_it_returns_the_unscaled_loss_and_lets_the_scale_grow():
    def body():
        script = Remedied(growth=2)
        loss = script.sync.backward(lambda: script.loss(0))
        wanted = script.loss(0)
        script.sync.backward(lambda: script.loss(0))
        return loss.item(), wanted.item(), script.scaler.get_scale()

    for loss, wanted, scale in on_threads(2, body):
        assert loss == wanted
        assert scale == 2 * FITS


def test_gradients_that_are_finite_at_no_scale_raise_and_leave_grad_alone():
    def body():
        script = Remedied()
        script.backward(0)
        before = [p.grad.clone() for p in script.model.parameters()]
        bad = float("nan")
        with pytest.raises(torchcomp.NonFiniteError, match=r"\b5 tries.*\b32\b"):
            script.sync.backward(lambda: script.loss(1) * bad, tries=5)
        assert script.computed == 6
        return all(map(torch.equal, before, [p.grad for p in script.model.parameters()]))

    assert on_threads(2, body) == [True, True]


def test_a_scaler_that_is_switched_off_is_plain_backward():
    def body():
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        script = Script(scaler=scaler)
        script.sync.backward(lambda: loss_of(script.model, *batch(script.rank, 0)))
        mine = [p.grad.clone() for p in script.model.parameters()]
        script.optimizer.zero_grad()
        script.backward(0)
        return all(map(torch.equal, mine, [p.grad for p in script.model.parameters()]))

    assert on_threads(2, body) == [True, True]


@pytest.mark.parametrize("tries", [0, -1, 1.5, None, True])
def test_an_invalid_number_of_tries(tries):
    def body():
        script = Remedied()
        script.sync.backward(lambda: script.loss(0), tries=tries)

    assert_refused(2, body, torchcomp.SpecError, repr(tries), field="tries")


def test_a_micro_batch_that_raises_leaves_the_gradients_of_the_others():
    def body():
        script = Remedied()
        script.backward(0)
        before = [p.grad.clone() for p in script.model.parameters()]
        with pytest.raises(ZeroDivisionError):
            script.sync.backward(lambda: 1 / 0)
        return all(map(torch.equal, before, [p.grad for p in script.model.parameters()]))

    assert on_threads(2, body) == [True, True]


def test_gradients_that_are_views_of_buckets_add_up_and_survive_an_error():
    def body(view):
        model = DistributedDataParallel(seeded(mlp()), gradient_as_bucket_view=view)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=FITS)
        rank = torch.distributed.get_rank()

        def add(step, factor):
            compute = lambda: factor * loss_of(model, *batch(rank, step))  # noqa: E731
            backward_until_finite(scaler, [optimizer], compute, tries=2)

        add(0, 1.0)
        add(1, 1.0)
        with pytest.raises(torchcomp.NonFiniteError):
            add(2, float("nan"))
        return [p.grad.clone() for p in model.parameters()]

    for views, plain in zip(on_threads(2, body, True), on_threads(2, body, False), strict=True):
        assert all(map(torch.equal, views, plain))


def test_it_needs_the_scaler():
    def body():
        script = Script()
        script.sync.backward(lambda: loss_of(script.model, *batch(0, 0)))

    assert_refused(2, body, torchcomp.SpecError, "scaler=scaler")
