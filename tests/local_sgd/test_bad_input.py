"""Bad input to local steps raises on every rank, with the reason and without a hang."""

import math
from functools import partial
from inspect import signature

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.local_sgd.script import Script, mlp, momentum, sgd, spied, synchronised_steps, trained
from tests.support.cases import thorough
from tests.support.logs import messages_of
from tests.support.models import seeded
from tests.support.outcomes import assert_refused
from tests.support.ranks import on_threads


def construct(change):
    """Build LocalSGD with arguments replaced by those that `change(model, rank)` returns."""
    model = DistributedDataParallel(mlp())
    arguments = {
        "model": model,
        "optimizer": sgd(model.parameters()),
        "spec": "every(2)",
        "total_steps": 8,
    }
    arguments |= change(model, dist.get_rank())
    torchcomp.LocalSGD(**arguments)


def assert_constructor_refuses(change, error, *words, world_size=2, field=None):
    assert_refused(world_size, partial(construct, change), error, *words, field=field)


@pytest.mark.parametrize("value", [mlp(), None, "model"])
def test_a_model_that_is_not_ddp(value):
    assert_constructor_refuses(
        lambda model, rank: {"model": value},
        torchcomp.UnsupportedModelError,
        "DistributedDataParallel",
        type(value).__name__,
    )


def test_an_optimizer_of_another_model():
    assert_constructor_refuses(
        lambda model, rank: {"optimizer": sgd(mlp().parameters())},
        torchcomp.SpecError,
        "SGD",
        "model.parameters()",
    )


@pytest.mark.parametrize("value", [None, mlp(), "adam"])
def test_something_that_is_not_an_optimizer(value):
    assert_constructor_refuses(
        lambda model, rank: {"optimizer": value},
        torchcomp.SpecError,
        "torch.optim.Optimizer",
        type(value).__name__,
    )


@pytest.mark.parametrize("spec", ["ef(topk(0.01))", "topk(0.01)", "mean"])
def test_a_gradient_method_instead_of_a_schedule(spec):
    assert_constructor_refuses(
        lambda model, rank: {"spec": spec},
        torchcomp.SpecError,
        spec,
        "torchcomp.register",
        "every(4)",
    )


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("evry(4)", "'every'"),
        ("every(0)", "every: h"),
        ("every(2.5)", "every: h"),
        ("every(h=True)", "every: h"),
        ("every(period=2)", "'period'"),
        ("qsr(alpha=0, h_base=4)", "qsr: alpha"),
        ("qsr(alpha=nan, h_base=4)", "qsr: alpha"),
        ("qsr(alpha=inf, h_base=4)", "qsr: alpha"),
        ("qsr(alpha=0.1, h_base=0)", "qsr: h_base"),
        ("qsr(0.1)", "'h_base'"),
        ("", "empty"),
    ],
)
def test_a_schedule_that_cannot_be_built(spec, word):
    change = {"spec": spec}
    assert_constructor_refuses(lambda model, rank: change, torchcomp.SpecError, word)


@pytest.mark.parametrize("total", [0, -1, 8.5, math.inf, "8", None, True])
def test_an_invalid_number_of_steps(total):
    change = {"total_steps": total}
    assert_constructor_refuses(
        lambda model, rank: change, torchcomp.SpecError, repr(total), field="total_steps"
    )


@pytest.mark.parametrize("warmup", [-1, 2.5, None, True])
def test_an_invalid_warm_up(warmup):
    change = {"warmup_steps": warmup}
    assert_constructor_refuses(
        lambda model, rank: change, torchcomp.SpecError, repr(warmup), field="warmup_steps"
    )


def test_a_warm_up_longer_than_the_run():
    assert_constructor_refuses(
        lambda model, rank: {"warmup_steps": 9}, torchcomp.SpecError, "9", "8"
    )


def test_total_steps_is_required():
    def body():
        model = DistributedDataParallel(mlp())
        torchcomp.LocalSGD(model, sgd(model.parameters()), "every(2)")

    assert_refused(2, body, TypeError, "total_steps")


