"""A rank that takes too many steps is found; different work within one step is allowed."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torchcomp
from tests.local_sgd.script import Script, batch, loss_of, sgd, synchronised_steps
from tests.support.outcomes import assert_refused, flat
from tests.support.ranks import on_threads


def more_micro_batches(script, step):
    for micro in range(3):
        script.backward(100 + 10 * step + micro)


def a_look_at_an_output(script, step):
    loss_of(script.model, *batch(script.rank, step))
    script.backward(step)


def a_look_at_a_gradient(script, step):
    loss = loss_of(script.model, *batch(script.rank, step))
    torch.autograd.grad(loss, script.model.module[0].weight)
    script.backward(step)


def activations_computed_again(script, step):
    inputs, _ = batch(script.rank, step)
    checkpoint(script.model, inputs, use_reentrant=False).sum().backward()


def a_step_that_fails_and_is_repeated(script, step):
    script.backward(step)
    with pytest.raises(ZeroDivisionError):
        script.optimizer.step(lambda: 1 / 0)
    script.backward(step)


def differing(backward, steps=4):
    """Rank 1 computes its gradients with `backward`; return the weights after each step."""
    script, seen = Script("every(2)", total_steps=steps, optimizer=sgd), []
    for step in range(steps):
        script.optimizer.zero_grad()
        (backward if script.rank == 1 else Script.backward)(script, step)
        script.optimizer_step()
        seen.append(script.weights())
    return seen


@pytest.mark.parametrize(
    "backward",
    [
        more_micro_batches,
        a_look_at_an_output,
        a_look_at_a_gradient,
        activations_computed_again,
        a_step_that_fails_and_is_repeated,
    ],
)
def test_ranks_may_differ_in_what_they_do_for_one_step(backward):
    assert synchronised_steps(on_threads(2, differing, backward)) == [2, 4]


def test_a_rank_that_takes_a_step_twice_is_found_at_the_next_synchronisation():
    def body():
        script = Script("every(3)", total_steps=6)
        for step in range(6):
            script.step(step)
            if (script.rank, step) == (1, 1):
                script.optimizer.step()

    words = ("forward passes", "0 on rank 0", "1 on rank 1")
    assert_refused(2, body, torchcomp.RankMismatchError, *words)


def test_one_model_trained_by_two_alternating_optimizers():
    def body():
        script = Script(spec=None)
        layers = script.model.module[0], script.model.module[2]
        optimizers = [sgd(layer.parameters(), lr=0.05) for layer in layers]
        sync = torchcomp.LocalSGD(script.model, optimizers, "every(2)", total_steps=2)
        for step in range(2):
            for optimizer in optimizers:
                script.model.zero_grad()
                script.backward(step)
                optimizer.step()
        return sync.stats.syncs, flat(script.model.parameters())

    (syncs, mine), (_, others) = on_threads(2, body)
    assert syncs == 1
    assert torch.equal(mine, others)
