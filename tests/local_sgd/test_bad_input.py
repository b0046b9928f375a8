"""Bad input to local steps raises on every rank, with the reason and without a hang."""

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.local_sgd.script import Script, batch, loss_of, mlp, sgd, synchronised_steps
from tests.support.models import seeded
from tests.support.outcomes import assert_refused, reloaded
from tests.support.ranks import on_threads
from torchcomp import RankMismatchError, ScheduleError, SpecError, UnsupportedModelError
from torchcomp.local_sgd import Nesterov
from torchcomp.local_sgd.schedules import Every


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


WithoutLR = type("WithoutLR", (torch.optim.Optimizer,), {})  # its groups need no learning rate


def optimizer(make, **change):
    return lambda model, rank: {"optimizer": make(model.parameters()), **change}


def of_module(build, **ddp):
    def change(model, rank):
        other = DistributedDataParallel(build(rank), **ddp)
        return {"model": other, "optimizer": sgd(other.parameters())}

    return change


def after(method):
    def change(model, rank):
        method(model)
        return {}

    return change


def on_rank_1(**change):
    return lambda model, rank: change if rank == 1 else {}


def of_names(rank):
    return nn.ModuleDict({name: nn.Linear(2, 2) for name in ("ba", "ab")[rank]})


QSR, OVERLAP = "qsr(alpha=0.1, h_base=2)", {"overlap": True}
EMBEDDING, COMPLEX = partial(nn.Embedding, 4, 2, sparse=True), partial(nn.Linear, 2, 2)
UNSUPPORTED, MISMATCH = UnsupportedModelError, RankMismatchError
# What changes, the type of the error, the option that it is about, and names and values in it.
REFUSED = [
    ({"optimizer": []}, SpecError, "optimizer"),
    ({"optimizer": sgd(mlp().parameters())}, SpecError, "optimizer", "SGD", "model.parameters()"),
    (lambda model, _: {"optimizer": [sgd(model.parameters())] * 2}, SpecError, "optimizer", "SGD"),
    (optimizer(lambda p: Wrapper(sgd(p))), SpecError, "optimizer", "Wrapper"),
    (optimizer(partial(Zero, lr=1)), SpecError, "optimizer", "torch.optim"),
    (optimizer(lambda p: WithoutLR(p, {"lr": None}), spec=QSR), SpecError, "optimizer", "'lr'"),
    (optimizer(lambda p: WithoutLR(p, {}), outer="slowmo()"), SpecError, "optimizer", "every(8)"),
    ({"spec": "ef(topk(0.01))"}, SpecError, None, "ef(topk(0.01))", "register"),
    ({"spec": "auto", **OVERLAP}, SpecError, "spec", "'auto'"),
    ({"spec": "swap(switch=8)"}, SpecError, "switch", "8"),
    *(({"total_steps": bad}, SpecError, "total_steps", repr(bad)) for bad in (0, 10.5, None)),
    ({"warmup_steps": -1}, SpecError, "warmup_steps", "-1"),
    ({"warmup_steps": 9}, SpecError, None, "warmup_steps", "8", "9"),
    ({"scaler": "scaler"}, SpecError, None, "GradScaler", "str"),
    ({"compress": None}, SpecError, "compress", "None"),
    ({"compress": "every(4)"}, SpecError, None, "'every(4)'"),
    ({"outer": torch.optim.SGD}, SpecError, None, "torch.optim.sgd.SGD"),
    ({"outer": "slowmo(beta=1.0)"}, SpecError, None, "slowmo: beta", "1.0"),
    ({"overlap": 1}, SpecError, "overlap", "1"),
    ({"compress": "ef(topk(0.1))", **OVERLAP}, SpecError, "overlap", "compress='mean'"),
    ({"outer": Nesterov(), **OVERLAP}, SpecError, "overlap", "compress='mean'"),
    ({"seed": -1}, SpecError, None, "seed", "-1"),
    # Models.
    *(({"model": bad}, UNSUPPORTED, None, type(bad).__name__) for bad in (mlp(), None)),
    (of_module(lambda _: COMPLEX(dtype=torch.complex64)), UNSUPPORTED, None, "torch.complex64"),
    (of_module(lambda _: EMBEDDING()), UNSUPPORTED, None, "sparse=True"),
    (after(lambda m: torchcomp.register(m, "ef(topk(0.1))")), UNSUPPORTED, None, "compress="),
    (after(lambda m: m.register_comm_hook(None, allreduce_hook)), UNSUPPORTED, None, "allreduce_h"),
    (
        after(lambda m: torchcomp.LocalSGD(m, sgd(m.parameters()), "every(3)", total_steps=4)),
        *(UNSUPPORTED, None, "LocalSGD('every(3)')", "close()"),
    ),
    (of_module(lambda _: mlp(), static_graph=True), UNSUPPORTED, None, "static"),
    # Ranks that differ.
    (on_rank_1(spec="every(3)"), MISMATCH, None, "every(2) on rank 0", "every(3) on rank 1"),
    (on_rank_1(compress="ef(topk(0.2))"), MISMATCH, None, "mean on rank 0", "ef(topk(0.2)) on"),
    (on_rank_1(total_steps=-3), MISMATCH, None, "on rank 1", "-3"),
    (of_module(of_names), MISMATCH, None, "a.weight"),
]


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_are_refused(case):
    change, error, field, *words = case
    assert_refused(2, partial(construct, change), error, *words, field=field)


