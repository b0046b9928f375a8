"""Backward passes that are not steps: gradients of inputs, other weights, hidden losses."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.jointspar.script import assert_mean, backward, estimates, keep, seen
from tests.support.models import loss_of, mlp, rows, wrap
from tests.support.ranks import on_threads
from torchcomp.errors import UnsupportedModelError
from torchcomp.jointspar import JointSpar

# --- Gradients of inputs --------------------------------------------------------------------------


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
@pytest.mark.parametrize("kept", [(), ("2",), ("0", "2", "4", "6")])
def test_gradients_of_inputs_are_correct_and_not_a_step(find, kept):
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
        own, found = [], []
        for step in range(3):
            model.zero_grad()
            keep(jointspar, *kept)
            x = rows(2 * step).requires_grad_()
            copied = mlp()
            copied.load_state_dict(model.module.state_dict())
            torch.testing.assert_close(find(model, x), by_grad(copied, x), rtol=0, atol=0)
            assert jointspar.stats.step == step
            own.append(estimates(jointspar, model, (rows(2 * step + 1),)))
            backward(model, (rows(2 * step + 1),))
            found.append(seen(model))
            assert jointspar.stats.step == step + 1
        return found, own

    outcomes = on_threads(2, body)
    for step in range(3):
        assert_mean([found[step] for found, _ in outcomes], [own[step] for _, own in outcomes])


def penalised(model, x):
    """Return a loss with a penalty on the gradient of the input."""
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return loss_of(output) + gradient.square().mean()


def test_a_gradient_penalty():
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
        keep(jointspar, "2", "6")
        x = rows(0).requires_grad_()
        copied = mlp()
        penalised(copied, x).backward()
        penalised(model, x).backward()
        kept = ("2.weight", "2.bias", "6.weight", "6.bias")
        own = {
            name: p.grad / 0.5 if name in kept and p.grad is not None else None
            for name, p in copied.named_parameters()
        }
        return seen(model), own

    outcomes = on_threads(2, body)
    assert_mean([found for found, _ in outcomes], [own for _, own in outcomes])


def test_parameters_that_only_an_inner_backward_pass_reaches():
    """Reentrant checkpointing hides them from the outer backward pass, which is still a step."""

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp()

        def forward(self, x):
            return checkpoint(self.layers, x, use_reentrant=True)

    def body():
        model = wrap(Hidden())
        jointspar = JointSpar(model, budget=0.5, warmup_steps=2)
        for step in range(2):
            model.zero_grad()
            backward(model, (rows(step).requires_grad_(),))
            assert all(bool(g.any()) for g in seen(model).values())
        assert jointspar.stats.step == 2

    on_threads(1, body)


# --- Other weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [(), ("2",)])
def test_a_functional_call_uses_the_weights_passed_to_it(kept):
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
        keep(jointspar, *kept)
        other = {name: torch.zeros_like(p) for name, p in model.module.named_parameters()}
        assert not torch.func.functional_call(model.module, other, (rows(0),)).any()
        # With some weights only. The others are those of the module, and are skipped.
        some = {"6.bias": torch.ones(4, dtype=torch.float64), "6.weight": other["6.weight"]}
        assert bool((torch.func.functional_call(model.module, some, (rows(0),)) == 1).all())
        backward(model, (rows(0),))
        assert all((g is not None) == name.startswith(kept) for name, g in seen(model).items())

    on_threads(2, body)


def test_gradients_of_other_weights_are_not_a_step():
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
        keep(jointspar)
        other = {name: p.detach().clone() for name, p in model.module.named_parameters()}
        other["0.weight"].requires_grad_()
        loss_of(torch.func.functional_call(model.module, other, (rows(0),))).backward()
        assert other["0.weight"].grad.any()
        assert jointspar.stats.step == 0
        backward(model, (rows(0),))
        assert jointspar.stats.step == 1

    on_threads(1, body)


# --- Outputs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Output:
    loss: Tensor
    rows: int
    label: str = dataclasses.field(init=False, default="none")


class Wrapped(nn.Module):
    """Returns its loss in the container that `way` builds."""

    def __init__(self, way):
        super().__init__()
        self.layers, self.way = mlp(), way

    def forward(self, x):
        self.loss = loss_of(self.layers(x))
        return self.way(self.loss, len(x))


@pytest.mark.parametrize(
    "way",
    [
        Output,
        lambda loss, count: [{"inner": Output(loss, count)}, loss.detach()],
        lambda loss, count: Output((loss, None), count),
    ],
    ids=["dataclass", "dataclass and constant", "tuple in a dataclass"],
)
def test_dataclasses_are_supported_as_outputs(way):
    def body():
        model = wrap(Wrapped(way))
        jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
        for step in range(2):
            keep(jointspar, "layers.2")
            output = model(rows(step))
            while not isinstance(output, Output):
                output = output[0] if isinstance(output, list) else output["inner"]
            assert (output.rows, output.label) == (4, "none")
            (output.loss[0] if isinstance(output.loss, tuple) else output.loss).backward()
            assert {n for n, g in seen(model).items() if g is not None} == {
                "layers.2.weight",
                "layers.2.bias",
            }
            model.zero_grad()
        assert jointspar.stats.step == 2

    on_threads(2, body)


def test_a_loss_that_is_not_returned_is_refused_at_the_next_forward_pass():
    def body():
        model = wrap(Wrapped(lambda loss, count: loss.detach()))
        jointspar = JointSpar(model, budget=0.5)
        model(rows(0))
        model.module.loss.backward()
        with pytest.raises(UnsupportedModelError, match=r"backward.*JointSpar.*dataclasses"):
            model(rows(1))
        with torch.no_grad():
            model(rows(1))
        assert jointspar.stats.step == 0

    on_threads(2, body)
