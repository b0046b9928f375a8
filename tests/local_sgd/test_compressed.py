"""Compressed pseudo-gradients: equal to the reference, conserved, and unchanged after an error."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchcomp
from tests.local_sgd import reference
from tests.local_sgd.script import (
    Script,
    constant,
    float32_mlp,
    mlp,
    momentum,
    sgd,
    spied,
    synchronised_steps,
    trained,
    unsent,
)
from tests.support.cases import some, thorough
from tests.support.models import kept
from tests.support.outcomes import assert_close, assert_refused, equal_on_all, flat
from tests.support.ranks import on_processes, on_threads

CONSERVING = (
    "ef(topk(0.1))",
    'ef(topk(k=3, scope="tensor"))',
    'ef(topk(0.1, scope="model"))',
    'ef(topk(0.1, values="int8"), exchange="sharded")',
    "ef(randk(0.2))",
    'ef(quantize("int8"))',
    'ef(quantize("int4", rounding="stochastic"))',
    'ef(cast("bf16"), exchange="gather")',
    'bidirectional(topk(0.2), topk(0.2), selection="exact")',
    'bidirectional(topk(0.2, scope="model"), quantize("int8"), selection="shard")',
)
LOSSY = ('cast("bf16")', 'mean(quantize("int8"))', "randk(0.2, unbiased=True)", "topk(0.5)")
STEPS, ENDS = 11, [3, 6, 9, 11]


def compressed(spec, **options):
    local = {"compress": spec} | options.pop("local", {})
    return Script(**{"spec": "every(3)", "total_steps": STEPS, "local": local} | options)


def weights_of(spec, **options):
    return compressed(spec, **options).train(0, STEPS)


def test_equals_the_float64_reference_at_every_step():
    runs = on_threads(4, weights_of, 'ef(topk(k=3, scope="tensor"))')
    expected = list(
        reference.local_opt(
            4,
            STEPS,
            update=reference.Momentum,
            rule=reference.every(3),
            lr=constant,
            synchronise=reference.ef_topk(4, 3),
        )
    )
    for actual, (weights, _) in zip(zip(*runs, strict=True), expected, strict=True):
        for mine, wanted in zip(actual, weights, strict=True):
            assert_close(mine, wanted)


@pytest.mark.parametrize("spec", some([*CONSERVING, *LOSSY], of=4))
@pytest.mark.parametrize(
    "build", [lambda: mlp().bfloat16(), *thorough([lambda: mlp().float()])], ids=["bf16", "fp32"]
)
def test_ranks_are_bit_identical_after_every_synchronisation(spec, build):
    runs = on_threads(3, partial(weights_of, spec, build=build))
    assert synchronised_steps(runs) == ENDS


def test_ranks_are_bit_identical_over_gloo():
    for runs in zip(*on_processes(2, all_methods), strict=True):
        assert synchronised_steps(list(runs)) == ENDS


def all_methods():
    return [weights_of(spec, build=float32_mlp) for spec in (*CONSERVING, *LOSSY)]


# --- Nothing is lost ------------------------------------------------------------------------------


def account(spec, steps=STEPS, **options):
    """The sums of a rank's pseudo-gradients and of the applied updates, and its final state."""
    local = []
    watched = spied(momentum, lambda: local.append(flat(script.model.parameters())))
    script = compressed(spec, optimizer=watched, **options)
    shared = script.weights()
    pseudo, applied = torch.zeros_like(shared), torch.zeros_like(shared)
    for step in range(steps):
        script.step(step)
        if script.sync.next_sync is None:
            pseudo += local[-1] - shared
            applied += script.weights() - shared
            shared = script.weights()
    return pseudo, applied, script.sync.state_dict()


def residual(states):
    """The mean residual plus the server residual, in the order of the parameters."""
    return torch.cat(list(unsent(states).values()))


@pytest.mark.parametrize("spec", some(CONSERVING, of=2))
def test_applied_means_plus_residual_are_the_mean_pseudo_gradients(spec):
    pseudo, applied, states = zip(*on_threads(4, account, spec), strict=True)
    assert equal_on_all(applied)
    unsent_mean = residual(states)
    assert unsent_mean.norm() > 1e-6 * applied[0].norm()
    assert_close(applied[0] + unsent_mean, torch.stack(pseudo).mean(0))


def test_small_buckets_conserve():
    body = partial(account, "ef(topk(0.1))", bucket_cap_mb=0.0002)
    pseudo, applied, states = zip(*on_threads(3, body), strict=True)
    assert len(states[0]["groups"]) > 1
    assert_close(applied[0] + residual(states), torch.stack(pseudo).mean(0))