CHANGES_OF_RANK_1 = {
    "spec": ({"spec": "every(3)"}, "every(2) on ranks 0, 2", "every(3) on rank 1"),
    "total_steps": ({"total_steps": 9}, "8 on ranks 0, 2", "9 on rank 1"),
    "warmup_steps": ({"warmup_steps": 2}, "0 on ranks 0, 2", "2 on rank 1"),
    "wrong": ({"total_steps": -3}, "on rank 1", "-3"),
    "misspelt": ({"spec": "evry(2)"}, "on rank 1", "evry"),
    "no-optimizer": ({"optimizer": None}, "on rank 1", "NoneType"),
}


@pytest.mark.parametrize("which", CHANGES_OF_RANK_1)
def test_arguments_that_differ_between_ranks(which):
    changes, *words = CHANGES_OF_RANK_1[which]
    assert_constructor_refuses(
        lambda model, rank: changes if rank == 1 else {},
        torchcomp.RankMismatchError,
        *words,
        world_size=3,
    )


def test_zero_redundancy_optimizer():
    kind = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})
    assert_constructor_refuses(
        lambda model, rank: {"optimizer": kind(model.parameters(), lr=0.1)},
        torchcomp.SpecError,
        "ZeroRedundancyOptimizer",
        "torch.optim",
    )


def test_an_optimizer_that_wraps_another():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner

    assert_constructor_refuses(
        lambda model, rank: {"optimizer": Wrapper(sgd(model.parameters()))},
        torchcomp.SpecError,
        "Wrapper",
        "optimizer.inner",
        "LocalSGD",
    )


@pytest.mark.parametrize("value", [None, 0.01, ["mean"]])
def test_a_compress_that_is_not_a_spec(value):
    assert_constructor_refuses(
        lambda model, rank: {"compress": value}, torchcomp.SpecError, repr(value), field="compress"
    )


