"""Compressed pseudo-gradients: equal to the reference, and conserved."""

from functools import partial

import pytest
import torch

from tests.local_sgd.script import Script, mlp, momentum, spied, unsent
from tests.support.cases import some
from tests.support.models import kept
from tests.support.outcomes import assert_close, equal_on_all, flat
from tests.support.ranks import on_threads

CONSERVING = (
    "ef(topk(0.1))",
    'ef(topk(k=3, scope="tensor"))',
    'ef(topk(0.1, values="int8"), exchange="sharded")',
    "ef(randk(0.2))",
    'ef(quantize("int4", rounding="stochastic"))',
    'ef(cast("bf16"), exchange="gather")',
    'bidirectional(topk(0.2), topk(0.2), selection="exact")',
    'bidirectional(topk(0.2, scope="model"), quantize("int8"), selection="shard")',
)
STEPS = 11


def account(spec, **options):
    """The sums of a rank's pseudo-gradients and of the applied updates, and its final state.

    At each synchronisation, the state contains the shared weights.
    """
    local = []
    watched = spied(momentum, lambda: local.append(script.weights()))
    options |= {"optimizer": watched, "local": {"compress": spec}}
    script = Script("every(3)", STEPS, **options)
    shared = script.weights()
    pseudo, applied = torch.zeros_like(shared), torch.zeros_like(shared)
    for step in range(STEPS):
        script.step(step)
        state = script.sync.state_dict()
        if script.sync.next_sync is None:
            pseudo += local[-1] - shared
            applied += script.weights() - shared
            shared = script.weights()
        reference = kept(state, "reference")
        assert torch.equal(flat(reference[name] for name in state["parameters"]), shared)
    return pseudo, applied, state


@pytest.mark.parametrize("spec", some(CONSERVING, of=2))
@pytest.mark.parametrize("ddp", [{}, {"bucket_cap_mb": 0.0002}])
def test_applied_means_plus_residual_are_the_mean_pseudo_gradients(spec, ddp):
    pseudo, applied, states = zip(*on_threads(4, partial(account, spec, **ddp)), strict=True)
    assert equal_on_all(applied)
    assert "model" in spec or (len(states[0]["groups"]) > 1) == bool(ddp)
    unsent_mean = flat(unsent(states).values())
    assert unsent_mean.norm() > 1e-6 * applied[0].norm()
    assert_close(applied[0] + unsent_mean, torch.stack(pseudo).mean(0))


def test_the_shared_weights_are_rounded_to_what_parameters_can_store():
    # Otherwise, the next pseudo-gradient would contain the rounding error: account() compares them.
    on_threads(2, partial(account, "ef(topk(0.1))", build=lambda: mlp().bfloat16()))
