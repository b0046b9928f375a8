"""The optimizers' state at a synchronisation: left alone, averaged, or reset."""

from functools import partial

import pytest
import torch

import torchcomp
from tests.local_sgd.script import (
    Script,
    adamw,
    batch,
    loss_of,
    mlp,
    momentum,
    spied,
    synchronised_steps,
)
from tests.support.outcomes import assert_close, assert_refused, equal_on_all
from tests.support.ranks import on_threads

PLAIN, COMPRESSED = {}, {"build": lambda: mlp().float(), "compress": "ef(topk(0.2))"}


def states(script):
    """A copy of every tensor in the optimizer's state, by parameter and key."""
    state = script.optimizer.state_dict()["state"]
    return {(n, key): value.clone() for n, each in state.items() for key, value in each.items()}


def around_a_synchronisation(policy, optimizer, build=mlp, **local):
    """The state before and after the average at step 2, and the weights after each step."""
    before = []
    watched = spied(optimizer, lambda: before.append(states(script)))
    local = {"moments": policy, **local}
    script = Script("every(2)", total_steps=4, optimizer=watched, local=local, build=build)
    weights = script.train(0, 2)
    after = states(script)
    return before[-1], after, weights + script.train(2, 4)


@pytest.mark.parametrize("optimizer", [momentum, adamw, partial(torch.optim.Adafactor)])
@pytest.mark.parametrize("options", [PLAIN, COMPRESSED], ids=["plain", "compressed"])
def test_averaged_moments_are_the_mean_of_the_ranks(optimizer, options):
    body = partial(around_a_synchronisation, "average", optimizer, **options)
    befores, afters, weights = zip(*on_threads(3, body), strict=True)
    assert afters[0]
    for key in afters[0]:
        assert equal_on_all(after[key] for after in afters)
        mean = torch.stack([before[key].double() for before in befores]).mean(0)
        assert_close(afters[0][key].double(), mean, 1e-6 if options else 1e-12)
    assert synchronised_steps(weights) == [2, 4]


@pytest.mark.parametrize("optimizer", [momentum, adamw])
def test_local_moments_are_left_alone_and_reset_ones_equal_those_of_a_new_optimizer(optimizer):
    def renewed():
        """Plain local steps whose optimizer state is cleared after the average."""
        script = Script("every(2)", total_steps=4, optimizer=optimizer)
        weights = script.train(0, 2)
        script.optimizer.state.clear()
        return weights + script.train(2, 4)

    outcomes = on_threads(3, around_a_synchronisation, "reset", optimizer)
    for (before, after, weights), wanted in zip(outcomes, on_threads(3, renewed), strict=True):
        assert before
        assert not after
        assert torch.equal(torch.stack(weights), torch.stack(wanted))
    alone = on_threads(3, around_a_synchronisation, "local", optimizer)
    for before, after, _ in alone:
        assert all(torch.equal(before[key], after[key]) for key in before)
    last = list(alone[0][0])[-1]
    assert not equal_on_all(after[last] for _, after, _ in alone)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_rank_without_moments_adds_zeros_and_continues_without_them():
    def body():
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        script = Script("every(1)", scaler=scaler, optimizer=adamw, local={"moments": "average"})
        script.step(0, scale=float("inf") if script.rank == 1 else 1.0)
        first = states(script)
        script.step(1)
        return first, states(script)

    first, second = zip(*on_threads(3, body), strict=True)
    assert not first[1]
    for key, value in first[0].items():
        assert torch.equal(value, first[2][key])
    for key, value in second[0].items():
        if key[1] != "step":
            assert torch.equal(value, second[1][key])
    assert [float(each[0, "step"]) for each in second] == [2.0, 1.0, 2.0]


def test_moments_that_are_not_finite_raise_on_every_rank_before_anything_is_averaged():
    def spoil(script, local):
        local.append(script.weights())
        if script.rank == 1 and len(local) == 2:
            last = script.model.module[2].bias
            script.optimizer.state[last]["momentum_buffer"].fill_(float("nan"))

    def body():
        local = []
        watched = spied(momentum, lambda: spoil(script, local))
        script = Script("every(2)", optimizer=watched, local={"moments": "average"})
        script.step(0)
        try:
            script.step(1)
        finally:
            assert torch.equal(local[-1], script.weights())

    words = ("step 2", "'2.bias momentum_buffer' on rank 1")
    assert_refused(2, body, torchcomp.NonFiniteError, *words)


def test_averaging_moments_is_counted():
    def body(policy):
        script = Script("every(2)", optimizer=adamw, local={"moments": policy})
        script.train(0, 2)
        return script.sync.stats.bytes_sent

    assert on_threads(2, body, "average")[0] == 3 * on_threads(2, body, "local")[0]


def test_state_that_cannot_be_averaged_is_refused():
    def body():
        optimizer = partial(torch.optim.LBFGS, max_iter=3)
        script = Script("every(2)", optimizer=optimizer, local={"moments": "average"})

        def closure():
            script.optimizer.zero_grad()
            loss = loss_of(script.model, *batch(script.rank, 0))
            loss.backward()
            return loss

        for _ in range(2):
            script.optimizer.step(closure)

    words = ("0.weight", "list", "moments='local'")
    assert_refused(2, body, torchcomp.SpecError, *words, field="moments")


def test_two_optimizers_of_one_parameter_average_their_own_moments():
    def body():
        script = Script(spec=None)
        layer = script.model.module[0]
        optimizers = [momentum(layer.parameters(), lr=0.05) for _ in range(2)]
        options = {"total_steps": 2, "moments": "average"}
        torchcomp.LocalSGD(script.model, optimizers, "every(2)", **options)
        for step in range(2):
            for index, optimizer in enumerate(optimizers):
                script.model.zero_grad()
                script.backward(10 * index + step)
                optimizer.step()
        return [optimizer.state[layer.weight]["momentum_buffer"] for optimizer in optimizers]

    (first, second), others = on_threads(2, body)
    assert torch.equal(first, others[0])
    assert torch.equal(second, others[1])
    assert not torch.equal(first, second)