def test_error_feedback_without_compression_is_the_plain_average():
    plain = on_threads(3, partial(trained, STEPS, total_steps=STEPS))
    for mine, wanted in zip(on_threads(3, weights_of, "ef(identity)"), plain, strict=True):
        for step in range(STEPS):
            assert_close(mine[step], wanted[step])


def test_mean_is_the_plain_average_bit_for_bit():
    plain = on_threads(3, partial(trained, STEPS, total_steps=STEPS, build=float32_mlp))
    explicit = on_threads(3, partial(weights_of, "mean", build=float32_mlp))
    for mine, wanted in zip(explicit, plain, strict=True):
        assert torch.equal(torch.stack(mine), torch.stack(wanted))


def changed_between_rounds():
    """Rank 1 shifts its weights before the second round; the weights before and after that."""
    script = compressed("ef(identity)", optimizer=sgd, lr=lambda step: 1e-9)
    script.train(0, 3)
    before = script.weights()
    if script.rank == 1:
        with torch.no_grad():
            script.model.module[0].bias.add_(4.0)
    script.train(3, 6)
    return before, script.weights()


def test_a_change_between_rounds_is_part_of_the_pseudo_gradient():
    outcomes = on_threads(4, changed_between_rounds)
    assert equal_on_all(after for _, after in outcomes)
    before, after = outcomes[0]
    shift = after - before
    assert_close(shift[48:56], torch.ones(8, dtype=torch.float64), 1e-6)


# --- Bytes and seeds ------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", some(CONSERVING, of=2))
def test_bytes_are_those_of_the_method(spec):
    def body():
        local, script = compressed(spec), Script(spec=None)
        local.train(0, 3)
        handle = torchcomp.register(script.model, spec)
        script.step(0)
        return local.sync.stats, handle.stats, local.sync.residual_norms()

    for local, gradients, norms in on_threads(3, body):
        # If topk selects from a whole bucket, the bytes for each owner depend on the values. With a
        # model this small, the number of threshold rounds changes the bytes noticeably as well.
        slack = 0.2 if "sharded" in spec or "bidirectional" in spec else 0.0
        slack = 0.5 if "exact" in spec else slack
        assert local.bytes_sent == pytest.approx(gradients.bytes_sent, rel=slack, abs=0)
        assert local.dense_bytes_sent == 3 * gradients.dense_bytes_sent
        assert max(norms.values()) > 0


def test_a_compressed_synchronisation_sends_less():
    def body():
        dense, small = Script(total_steps=3), compressed("ef(topk(0.05))", total_steps=3)
        for script in (dense, small):
            script.train(0, 3)
        return small.sync.stats.bytes_sent / dense.sync.stats.bytes_sent

    assert max(on_threads(2, body)) < 0.2


