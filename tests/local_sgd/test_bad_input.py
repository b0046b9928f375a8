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
from tests.local_sgd.script import Script, mlp, sgd, synchronised_steps, trained
from tests.support.cases import thorough
from tests.support.models import seeded
from tests.support.outcomes import assert_refused
from tests.support.ranks import on_threads
from torchcomp import RankMismatchError, SpecError, UnsupportedModelError
from torchcomp.local_sgd import Nesterov, SlowMo


def construct(change):
    """Build LocalSGD with the arguments that `change`, of the model and the rank, replaces."""
    model = DistributedDataParallel(seeded(mlp()))
    arguments = {"model": model, "optimizer": sgd(model.parameters())}
    arguments |= {"spec": "every(2)", "total_steps": 8}
    arguments |= change(model, dist.get_rank()) if callable(change) else change
    torchcomp.LocalSGD(**arguments)


class Wrapper(torch.optim.Optimizer):
    """Does not call its parent's constructor, as torch's PostLocalSGDOptimizer."""

    def __init__(self, inner):
        self.optim = inner


Zero = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})


class WithoutLR(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for each in self.param_groups:
            for parameter in each["params"]:
                parameter.sub_(parameter.grad, alpha=0.1)


def without_lr(group, change):
    return lambda model, rank: {"optimizer": WithoutLR(model.parameters(), group), **change}


def layers(*chosen, kind=sgd, count=1):
    """Change the optimizers to one for each of these layers."""
    return lambda model, rank: {
        "optimizer": [kind(model.module[each].parameters()) for each in chosen] * count
    }


def with_spec(change, spec):
    return lambda model, rank: change(model, rank) | {"spec": spec}


QSR = "qsr(alpha=0.1, h_base=2)"
OVERLAP = {"overlap": True}
# What changes, the option that the error is about, and names and values in the error.
REFUSED = [
    ({"optimizer": None}, "optimizer", "NoneType"),
    ({"optimizer": []}, "optimizer"),
    ({"optimizer": "adam"}, "optimizer", "str"),
    ({"optimizer": sgd(mlp().parameters())}, "optimizer", "SGD", "model.parameters()"),
    (layers(0, count=2), "optimizer", "SGD, SGD"),
    (lambda model, _: {"optimizer": Wrapper(sgd(model.parameters()))}, "optimizer", "Wrapper"),
    (lambda model, _: {"optimizer": Zero(model.parameters(), lr=1)}, "optimizer", "torch.optim"),
    *(
        (without_lr(group, change), "optimizer", "'lr'", "every(8)")
        for group in ({"lr": None}, {"learning_rate": 0.1})
        for change in ({"spec": QSR}, {"outer": "slowmo()"})
    ),
    (with_spec(layers(0, 2), ["every(3)"]), "spec", "1 schedule", "2 optimizers"),
    (with_spec(layers(0, 2), ["every(3)"] * 3), "spec", "3 schedules", "2 optimizers"),
    (with_spec(layers(0, 2), ["every(3)", "ef(topk(0.1))"]), None, "'ef(topk(0.1))'"),
    (with_spec(layers(0, 0), ["every(3)", "every(2)"]), "spec", "'0.bias'"),
    ({"spec": "ef(topk(0.01))"}, None, "ef(topk(0.01))", "register"),
    ({"spec": "mean"}, None, "mean"),
    ({"spec": "evry(2)"}, None, "evry"),
    ({"spec": "every(0)"}, None, "h", "0"),
    ({"spec": 4}, None, "4"),
    ({"spec": "swap(switch=8)"}, "switch", "8"),
    *(({"total_steps": bad}, "total_steps", repr(bad)) for bad in (0, -5, 10.5, None, "10", True)),
    *(({"warmup_steps": bad}, "warmup_steps", repr(bad)) for bad in (-1, 0.5, None)),
    ({"warmup_steps": 9}, None, "warmup_steps", "8", "9"),
    ({"scaler": "scaler"}, None, "GradScaler", "str"),
    *(({"compress": bad}, "compress", repr(bad)) for bad in (None, 0.01, ["mean"])),
    ({"compress": "every(4)"}, None, "'every(4)'"),
    ({"compress": "ef(topkk(0.1))"}, None, "'topkk'"),
    ({"outer": torch.optim.SGD}, None, "torch.optim.sgd.SGD"),
    ({"outer": "topk(0.1)"}, None, "topk(0.1)"),
    ({"outer": "slowmow"}, None, "'slowmo'"),
    *(({"moments": bad}, "moments", '"average"', repr(bad)) for bad in ("mean", None, True)),
    *(({"fragments": bad}, "fragments", repr(bad)) for bad in (0, -1, 2.0, True, None, "2")),
    ({"fragments": 5}, "fragments", "5", "4"),
    *(({"overlap": bad}, "overlap", repr(bad)) for bad in ("yes", 1, None)),
    ({"compress": "ef(topk(0.1))", **OVERLAP}, "overlap", "compress='mean'"),
    ({"outer": Nesterov(), **OVERLAP}, "overlap", "compress='mean'"),
    *(({"seed": bad}, None, "seed", repr(bad)) for bad in (-1, 0.5, True, None)),
]


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_are_refused(case):
    change, field, *words = case
    assert_refused(2, partial(construct, change), SpecError, *words, field=field)


def of_module(build):
    def change(model, rank):
        other = DistributedDataParallel(build())
        return {"model": other, "optimizer": sgd(other.parameters())}

    return change


def with_first_weight(values):
    def change(model, rank):
        model.module[0].weight = nn.Parameter(values())
        return {"optimizer": sgd(model.parameters())}

    return change


def registered(model, rank):
    torchcomp.register(model, "ef(topk(0.1))")
    return {}


def with_local_steps(model, rank):
    torchcomp.LocalSGD(model, sgd(model.parameters()), "every(3)", total_steps=4)
    return {}


UNSUPPORTED = [
    *(({"model": bad}, "DistributedDataParallel", type(bad).__name__) for bad in (mlp(), None, "")),
    (of_module(partial(nn.Linear, 2, 2, dtype=torch.complex64)), "'weight'", "torch.complex64"),
    (of_module(partial(nn.Embedding, 4, 2, sparse=True)), "sparse=True"),
    (with_first_weight(lambda: torch.empty(3, 6, device="meta")), "'0.weight'", "meta"),
    (with_first_weight(lambda: torch.eye(6).to_sparse()), "'0.weight'", "sparse_coo"),
    (registered, "torchcomp.register", "LocalSGD(..., compress='ef(topk(0.01))')"),
    (lambda model, rank: model.register_comm_hook(None, allreduce_hook) or {}, "allreduce_hook"),
    (with_local_steps, "LocalSGD('every(3)')", "close()"),
    (lambda model, rank: {"model": DistributedDataParallel(mlp(), static_graph=True)}, "static"),
]


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_models_that_are_refused(case):
    change, *words = case
    assert_refused(2, partial(construct, change), UnsupportedModelError, *words)


def names_in_another_order(model, rank):
    names = ["a", "b"] if rank else ["b", "a"]
    return of_module(lambda: nn.ModuleDict({name: nn.Linear(2, 2) for name in names}))(model, rank)


def widths(model, rank):
    other = DistributedDataParallel(mlp(8 + rank), init_sync=False)
    return {"model": other, "optimizer": sgd(other.parameters())}


# What rank 1 passes instead, and what is in the error of all ranks.
DIFFERENCES = [
    ({"spec": "every(3)"}, "every(2) on ranks 0, 2", "every(3) on rank 1"),
    ({"total_steps": 9}, "8 on ranks 0, 2", "9 on rank 1"),
    ({"warmup_steps": 2}, "0 on ranks 0, 2", "2 on rank 1"),
    ({"compress": "ef(topk(0.2))"}, "mean on ranks 0, 2", "ef(topk(0.2)) on rank 1"),
    ({"outer": SlowMo()}, "None on ranks 0, 2", "slowmo on rank 1"),
    ({"total_steps": -3}, "on rank 1", "-3"),
    ({"spec": "evry(2)"}, "on rank 1", "evry"),
    ({"optimizer": None}, "on rank 1", "NoneType"),
    (names_in_another_order, "a.weight"),
    *[(widths, "(8, 6)", "(9, 6)")]
    * ("init_sync" in signature(DistributedDataParallel).parameters),
]


@pytest.mark.parametrize("case", DIFFERENCES)
def test_arguments_that_differ_between_ranks(case):
    change, *words = case
    apply = change if callable(change) else lambda model, rank: change if rank == 1 else {}
    assert_refused(3, partial(construct, apply), RankMismatchError, *words)


# --- Learning rates -------------------------------------------------------------------------------

EVERY, GROWING = "every(3)", "qsr(alpha=0.01, h_base=3)"
IMPOSSIBLE = [(spec, bad) for spec in (EVERY, GROWING) for bad in (-0.1, math.nan, math.inf)]


@pytest.mark.parametrize("start", [3, *thorough([0])])
@pytest.mark.parametrize(("spec", "bad"), [*IMPOSSIBLE, (GROWING, 0)])
def test_an_impossible_learning_rate_at_the_start_of_a_round(spec, bad, start):
    def body():
        script = Script(spec, lr=lambda step: bad if step == start else 0.1)
        script.train(0, start)
        untouched = script.weights()
        try:
            script.step(start)
        finally:
            assert torch.equal(script.weights(), untouched)

    words = ("learning rate", f"step {start}", repr(bad))
    assert_refused(2, body, torchcomp.ScheduleError, *words)


@pytest.mark.parametrize(
    ("spec", "warmup", "lrs"),
    [(EVERY, 0, (0.0, 0.1)), (GROWING, 1, (0.0, 0.1)), (EVERY, 0, (0.1, 0.0))],
)
def test_a_learning_rate_of_zero_in_warm_up_or_within_a_round_is_no_error(spec, warmup, lrs):
    options = {"total_steps": 6, "warmup_steps": warmup, "lr": lambda step: lrs[step % 3 > 0]}
    assert 3 in synchronised_steps(on_threads(2, partial(trained, 3, spec=spec, **options)))


LR_DIFFERENCES = [
    (EVERY, lambda step, rank: 0.1 + 0.01 * rank, "[[0.1]] on rank 0", "[[0.11]] on rank 1"),
    # H = 4 at 0.1, and 16 at 0.05.
    ("qsr(alpha=0.2, h_base=2)", lambda _, rank: 0.1 - 0.05 * rank, "0 to 4 on", "0 to 16 on"),
    # The first steps are equal.
    (EVERY, lambda step, rank: 0.05 * (1 + step * rank), "[0.15", "[0.3"),
]


@pytest.mark.parametrize(("spec", "lr", "here", "there"), LR_DIFFERENCES)
def test_learning_rates_that_differ_between_ranks(spec, lr, here, there):
    def body():
        rank = dist.get_rank()
        script = Script(spec, total_steps=20, lr=lambda step: lr(step, rank))
        untouched = script.weights()
        try:
            script.train(0, 3)
        finally:
            # Equal first steps show nothing before the synchronisation.
            assert torch.equal(script.weights(), untouched) == (lr(0, 0) != lr(0, 1))

    assert_refused(2, body, RankMismatchError, here, there, "on rank 1")


def test_an_optimizer_without_a_learning_rate_where_none_is_read():
    optimizer = lambda parameters: WithoutLR(parameters, {"lr": 0.1})  # noqa: E731

    def body():
        script = Script(spec=None, optimizer=optimizer)
        del script.optimizer.param_groups[0]["lr"]
        torchcomp.LocalSGD(script.model, script.optimizer, "every(2)", total_steps=4)
        script.scheduler.step = lambda: None
        return script.train(0, 4)

    assert synchronised_steps(on_threads(2, body)) == [2, 4]


# --- Steps ----------------------------------------------------------------------------------------


def test_a_method_registered_on_a_model_with_local_steps():
    def body():
        torchcomp.register(Script("every(2)").model, "ef(topk(0.1))")

    assert_refused(2, body, UnsupportedModelError, "LocalSGD('every(2)')", "close()")


def test_uneven_inputs_of_join():
    def body():
        script = Script("every(2)")
        with script.model.join():
            script.step(0)

    assert_refused(2, body, UnsupportedModelError, "join()")


def test_beyond_the_announced_end_the_ranks_average_after_every_step(caplog):
    """nanoGPT takes max_iters + 1 steps. Numbers of steps can be whole floats."""

    def body():
        script = Script("every(4)", total_steps=np.float64(6), warmup_steps=0.0)
        weights = script.train(0, 9)
        # The checkpoint of such a run can be resumed.
        again = Script("every(4)", total_steps=6)
        again.load(script.save())
        weights += again.train(9, 11)
        return weights, again.sync.stats

    runs = on_threads(2, body)
    assert synchronised_steps([weights for weights, _ in runs]) == [4, 6, 7, 8, 9, 10, 11]
    assert [(stats.steps, stats.syncs) for _, stats in runs] == [(11, 7)] * 2
    (said,) = [each.getMessage() for each in caplog.records if "=6" in each.getMessage()]
    assert "step 7" in said