def without_lr(parameters, **group):
    class WithoutLR(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for each in self.param_groups:
                for parameter in each["params"]:
                    parameter.sub_(parameter.grad, alpha=0.1)

    return WithoutLR(parameters, group)


@pytest.mark.parametrize("group", [{"lr": None}, {"learning_rate": 0.1}])
@pytest.mark.parametrize("change", [{"spec": "qsr(alpha=0.1, h_base=2)"}, {"outer": "slowmo()"}])
def test_an_optimizer_without_a_learning_rate_where_one_is_read(group, change):
    def changes(model, rank):
        return {"optimizer": without_lr(model.parameters(), **group), **change}

    words = ("'lr'", "WithoutLR (optimizer 0)", "every(8)")
    assert_constructor_refuses(changes, torchcomp.SpecError, *words, field="optimizer")


@pytest.mark.parametrize("group", [{"lr": None}, {"learning_rate": 0.1}])
def test_an_optimizer_without_a_learning_rate_where_none_is_read(group):
    def body():
        script, seen = Script(spec=None), []
        optimizer = without_lr(script.model.parameters(), **group)
        torchcomp.LocalSGD(script.model, optimizer, "every(2)", total_steps=4)
        for step in range(4):
            optimizer.zero_grad()
            script.backward(step)
            optimizer.step()
            seen.append(script.weights())
        return seen

    assert synchronised_steps(on_threads(2, body)) == [2, 4]


def test_two_ddp_models_of_one_module():
    def body():
        script = Script("every(2)")
        second = DistributedDataParallel(script.model.module)
        torchcomp.LocalSGD(second, script.optimizer, "every(2)", total_steps=4)

    words = ("torchcomp.LocalSGD", "DistributedDataParallel", "close()")
    assert_refused(2, body, torchcomp.UnsupportedModelError, *words)


def test_local_steps_twice_on_one_model():
    def body():
        script = Script("every(2)")
        torchcomp.LocalSGD(script.model, script.optimizer, "every(3)", total_steps=4)

    assert_refused(2, body, torchcomp.UnsupportedModelError, "LocalSGD('every(2)')", "close()")


def test_local_steps_on_a_registered_model():
    def body():
        script = Script(spec=None)
        torchcomp.register(script.model, "ef(topk(0.1))")
        torchcomp.LocalSGD(script.model, script.optimizer, "every(3)", total_steps=4)

    assert_refused(2, body, torchcomp.UnsupportedModelError, "register", "ef(topk(0.1))")


def test_a_method_registered_on_a_model_with_local_steps():
    def body():
        torchcomp.register(Script("every(2)").model, "ef(topk(0.1))")

    assert_refused(2, body, torchcomp.UnsupportedModelError, "LocalSGD('every(2)')", "close()")


def test_a_model_with_a_communication_hook():
    def hooked(model, rank):
        model.register_comm_hook(None, allreduce_hook)
        return {}

    assert_constructor_refuses(hooked, torchcomp.UnsupportedModelError, "allreduce_hook")


def test_a_communication_hook_that_comes_after_local_steps():
    def body():
        script = Script("every(2)")
        script.model.register_comm_hook(None, allreduce_hook)
        script.step(0)

    words = ("allreduce_hook", "LocalSGD(..., compress=")
    assert_refused(2, body, torchcomp.UnsupportedModelError, *words)


def of_module(module):
    def change(model, rank):
        other = DistributedDataParallel(module())
        return {"model": other, "optimizer": sgd(other.parameters())}

    return change


def test_complex_parameters():
    module = partial(nn.Linear, 2, 2, dtype=torch.complex64)
    words = ("'weight'", "torch.complex64")
    assert_constructor_refuses(of_module(module), torchcomp.UnsupportedModelError, *words)


def test_sparse_gradients():
    module = partial(nn.Embedding, 4, 2, sparse=True)
    assert_constructor_refuses(of_module(module), torchcomp.UnsupportedModelError, "sparse=True")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (lambda: torch.empty(3, 6, device="meta"), ("'0.weight'", "meta")),
        (lambda: torch.eye(6).to_sparse(), ("'0.weight'", "sparse_coo")),
    ],
    ids=["meta", "sparse"],
)
def test_a_parameter_without_dense_values(values, words):
    def change(model, rank):
        model.module[0].weight = nn.Parameter(values())
        return {"optimizer": sgd(model.parameters())}

    assert_constructor_refuses(change, torchcomp.UnsupportedModelError, *words)


@pytest.mark.skipif(
    "init_sync" not in signature(DistributedDataParallel).parameters,
    reason="this torch's DDP compares the shapes itself",
)
def test_parameters_whose_shapes_differ_between_ranks():
    def change(model, rank):
        other = DistributedDataParallel(mlp(8 + rank), init_sync=False)
        return {"model": other, "optimizer": sgd(other.parameters())}

    words = ("parameters", "(8, 6)", "(9, 6)", "on rank 0", "on rank 1")
    assert_constructor_refuses(change, torchcomp.RankMismatchError, *words)


@pytest.mark.parametrize("lrs", [0.1, 0.05])
def test_learning_rates_that_differ_between_ranks_are_found_before_the_first_step(lrs):
    def body():
        # This schedule does not read learning rates, but with unequal ones momentum would differ.
        script = Script("every(3)", lr=lambda step: lrs + 0.01 * dist.get_rank())
        untouched = script.weights()
        with pytest.raises(torchcomp.RankMismatchError) as raised:
            script.step(0)
        assert torch.equal(script.weights(), untouched)
        return str(raised.value)

    for message in on_threads(2, body):
        for word in (f"[[{lrs}]] on rank 0", f"[[{lrs + 0.01}]] on rank 1"):
            assert word in message


@pytest.mark.parametrize("overlap", [{}, {"overlap": True}])
def test_the_error_about_a_registered_model_names_the_option_to_use_instead(overlap):
    def body():
        script = Script(spec=None)
        torchcomp.register(script.model, "ef(topk(0.1))")
        arguments = {"total_steps": 4} | overlap
        torchcomp.LocalSGD(script.model, script.optimizer, "every(3)", **arguments)

    words = ("torchcomp.register", "LocalSGD(..., compress='ef(topk(0.01))')")
    assert_refused(2, body, torchcomp.UnsupportedModelError, *words)


