"""Any optimizer, several optimizers, and parameters that are trained only later."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.local_sgd.script import Script, batch, loss_of, mlp, synchronised_steps
from tests.support.cases import thorough
from tests.support.models import seeded
from tests.support.outcomes import assert_close, assert_refused, flat
from tests.support.ranks import on_processes, on_threads

TOTAL = 8
# Muon takes only matrices, and SparseAdam only sparse gradients. LBFGS has its own test.
OTHERS = {"Optimizer", "Muon", "SparseAdam", "LBFGS"}
OPTIMIZERS = [
    cls
    for name in torch.optim.__all__
    if isinstance(cls := getattr(torch.optim, name), type)
    and issubclass(cls, torch.optim.Optimizer)
    and name not in OTHERS
]


def test_every_optimizer_of_torch():
    def body():
        options = {"total_steps": 4, "spec": "every(3)"}
        each = (Script(optimizer=partial(kind, lr=0.01), **options) for kind in OPTIMIZERS)
        return [script.train(0, 4) for script in each]

    assert len(OPTIMIZERS) >= 10
    for runs in zip(*on_threads(2, body), strict=True):
        assert synchronised_steps(runs) == [3, 4]


class Inherited(torch.optim.SGD):
    """Its step calls its parent's, which torch also hooks once a parent has been constructed."""

    def step(self, closure=None):
        return super().step(closure)


def test_a_step_that_calls_its_parents_step_counts_once():
    def body():
        torch.optim.SGD([torch.zeros(1)], lr=0.1)
        script = Script("every(3)", total_steps=5, optimizer=partial(Inherited, lr=0.01))
        weights = script.train(0, 5)
        assert (script.sync.stats.steps, script.sync.stats.syncs) == (5, 2)
        return weights

    assert synchronised_steps(on_threads(2, body)) == [3, 5]


def test_an_optimizer_that_evaluates_a_closure_more_often_on_one_rank():
    def body():
        calls = []
        script = Script("every(2)", optimizer=partial(torch.optim.LBFGS, max_iter=3, max_eval=9))
        script.optimizer.param_groups[0]["max_iter"] += 2 * script.rank

        def closure():
            calls.append(1)
            script.optimizer.zero_grad()
            loss = loss_of(script.model, *batch(script.rank, 0))
            loss.backward()
            return loss

        weights = []
        for _ in range(4):
            script.optimizer.step(closure)
            weights.append(script.weights())
        return weights, len(calls)

    runs, calls = zip(*on_threads(2, body), strict=True)
    assert calls[0] != calls[1]
    assert synchronised_steps(runs) == [2, 4]


# --- Several optimizers ---------------------------------------------------------------------------


class Two(Script):
    """A script with two optimizers, one for each of `layers`."""

    def __init__(self, spec, total=TOTAL, lrs=(0.05, 0.02), layers=(0, 2), **local):
        self.rank = dist.get_rank()
        self.model = DistributedDataParallel(seeded(mlp()))
        module = self.model.module
        self.optimizers = [
            torch.optim.SGD(module[layer].parameters(), lr=lr, momentum=0.9)
            for layer, lr in zip(layers, lrs, strict=True)
        ]
        self.sync = torchcomp.LocalSGD(
            self.model, self.optimizers, spec, total_steps=total, **local
        )

    def step(self, step):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss_of(self.model, *batch(self.rank, step)).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return self.weights()

    def layer(self, index):
        return flat(self.model.module[index].parameters())


def in_two_groups():
    """A run with one optimizer that has two parameter groups."""

    def optimizer(parameters):
        groups = [{"params": parameters[:2], "lr": 0.05}, {"params": parameters[2:], "lr": 0.02}]
        return torch.optim.SGD(groups, momentum=0.9)

    script = Script("every(3)", total_steps=TOTAL, optimizer=optimizer, lr=lambda step: 1.0)
    return script.train(0, TOTAL)


@pytest.mark.parametrize("spec", ["every(3)", ["every(3)"] * 2])
def test_optimizers_with_one_schedule_or_equal_ones_equal_one_optimizer(spec):
    runs = on_threads(3, lambda: Two(spec).train(0, TOTAL))
    assert synchronised_steps(runs) == [3, 6, 8]
    for mine, wanted in zip(runs, on_threads(3, in_two_groups), strict=True):
        assert_close(torch.stack(mine), torch.stack(wanted))


@pytest.mark.parametrize("compress", ["mean", "ef(identity)"])
def test_optimizers_may_have_a_schedule_each(compress):
    def body():
        # At a learning rate of 0.02, H = floor((0.05 / 0.02)^2) = 6; at 0.05 it would be 1.
        script, seen = Two(["every(3)", "qsr(alpha=0.05, h_base=1)"], compress=compress), []
        for step in range(TOTAL):
            script.step(step)
            seen.append([script.layer(0), script.layer(2), script.sync.next_sync])
        return seen

    runs = on_threads(3, body)
    first, second, _ = zip(*(zip(*run, strict=True) for run in runs), strict=True)
    assert synchronised_steps(first) == [3, 6, 8]
    assert synchronised_steps(second) == [6, 8]
    assert [seen for *_, seen in runs[0]] == [3, 3, 6, 6, 6, None, 8, None]


