"""What stays local during local steps, and what is averaged: parameters, buffers and moments."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.local_sgd.script import (
    Script,
    adamw,
    batch,
    convnet,
    loss_of,
    mlp,
    momentum,
    running_statistics,
    spied,
    synchronised_steps,
)
from tests.support.outcomes import assert_close, assert_refused, equal_on_all
from tests.support.ranks import on_threads

IMAGE = (3, 4, 4)
COMPRESSED = {"compress": "ef(topk(0.1))"}


def around_the_averages(frozen=False, **options):
    """BatchNorm's running statistics before and after each optimizer step, of one rank."""
    before, after, module = [], [], convnet()
    module.register_buffer("tag", torch.full((2,), float(dist.get_rank())))
    script = Script(
        "every(2)",
        total_steps=4,
        build=lambda: module,
        shape=IMAGE,
        optimizer=spied(momentum, lambda: before.append(running_statistics(script.model))),
        local=options,
    )
    module[1].train(not frozen)
    module.tag.fill_(script.rank)  # DDP's constructor has broadcast it
    for step in range(4):
        script.step(step)
        script.sync.wait()
        after.append(running_statistics(script.model))
        assert module.tag[0] == script.rank  # other buffers are neither averaged nor broadcast
    script.sync.close()
    script.backward(4)
    assert module.tag[0] == 0
    return before, after


@pytest.mark.parametrize("options", [COMPRESSED, {"overlap": True}, {"frozen": True}])
def test_running_statistics_are_averaged_whenever_a_part_of_the_model_is(options):
    runs = on_threads(3, partial(around_the_averages, **options))
    averages = () if "frozen" in options else (2, 4)
    for step, (*befores,) in enumerate(zip(*(before for before, _ in runs), strict=True), 1):
        afters = [after[step - 1] for _, after in runs]
        wanted = [torch.stack(befores).mean(0)] * 3 if step in averages else befores
        assert equal_on_all(befores) == (averages == ())
        assert_close(torch.stack(afters), torch.stack(wanted))


@pytest.mark.parametrize(
    "lrs", [(0.1, 0.01), (0.01, 0.1), (torch.tensor(0.1, dtype=torch.float64), 0.01)]
)
def test_the_schedule_reads_the_largest_learning_rate_of_all_groups(lrs):
    def body():
        script = Script(spec=None)
        first, *others = script.model.parameters()
        groups = [{"params": first, "lr": lrs[0]}, {"params": others, "lr": lrs[1]}]
        optimizer, seen = torch.optim.SGD(groups), []
        spec = "qsr(alpha=0.2, h_base=2)"
        sync = torchcomp.LocalSGD(script.model, optimizer, spec, total_steps=10)
        for _ in range(10):
            optimizer.step()
            seen.append(sync.next_sync)
        return seen

    # H = 4 at 0.1, and 400 at 0.01.
    assert on_threads(2, body) == [[4, 4, 4, None, 8, 8, 8, None, 10, None]] * 2


# --- Scripts that do more than step ---------------------------------------------------------------


def without_sync(model, last):
    return nullcontext() if last else model.no_sync()


def set_the_flag(model, last):
    """nanoGPT does this to accumulate gradients without no_sync()."""
    model.require_backward_grad_sync = last
    return nullcontext()


def trigger(model, last):
    """Accelerate's trigger_sync_in_backward does this."""
    if last:
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        model.reducer.prepare_for_backward([])
    return nullcontext()


def accumulated(idiom):
    script, weights = Script("every(2)", total_steps=5), []
    for step in range(5):
        script.optimizer.zero_grad()
        for micro in range(3):
            with idiom(script.model, micro == 2):
                script.backward(10 * step + micro)
        script.optimizer_step()
        weights.append(script.weights())
        script.scheduler.step()
    return weights


@pytest.mark.parametrize("idiom", [without_sync, set_the_flag, trigger])
def test_gradients_may_be_accumulated_in_any_way(idiom):
    runs = on_threads(3, accumulated, idiom)
    assert synchronised_steps(runs) == [2, 4, 5]
    plain = on_threads(3, accumulated, lambda *_: nullcontext())
    for mine, wanted in zip(runs, plain, strict=True):
        assert torch.equal(torch.stack(mine), torch.stack(wanted))


def test_a_step_that_fails_may_be_repeated_on_one_rank():
    def body():
        script, seen = Script("every(2)", total_steps=4), []
        for step in range(4):
            script.optimizer.zero_grad()
            if script.rank == 1:
                with pytest.raises(ZeroDivisionError):
                    script.optimizer.step(lambda: 1 / 0)
            script.backward(step)
            script.optimizer_step()
            seen.append(script.weights())
        return seen

    assert synchronised_steps(on_threads(2, body)) == [2, 4]


