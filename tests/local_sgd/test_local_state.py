"""What stays local during local steps, and what is averaged."""

import copy
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
    batch,
    constant,
    convnet,
    half_frozen,
    loss_of,
    mlp,
    momentum,
    running_statistics,
    spied,
    synchronised_steps,
)
from tests.support.models import seeded
from tests.support.outcomes import assert_close, assert_refused, equal_on_all, flat
from tests.support.ranks import on_threads

IMAGE = (3, 4, 4)

# --- Buffers --------------------------------------------------------------------------------------


def test_other_buffers_are_neither_averaged_nor_broadcast_until_close():
    def body():
        module = convnet()
        module.register_buffer("tag", torch.full((2,), float(dist.get_rank())))
        script = Script("every(2)", total_steps=4, build=lambda: module, shape=IMAGE)
        module.tag.fill_(script.rank)  # DDP's constructor has broadcast it
        seen = []
        for step in range(5):
            if step == 4:
                script.sync.close()
            script.step(step)
            seen.append(module.tag[0].item())
        return seen

    for rank, seen in enumerate(on_threads(3, body)):
        assert seen == [rank] * 4 + [0]


def around_the_averages(frozen=False, **options):
    """BatchNorm's running statistics before and after each optimizer step, of one rank."""
    before, after = [], []
    script = Script(
        "every(2)",
        total_steps=4,
        build=convnet,
        shape=IMAGE,
        optimizer=spied(momentum, lambda: before.append(running_statistics(script.model))),
        local=options,
    )
    script.model.module[1].train(not frozen)
    for step in range(4):
        script.step(step)
        script.sync.wait()
        after.append(running_statistics(script.model))
    script.sync.close()
    return before, after


def with_two_schedules():
    """The same with a schedule per optimizer."""
    model = DistributedDataParallel(seeded(convnet()))
    layers = model.module[:2], model.module[4]
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.05) for layer in layers)
    torchcomp.LocalSGD(model, [first, second], ["every(2)", "every(3)"], total_steps=6)
    before, after = [], []
    for step in range(6):
        first.zero_grad(), second.zero_grad()
        loss_of(model, *batch(dist.get_rank(), step, IMAGE)).backward()
        before.append(running_statistics(model))
        first.step(), second.step()
        after.append(running_statistics(model))
    return before, after


@pytest.mark.parametrize(
    ("run", "averages"),
    [
        (around_the_averages, (2, 4)),
        (partial(around_the_averages, compress="ef(topk(0.1))"), (2, 4)),
        (partial(around_the_averages, overlap=True), (2, 4)),
        (partial(around_the_averages, moments="average"), (2, 4)),
        (partial(around_the_averages, frozen=True), ()),
        (with_two_schedules, (2, 3, 4, 6)),
        # With every(2), one of two fragments synchronises after each step.
        (partial(around_the_averages, fragments=2), (1, 2, 3, 4)),
    ],
)
def test_running_statistics_are_averaged_whenever_a_part_of_the_model_is(run, averages):
    runs = on_threads(3, run)
    for step, (*befores,) in enumerate(zip(*(before for before, _ in runs), strict=True), 1):
        afters = [after[step - 1] for _, after in runs]
        wanted = [torch.stack(befores).mean(0)] * 3 if step in averages else befores
        assert equal_on_all(befores) == (averages == ())
        assert_close(torch.stack(afters), torch.stack(wanted))


def test_statistics_that_are_not_finite_raise_on_all_ranks():
    def body():
        script = Script("every(2)", total_steps=4, build=convnet, shape=IMAGE)
        script.step(0)
        if script.rank == 1:
            script.model.module[1].running_var[2] = float("nan")
        script.step(1)

    assert_refused(3, body, torchcomp.NonFiniteError, "1.running_var")


def test_an_evaluation_inside_a_round_is_explained_once(caplog):
    def body():
        script = Script("every(2)", total_steps=6, build=convnet, shape=IMAGE)
        for step in range(6):
            script.step(step)
            script.model.eval()
            with torch.no_grad():
                script.model(torch.zeros(1, *IMAGE, dtype=torch.float64))
            script.model.train()

    on_threads(2, body)
    (said,) = [each.getMessage() for each in caplog.records if "next_sync" in each.getMessage()]
    assert "step 1" in said
    assert "step 2" in said


# --- Parameters -----------------------------------------------------------------------------------


def test_frozen_parameters_are_left_alone():
    def first_layer():
        script = Script("every(2)", total_steps=2, build=half_frozen)
        layer = script.model.module[0]
        nn.init.constant_(layer.weight, script.rank)
        script.train(0, 2)
        return layer.weight.unique().tolist(), flat(script.model.module[2].parameters())

    outcomes = on_threads(3, first_layer)
    assert [frozen for frozen, _ in outcomes] == [[0.0], [1.0], [2.0]]
    assert equal_on_all(trained for _, trained in outcomes)