def test_one_optimizer_may_not_step_twice_before_the_others():
    def body():
        script = Two("every(3)")
        script.optimizers[1].step()
        with pytest.raises(RuntimeError, match=r"state_dict.*\[1\] of 2"):
            script.sync.state_dict()
        script.optimizers[1].step()

    words = ("optimizer 1", "optimizer 0")
    assert_refused(2, body, torchcomp.ScheduleError, *words)


# --- Parameters that are trained only later -------------------------------------------------------


def thawed(compress="mean", late=2, only_on=(0, 1, 2), total=7):
    """Unfreeze the first layer after `late` steps; return its weights after each step."""
    module = seeded(mlp())
    module[0].requires_grad_(False)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module[2].parameters(), lr=0.05, momentum=0.9)
    sync = torchcomp.LocalSGD(model, optimizer, "every(3)", total_steps=total, compress=compress)
    rank, seen = dist.get_rank(), []
    for step in range(total):
        if step == late and rank in only_on:
            module[0].requires_grad_(True)
            optimizer.add_param_group({"params": module[0].parameters()})
        optimizer.zero_grad()
        loss_of(model, *batch(rank, step)).backward()
        optimizer.step()
        seen.append(flat(module[0].parameters()))
    return seen, sync.state_dict()


@pytest.mark.parametrize("compress", ["mean", "ef(topk(0.2))"])
@pytest.mark.parametrize("late", [2, 3, *thorough([4])])
def test_a_layer_that_is_unfrozen_is_averaged_from_its_first_step_on(compress, late):
    runs, states = zip(*on_threads(3, thawed, compress, late), strict=True)
    frozen = list(range(1, late + 1))
    assert synchronised_steps(runs) == sorted({*frozen, 3, 6, 7})
    assert not torch.equal(runs[0][-1], runs[0][0])
    assert list(states[0]["parameters"]) == ["2.weight", "2.bias", "0.weight", "0.bias"]


def test_a_layer_that_is_unfrozen_on_only_one_rank_is_found():
    words = ("none on rank 0", "0.weight, 0.bias")
    assert_refused(2, partial(thawed, only_on=(1,)), torchcomp.RankMismatchError, *words)


def grown(total=6, **local):
    """Add a head that differs between ranks after step 1; return its weights after each step."""
    script, seen = Script("every(2)", total_steps=total, local=local), []
    script.train(0, 1)
    head = seeded(nn.Linear(3, 3).double(), seed=script.rank)
    script.model.module.append(head)
    script.optimizer.add_param_group({"params": head.parameters(), "lr": 0.05})
    for step in range(1, total):
        script.optimizer.zero_grad()
        script.backward(step)
        script.optimizer_step()
        seen.append(flat(head.parameters()))
    script.sync.close()
    return seen


@pytest.mark.parametrize("overlap", [False, True])
def test_a_parameter_that_is_added_to_the_model_and_to_the_optimizer(overlap):
    assert synchronised_steps(on_threads(2, partial(grown, overlap=overlap))) == [1, 3, 5]


def test_a_parameter_that_is_added_with_different_values_cannot_be_compressed():
    words = ("3.weight, 3.bias", "checksum")
    assert_refused(2, partial(grown, compress="ef(topk(0.2))"), torchcomp.RankMismatchError, *words)


def test_a_parameter_that_no_optimizer_held_joins_the_schedule_of_the_one_that_takes_it():
    def body():
        script = Two(["every(2)", "every(3)"], total=6, layers=(0, 2))
        script.sync.close()
        late = script.model.module[2].bias
        script.optimizers[1] = torch.optim.SGD([script.model.module[2].weight], lr=0.05)
        script.sync = torchcomp.LocalSGD(
            script.model, script.optimizers, ["every(2)", "every(3)"], total_steps=6
        )
        seen = []
        for step in range(6):
            if step == 1:
                script.optimizers[1].add_param_group({"params": [late]})
            script.step(step)
            seen.append(flat([late]))
        return seen

    assert synchronised_steps(on_threads(2, body)) == [1, 3, 6]


# --- torch.compile --------------------------------------------------------------------------------


def through_the_compiler(where):
    """The weights after each step, and the frames compiled after 2 steps and at the end."""
    build = partial(torch.compile, mlp(), backend="eager") if where == "inside" else mlp
    script = Script("every(3)", total_steps=TOTAL, build=build)
    if where == "outside":
        script.model = torch.compile(script.model, backend="eager")
    if where == "optimizer":
        script.optimizer_step = torch.compile(script.optimizer.step, backend="eager")
    first, early = script.train(0, 2), torch._dynamo.utils.counters["frames"]["ok"]
    rest = script.train(2, TOTAL)
    return first + rest, early, torch._dynamo.utils.counters["frames"]["ok"]


@pytest.mark.parametrize("where", ["inside", "outside", "optimizer"])
def test_a_compiled_model_trains_the_same_and_is_not_compiled_again(where):
    # In new processes, because the compiler caches what other models of a process have compiled.
    [(compiled, early, frames)] = on_processes(1, through_the_compiler, where)
    [(plain, none, _)] = on_processes(1, through_the_compiler, "nowhere")
    assert none == 0
    assert 0 < early == frames
    assert_close(torch.stack(compiled), torch.stack(plain))