def test_a_static_graph():
    body = partial(Script, "every(2)", static_graph=True)
    assert_refused(2, body, torchcomp.UnsupportedModelError, "static_graph=True")


def test_uneven_inputs_of_join():
    def body():
        script = Script("every(2)")
        with script.model.join():
            script.step(0)

    assert_refused(2, body, torchcomp.UnsupportedModelError, "join()")


EVERY, QSR = "every(3)", "qsr(alpha=0.01, h_base=3)"
IMPOSSIBLE_LRS = [(spec, bad) for spec in (EVERY, QSR) for bad in (-0.1, math.nan, math.inf)]


@pytest.mark.parametrize("start", [3, *thorough([0])])
@pytest.mark.parametrize(("spec", "bad"), [*IMPOSSIBLE_LRS, (QSR, 0)])
def test_an_impossible_learning_rate_at_the_start_of_a_round(spec, bad, start):
    def body():
        script = Script(spec, lr=lambda step: bad if step == start else 0.1)
        script.train(0, start)
        untouched = script.weights()
        with pytest.raises(torchcomp.ScheduleError) as raised:
            script.step(start)
        assert torch.equal(script.weights(), untouched)
        return str(raised.value)

    for message in on_threads(2, body):
        for word in ("learning rate", f"step {start}", repr(bad)):
            assert word in message


@pytest.mark.parametrize(("spec", "warmup"), [(EVERY, 0), (QSR, 1)])
def test_a_warm_up_may_begin_at_a_learning_rate_of_zero(spec, warmup):
    options = {"total_steps": 6, "warmup_steps": warmup, "lr": lambda step: 0.1 * min(step, 1)}
    runs = on_threads(2, partial(trained, 6, spec=spec, **options))
    assert 3 in synchronised_steps(runs)


def test_a_learning_rate_of_zero_within_a_round_is_no_error():
    lr = [0.1, 0.0, 0.1, 0.1, 0.1].__getitem__
    on_threads(2, partial(trained, 4, spec="every(2)", lr=lr, total_steps=4))


def test_beyond_the_announced_end_the_ranks_average_after_every_step(caplog):
    """nanoGPT takes max_iters + 1 steps."""

    def body():
        script = Script("every(4)", total_steps=6)
        weights = script.train(0, 9)
        # The checkpoint of such a run can be resumed.
        again = Script("every(4)", total_steps=6)
        again.load(script.save())
        weights += again.train(9, 11)
        return weights, again.sync.stats

    runs = on_threads(2, body)
    assert synchronised_steps([weights for weights, _ in runs]) == [4, 6, 7, 8, 9, 10, 11]
    assert [(stats.steps, stats.syncs) for _, stats in runs] == [(11, 7)] * 2
    said = [each.getMessage() for each in caplog.records if "total_steps=6" in each.getMessage()]
    assert len(said) == 1
    assert "step 7" in said[0]


RARE = [
    # (alpha / lr)^2 = 16 steps at the peak, 36 = 16 + 16 + 4.
    ("qsr(alpha=0.2, h_base=4)", 36, {"lr": 0.05}, ["at most 3 ", "36 steps", "0.05", "16 steps"]),
    ("qsr(alpha=0.2, h_base=4)", 36, {"lr": 1e-6, "initial_lr": 0.05}, ["at most 3 ", "0.05"]),
    # h_base sets the length, not alpha: (alpha / lr)^2 = 4.
    ("qsr(alpha=0.2, h_base=4)", 36, {"lr": 0.1}, None),
    ("qsr(alpha=0.2, h_base=4)", 160, {"lr": 0.05}, None),
    ("every(18)", 36, {"lr": 0.05}, None),
]