def spoiled(of, **options):
    """Damage a tensor of rank 1 before the second average."""
    local = []

    def spoil():
        local.append(script.weights())
        if script.rank == 1 and len(local) == 2:
            of(script).fill_(float("nan"))

    script = Script("every(1)", optimizer=spied(momentum, spoil), **options)
    script.step(0)
    try:
        script.step(1)
    finally:
        assert torch.equal(local[-1], script.weights())


def mean_of_batchnorm(script):
    return script.model.module[1].running_mean


def momentum_of_the_last_bias(script):
    return script.optimizer.state[script.model.module[2].bias]["momentum_buffer"]


SPOILED = [
    (mean_of_batchnorm, {"build": convnet, "shape": IMAGE}, "'1.running_mean' on rank 1"),
    (momentum_of_the_last_bias, {"local": {"moments": "average"}}, "2.bias momentum_buffer"),
]


@pytest.mark.parametrize(("of", "options", "word"), SPOILED)
def test_statistics_and_moments_that_are_not_finite_raise_on_every_rank(of, options, word):
    body = partial(spoiled, of, **options)
    assert_refused(2, body, torchcomp.NonFiniteError, "step 2", word)


def odd():
    """Scalar, tied, frozen, ignored and transposed parameters of three dtypes."""
    module = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    module[1].weight = module[0].weight
    for name, tensor in {
        "scalar": torch.zeros(()),
        "coarse": torch.zeros(5, 3, dtype=torch.bfloat16),
        "fine": torch.zeros(7, dtype=torch.float64),
        "transposed": torch.zeros(4, 6).t(),
        "frozen": torch.zeros(3),
        "own": torch.zeros(3),
    }.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=name != "frozen"))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["own"])
    return module


def scattered():
    """Weights that differ between ranks, before and after a synchronisation."""
    model = DistributedDataParallel(module := odd(), bucket_cap_mb=0.00002)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    torchcomp.LocalSGD(model, optimizer, "every(1)", total_steps=1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer.step()
    return before, {name: p.detach() for name, p in module.named_parameters()}


def test_every_parameter_becomes_the_mean_of_the_ranks():
    befores, afters = zip(*on_threads(3, scattered), strict=True)
    for name, after in afters[0].items():
        values = [weights[name] for weights in afters]
        if name in ("frozen", "own"):
            assert all(torch.equal(v, b[name]) for v, b in zip(values, befores, strict=True))
            continue
        assert equal_on_all(values)
        exact = torch.stack([weights[name].double() for weights in befores]).mean(0)
        # An average in bfloat16 would round several times.
        tolerance = 1.01 * 2**-8 if after.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(after.double(), exact, rtol=tolerance, atol=1e-9)


# The optimizers' state.


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


@pytest.mark.parametrize(
    ("optimizer", "options"), [(momentum, {}), (adamw, COMPRESSED), (torch.optim.Adafactor, {})]
)
def test_averaged_moments_are_the_mean_of_the_ranks(optimizer, options):
    body = partial(around_a_synchronisation, "average", optimizer, **options)
    befores, afters, weights = zip(*on_threads(3, body), strict=True)
    assert afters[0]
    for key in afters[0]:
        assert equal_on_all(after[key] for after in afters)
        mean = torch.stack([before[key].double() for before in befores]).mean(0)
        assert_close(afters[0][key].double(), mean, 1e-6 if options else 1e-12)
    assert synchronised_steps(weights) == [2, 4]


def test_local_moments_are_left_alone_and_reset_ones_are_cleared():
    for before, after, _ in on_threads(3, around_a_synchronisation, "reset", adamw):
        assert before
        assert not after
    for before, after, _ in on_threads(3, around_a_synchronisation, "local", adamw):
        assert all(torch.equal(before[key], after[key]) for key in before)


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


def of_lbfgs():
    script = Script("every(1)", optimizer=torch.optim.LBFGS, local={"moments": "average"})

    def closure():
        loss = loss_of(script.model, *batch(script.rank, 0))
        loss.backward()
        return loss

    script.optimizer.step(closure)


def test_moments_that_cannot_be_averaged_raise_on_every_rank():
    words = ("0.weight", "list", "'local'")
    assert_refused(2, of_lbfgs, torchcomp.SpecError, *words, field="moments")