def test_stochastic_methods_draw_from_the_seed():
    def body(seed):
        return weights_of("ef(randk(0.2))", local={"seed": seed})[-1]

    first, again, other = (on_threads(2, body, seed)[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# --- Failure --------------------------------------------------------------------------------------


def lasting(script):
    """The state that a failed synchronisation must not change."""
    state = script.sync.state_dict()
    parts = [kept(state, name) for name in ("error", "server_error", "reference")]
    return [tensor.clone() for part in parts for tensor in part.values()]


def poisoned(spec, **local):
    seen = []
    watched = spied(sgd, lambda: seen.append(script.weights()))
    script = compressed(spec, optimizer=watched, local=local)
    script.train(0, 5)
    before = lasting(script)
    if script.rank == 1:
        nn.init.constant_(script.model.module[0].bias[2:3].detach(), float("nan"))
    with pytest.raises(torchcomp.NonFiniteError) as raised:
        script.step(5)
    assert torch.equal(seen[-1].nan_to_num(), script.weights().nan_to_num())
    assert script.sync.next_sync is not None
    return str(raised.value), all(map(torch.equal, before, lasting(script)))


def assert_found(outcomes):
    for message, unchanged in outcomes:
        for word in ("'0.bias'", "rank 1", "step 6"):
            assert word in message
        assert unchanged


@pytest.mark.parametrize("spec", some([*CONSERVING, *LOSSY], of=4))
def test_a_nan_on_one_rank_raises_on_every_rank_and_changes_no_state(spec):
    assert_found(on_threads(3, poisoned, spec))


def test_a_nan_is_found_before_an_outer_step_without_compression():
    assert_found(on_threads(3, partial(poisoned, "mean", outer="slowmo")))


DAMAGES = {
    "ef(topk(0.2))": "all_gather_rows",
    "bidirectional(topk(0.2), topk(0.2))": "all_to_all",
}


def damaged(spec, method):
    """Damage rank 1's message of the second synchronisation; the third sends it all again."""
    local = []
    script = compressed(spec, optimizer=spied(momentum, lambda: local.append(script.weights())))
    script.train(0, 5)
    before, shared = lasting(script), kept(script.sync.state_dict(), "reference")
    exchange = script.sync._steps.averages.averager.exchange
    send = getattr(exchange, method)

    def spoil(outgoing, *sizes):
        if outgoing.dtype == torch.uint8 and dist.get_rank() == 1:
            outgoing = outgoing.clone()  # the memory is used again
            outgoing[8].bitwise_xor_(4)
        return send(outgoing, *sizes)

    refused = pytest.raises(torchcomp.WireError, match="rank 1's")
    with mock.patch.object(exchange, method, spoil), refused:
        script.step(5)
    assert torch.equal(local[-1], script.weights())
    assert all(map(torch.equal, before, lasting(script)))
    script.train(6, 9)
    state = script.sync.state_dict()
    shared = torch.cat([shared[name].flatten() for name in state["parameters"]])
    return local[-1] - shared, script.weights() - shared, state, before


@pytest.mark.parametrize("spec", DAMAGES)
def test_a_damaged_message_raises_on_every_rank_and_the_next_synchronisation_recovers(spec):
    outcomes = on_threads(3, damaged, spec, DAMAGES[spec])
    pseudo, applied, states, _ = zip(*outcomes, strict=True)
    assert equal_on_all(applied)
    assert [state["local_sgd"]["syncs"] for state in states] == [2] * 3
    whole = on_threads(3, partial(account, spec, 3))
    already = residual([state for *_, state in whole])
    assert_close(applied[0] + residual(states), torch.stack(pseudo).mean(0) + already)


def test_bytes_that_a_failed_synchronisation_has_sent_are_counted():
    def body():
        script = compressed("ef(topk(0.2))")
        script.train(0, 5)
        before = script.sync.stats
        if script.rank == 1:
            nn.init.constant_(script.model.module[0].bias.detach(), float("inf"))
        with pytest.raises(torchcomp.NonFiniteError):
            script.step(5)
        after = script.sync.stats
        return after.syncs - before.syncs, after.total_bytes_sent > before.total_bytes_sent

    assert on_threads(2, body) == [(0, True), (0, True)]


# --- Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("every(4)", "'every(4)'"),
        ("ef(topkk(0.1))", "'topkk'"),
        ("ef(randk(0.1, unbiased=True))", "contractive"),
        (None, "None"),
    ],
)
def test_a_compress_that_is_not_a_method(spec, word):
    assert_refused(2, partial(compressed, spec), torchcomp.SpecError, word)


@pytest.mark.parametrize("seed", [-1, 0.5, True, None])
def test_an_invalid_seed(seed):
    body = partial(compressed, "ef(topk(0.1))", local={"seed": seed})
    assert_refused(2, body, torchcomp.SpecError, "seed", repr(seed))


def test_methods_that_differ_between_ranks():
    def body():
        compressed("ef(topk(0.1))" if dist.get_rank() else "ef(topk(0.2))")

    words = ("ef(topk(0.2)) on rank 0", "ef(topk(0.1)) on rank 1")
    assert_refused(2, body, torchcomp.RankMismatchError, *words)


def test_weights_that_differ_between_ranks_at_the_first_step():
    def body():
        script = compressed("ef(topk(0.1))")
        nn.init.constant_(script.model.module[0].bias.detach(), float(script.rank == 2))
        script.step(0)

    words = ("checksum", "on ranks 0, 1", "on rank 2")
    assert_refused(3, body, torchcomp.RankMismatchError, *words)


def test_weights_may_be_loaded_on_all_ranks_before_the_first_step():
    def body():
        script = compressed("ef(topk(0.1))")
        for parameter in script.model.parameters():
            nn.init.constant_(parameter.detach(), 0.5)
        script.train(0, 3)
        return script.weights()

    weights = on_threads(2, body)
    assert equal_on_all(weights)
    # If the reference were the constructor's weights, the round would have changed most entries.
    assert (weights[0] == 0.5).double().mean() > 0.8