@pytest.mark.parametrize(("spec", "total", "group", "words"), RARE)
def test_a_schedule_that_hardly_ever_averages_says_so_at_construction(
    caplog, spec, total, group, words
):
    def body():
        model = DistributedDataParallel(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer.param_groups[0] |= group
        torchcomp.LocalSGD(model, optimizer, spec, total_steps=total)

    on_threads(2, body)
    said = [message for message in messages_of("local_sgd", caplog) if spec in message]
    assert len(said) == (words is not None)
    for word in words or ():
        assert word in said[0]


@pytest.mark.parametrize("number", [float, np.float64])
def test_whole_floats_are_numbers_of_steps(number):
    body = partial(trained, 6, spec="every(4)", total_steps=number(6), warmup_steps=number(0))
    assert synchronised_steps(on_threads(2, body)) == [4, 6]


def test_learning_rates_that_differ_between_ranks():
    def body():
        # H = 4 at 0.1, and 16 at 0.05.
        lr = 0.05 if dist.get_rank() == 1 else 0.1
        trained(20, spec="qsr(alpha=0.2, h_base=2)", total_steps=20, lr=lambda step: lr)

    assert_refused(
        3, body, torchcomp.RankMismatchError, "0 to 4 on ranks 0, 2", "0 to 16 on rank 1"
    )


def test_learning_rates_that_begin_to_differ_within_a_round():
    def body():
        trained(4, spec="every(4)", lr=lambda step: 0.05 * (1 + step * dist.get_rank()))

    # Rank 0 adds up 4 x 0.05; the first steps are equal.
    assert_refused(2, body, torchcomp.RankMismatchError, "[0.2] on rank 0", "on rank 1")


def test_what_was_installed_is_undone_if_the_rest_fails(monkeypatch):
    def body():
        scaler = torch.amp.GradScaler("cpu")
        script = Script(spec=None, scaler=scaler, optimizer=sgd)
        before = sorted(vars(script.model)), script.model.require_backward_grad_sync
        with pytest.raises(KeyError):
            torchcomp.LocalSGD(
                script.model, script.optimizer, "every(2)", total_steps=4, scaler=scaler
            )
        hooks = script.optimizer._optimizer_step_pre_hooks, script.model._forward_pre_hooks
        assert not any(hooks)
        return before == (sorted(vars(script.model)), script.model.require_backward_grad_sync)

    monkeypatch.setattr("torchcomp.local_sgd.hooks.wrap_scaler", lambda *_: {}["no scaler"])
    assert on_threads(2, body) == [True, True]


def test_numbers_of_steps_that_differ_between_ranks():
    def body():
        script = Script("every(2)")
        for step in range(12):
            script.step(step)
            if (script.rank, step) == (1, 2):
                script.optimizer.step()

    words = ("forward passes", "0 on rank 0", "1 on rank 1")
    assert_refused(2, body, torchcomp.RankMismatchError, *words)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_parameters_that_are_not_finite_on_one_rank(bad):
    def poisoned():
        local = []
        options = {"optimizer": spied(momentum, lambda: local.append(script.weights()))}
        script = Script("every(3)", bucket_cap_mb=0.0002, **options)
        script.train(0, 2)
        if script.rank == 1:
            nn.init.constant_(script.model.module[0].bias[2:3].detach(), bad)
        with pytest.raises(torchcomp.NonFiniteError) as raised:
            script.step(2)
        averaged = not torch.equal(local[-1].nan_to_num(), script.weights().nan_to_num())
        return str(raised.value), averaged

    for message, averaged in on_threads(3, poisoned):
        assert "rank 1" in message
        assert "'0.bias'" in message
        assert "step 3" in message
        assert "rank 0" not in message
        assert not averaged


def test_parameters_of_one_model_that_differ_in_name_between_ranks():
    def body():
        names = ["a", "b"] if dist.get_rank() else ["b", "a"]
        module = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
        model = DistributedDataParallel(seeded(module))
        torchcomp.LocalSGD(model, sgd(model.parameters()), "every(2)", total_steps=4)

    assert_refused(2, body, torchcomp.RankMismatchError, "a.weight")
