"""Backward passes that are not steps: gradients of inputs, other weights. Outputs."""

import pytest
import torch
from torch import nn

from tests.jointspar.script import assert_mean, backward, estimates, keep, seen
from tests.support.models import loss_of, mlp, rows, wrap
from tests.support.ranks import on_threads
from torchcomp.jointspar import JointSpar


def by_grad(model, x):
    return torch.autograd.grad(loss_of(model(x)), x)[0]


def by_inputs(model, x):
    loss_of(model(x)).backward(inputs=[x])
    return x.grad


def while_frozen(model, x):
    model.requires_grad_(False)
    loss_of(model(x)).backward()
    model.requires_grad_(True)
    return x.grad


@pytest.mark.parametrize("find", [by_grad, by_inputs, while_frozen])
@pytest.mark.parametrize("kept", [(), ("2",)])
def test_gradients_of_inputs_are_correct_and_not_a_step(find, kept):
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5)
        own, found = [], []
        for step in range(2):
            model.zero_grad()
            keep(jointspar, *kept)
            x = rows(2 * step).requires_grad_()
            copied = mlp()
            copied.load_state_dict(model.module.state_dict())
            torch.testing.assert_close(find(model, x), by_grad(copied, x), rtol=0, atol=0)
            assert jointspar.stats.steps == step
            own.append(estimates(jointspar, model, (rows(2 * step + 1),)))
            backward(model, (rows(2 * step + 1),))
            found.append(seen(model))
            assert jointspar.stats.steps == step + 1
        return found, own

    outcomes = on_threads(2, body)
    for step in range(2):
        assert_mean([found[step] for found, _ in outcomes], [own[step] for _, own in outcomes])


def penalised(model, x):
    """Return a loss with a penalty on the gradient of the input."""
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return loss_of(output) + gradient.square().mean()


def test_a_gradient_penalty():
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5)
        keep(jointspar, "2", "6")
        x = rows(0).requires_grad_()
        copied = mlp()
        penalised(copied, x).backward()
        penalised(model, x).backward()
        own = {
            name: p.grad / 0.5 if name[0] in "26" and p.grad is not None else None
            for name, p in copied.named_parameters()
        }
        return seen(model), own

    outcomes = on_threads(2, body)
    assert_mean([found for found, _ in outcomes], [own for _, own in outcomes])


@pytest.mark.parametrize("kept", [(), ("2",)])
def test_a_functional_call_uses_the_weights_passed_to_it_and_is_not_a_step(kept):
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5)
        keep(jointspar, *kept)
        other = {name: torch.zeros_like(p) for name, p in model.module.named_parameters()}
        assert not torch.func.functional_call(model.module, other, (rows(0),)).any()
        # With some weights only. The others are those of the module, and are skipped.
        some = {"6.bias": torch.ones(4, dtype=torch.float64), "6.weight": other["6.weight"]}
        assert bool((torch.func.functional_call(model.module, some, (rows(0),)) == 1).all())
        copied = {name: p.detach().clone() for name, p in model.module.named_parameters()}
        copied["0.weight"].requires_grad_()
        loss_of(torch.func.functional_call(model.module, copied, (rows(0),))).backward()
        assert copied["0.weight"].grad.any()
        assert jointspar.stats.steps == 0
        backward(model, (rows(0),))
        assert all((g is not None) == name.startswith(kept) for name, g in seen(model).items())
        assert jointspar.stats.steps == 1

    on_threads(2, body)


class Wrapped(nn.Module):
    def __init__(self, constant):
        super().__init__()
        self.layers, self.constant = mlp(), constant

    def forward(self, x):
        loss = loss_of(self.layers(x))
        return [{"inner": (loss, None)}, loss.detach() if self.constant else None, len(x)]


@pytest.mark.parametrize("constant", [False, True])
def test_outputs_can_be_in_containers(constant):
    def body():
        model = wrap(Wrapped(constant))
        jointspar = JointSpar(model, budget=0.5)
        for step in range(2):
            keep(jointspar, "layers.2")
            output, _, count = model(rows(step))
            assert count == 4
            output["inner"][0].backward()
            used = [name for name, g in seen(model).items() if g is not None]
            assert used == ["layers.2.weight", "layers.2.bias"]
            model.zero_grad()
        assert jointspar.stats.steps == 2

    on_threads(2, body)