# --- Learning rates -------------------------------------------------------------------------------

EVERY, GROWING = "every(3)", "qsr(alpha=0.01, h_base=3)"


@pytest.mark.parametrize(("spec", "bad"), [(EVERY, -0.1), (GROWING, math.nan), (GROWING, 0)])
def test_an_impossible_learning_rate_at_the_start_of_a_round(spec, bad):
    def body():
        script = Script(spec, lr=lambda step: bad if step == 3 else 0.1)
        script.train(0, 3)
        untouched = script.weights()
        try:
            script.step(3)
        finally:
            assert torch.equal(script.weights(), untouched)

    assert_refused(2, body, ScheduleError, "learning rate", "step 3", repr(bad))


LR_DIFFERENCES = [
    # H = 4 at 0.1, and 16 at 0.05.
    ("qsr(alpha=0.2, h_base=2)", lambda _, rank: 0.1 - 0.05 * rank, "0 to 4 on", "0 to 16 on"),
    # The first steps are equal.
    (EVERY, lambda step, rank: 0.05 * (1 + step * rank), "0.15", "0.3"),
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


# --- Steps ----------------------------------------------------------------------------------------


def registered_later():
    torchcomp.register(Script("every(2)").model, "ef(topk(0.1))")


def joined():
    script = Script("every(2)")
    with script.model.join():
        script.step(0)


def repeated(tries, **options):
    """Call sync.backward."""
    script = Script(**options)
    loss = lambda: loss_of(script.model, *batch(script.rank, 0))  # noqa: E731
    script.sync.backward(loss, tries=tries)


def of_other_weights():
    script = Script(local={"compress": "ef(topk(0.1))"})
    nn.init.constant_(script.model.module[0].bias.detach(), float(script.rank == 1))
    script.step(0)


SCALER = {"scaler": torch.amp.GradScaler("cpu", enabled=False)}
STEPS = [
    (registered_later, UNSUPPORTED, None, "LocalSGD('every(2)')", "close()"),
    (joined, UNSUPPORTED, None, "join()"),
    (partial(repeated, 3), SpecError, "scaler", "scaler=scaler"),
    (partial(repeated, 0, **SCALER), SpecError, "tries", "0"),
    (of_other_weights, MISMATCH, None, "checksum", "on rank 0", "on rank 1"),
]


@pytest.mark.parametrize("case", STEPS)
def test_steps_that_are_refused(case):
    body, error, field, *words = case
    assert_refused(2, body, error, *words, field=field)


@pytest.mark.parametrize(
    ("ranks", "error"), [((0, 1), UnsupportedModelError), ((1,), RankMismatchError)]
)
def test_a_layer_that_is_unfrozen_is_found_at_the_next_average(ranks, error):
    def body():
        module = mlp()
        module[0].requires_grad_(False)
        model = DistributedDataParallel(seeded(module))
        optimizer = sgd(model.parameters(), lr=0.05)
        torchcomp.LocalSGD(model, optimizer, "every(2)", total_steps=4)
        module[0].requires_grad_(dist.get_rank() in ranks)
        for step in range(2):
            loss_of(model, *batch(dist.get_rank(), step)).backward()
            optimizer.step()

    assert_refused(2, body, error, "'0.weight'", "close()")


def test_beyond_the_announced_end_the_ranks_average_after_every_step(caplog):
    """nanoGPT takes max_iters + 1 steps. Numbers of steps can be whole floats."""

    def body():
        script = Script(Every(np.int64(4)), total_steps=np.float64(6), warmup_steps=0.0)
        weights = script.train(0, 9)
        # The checkpoint of such a run can be resumed.
        again = Script("every(4)", total_steps=6)
        again.load(reloaded(script.save()))
        weights += again.train(9, 11)
        return weights, again.sync.stats

    runs = on_threads(2, body)
    assert synchronised_steps([weights for weights, _ in runs]) == [4, 6, 7, 8, 9, 10, 11]
    assert [(stats.steps, stats.syncs) for _, stats in runs] == [(11, 7)] * 2
    (said,) = [each.getMessage() for each in caplog.records if "=6" in each.getMessage()]
    assert "step 7" in said