def test_channels_last_weights_are_averaged_element_by_element():
    def run(memory_format):
        build = lambda: convnet().to(memory_format=memory_format)  # noqa: E731
        script = Script("every(2)", total_steps=4, build=build, shape=IMAGE)
        weights = script.train(0, 4)
        assert script.model.module[0].weight.is_contiguous(memory_format=memory_format)
        return weights

    contiguous = on_threads(3, run, torch.contiguous_format)
    channels_last = on_threads(3, run, torch.channels_last)
    assert synchronised_steps(channels_last) == [2, 4]
    for mine, wanted in zip(channels_last, contiguous, strict=True):
        assert_close(torch.stack(mine), torch.stack(wanted))


def averaged_bfloat16():
    """bfloat16 weights that differ between ranks, before and after one average."""
    model = DistributedDataParallel(nn.Linear(40, 10).bfloat16())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torchcomp.LocalSGD(model, optimizer, "every(1)", total_steps=1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with torch.no_grad():
        model.module.weight.copy_(torch.randn(10, 40, generator=generator))
    before = model.module.weight.detach().clone()
    optimizer.step()
    return before, model.module.weight.detach()


def test_bfloat16_weights_are_averaged_in_float32():
    before, after = zip(*on_threads(3, averaged_bfloat16), strict=True)
    exact = torch.stack(before).double().mean(0)
    # The bound of a single rounding to bfloat16. An average in bfloat16 rounds several times.
    bound = 0.501 * 2.0 ** (exact.frexp().exponent - 8)
    assert equal_on_all(after)
    assert ((after[0].double() - exact).abs() <= bound).all()
    coarse = before[0] / 3 + before[1] / 3 + before[2] / 3
    assert ((coarse.double() - exact).abs() > bound).any(), "the values cannot tell the two apart"


# --- Learning rates -------------------------------------------------------------------------------


def two_groups(parameters, lrs):
    halves = parameters[:2], parameters[2:]
    groups = [{"params": half, "lr": lr} for half, lr in zip(halves, lrs, strict=True)]
    return torch.optim.SGD(groups)


@pytest.mark.parametrize(
    "lrs", [(0.1, 0.01), (0.01, 0.1), (torch.tensor(0.1, dtype=torch.float64), 0.01)]
)
def test_the_schedule_reads_the_largest_learning_rate_of_all_groups(lrs):
    def body():
        script = Script(spec=None)
        optimizer = two_groups(list(script.model.parameters()), lrs)
        spec, seen = "qsr(alpha=0.2, h_base=2)", []
        sync = torchcomp.LocalSGD(script.model, optimizer, spec, total_steps=10)
        for _ in range(10):
            optimizer.step()
            seen.append(sync.next_sync)
        return seen

    # H = 4 at 0.1, and 400 at 0.01.
    assert on_threads(2, body) == [[4, 4, 4, None, 8, 8, 8, None, 10, None]] * 2


# --- Scripts that do more than step ---------------------------------------------------------------


def set_the_flag(model, last):
    """nanoGPT does this to accumulate gradients without no_sync()."""
    model.require_backward_grad_sync = last


def trigger(model, last):
    """Accelerate's trigger_sync_in_backward does this between the two passes."""
    if last:
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        model.reducer.prepare_for_backward([])


def nothing(model, last):
    pass


def accumulated(idiom, no_sync=False):
    script, weights = Script("every(2)", total_steps=5), []
    forward = script.model.module.register_forward_hook
    for step in range(5):
        script.optimizer.zero_grad()
        for micro in range(3):
            last = micro == 2
            idiom(script.model, last)
            between = forward(lambda *_, last=last: idiom(script.model, last))
            with script.model.no_sync() if no_sync and not last else nullcontext():
                script.backward(10 * step + micro)
            between.remove()
        script.optimizer_step()
        weights.append(script.weights())
        script.scheduler.step()
    return weights


@pytest.mark.parametrize(
    ("idiom", "no_sync"), [(nothing, True), (set_the_flag, False), (trigger, False)]
)
def test_gradients_may_be_accumulated_in_any_way(idiom, no_sync):
    runs = on_threads(3, accumulated, idiom, no_sync)
    assert synchronised_steps(runs) == [2, 4, 5]
    for mine, wanted in zip(runs, on_threads(3, accumulated, nothing), strict=True):
        assert torch.equal(torch.stack(mine), torch.stack(wanted))


def test_what_is_not_training_does_not_touch_the_clock():
    def body():
        other = mlp()
        other_optimizer = torch.optim.SGD(other.parameters(), lr=constant(0))
        script, weights, inputs = Script("every(2)", total_steps=4), [], batch(0, 0)[0]
        for step in range(4):
            other_optimizer.step()
            weights.append(script.step(step))
            if script.rank == 0:
                # torch.optim.swa_utils.AveragedModel(model) makes such a copy.
                copy.deepcopy(script.model).module(inputs)
                with torch.no_grad():
                    script.model(inputs)
                script.model.eval()
                script.model(inputs)
                script.model.train()
        return weights

    assert synchronised_steps(on_threads(2, body)) == [2, 4]
