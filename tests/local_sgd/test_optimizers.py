"""Any optimizer, several optimizers, and compiled ones."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.local_sgd.script import Script, batch, loss_of, mlp, synchronised_steps
from tests.support.models import seeded
from tests.support.outcomes import assert_close, assert_refused
from tests.support.ranks import on_processes, on_threads

TOTAL = 8
# Muon takes only matrices, and SparseAdam only sparse gradients.
OTHERS = {"Optimizer", "Muon", "SparseAdam", "LBFGS"}
OPTIMIZERS = [
    cls
    for name in torch.optim.__all__
    if isinstance(cls := getattr(torch.optim, name), type)
    and issubclass(cls, torch.optim.Optimizer)
    and name not in OTHERS
]


class Inherited(torch.optim.SGD):
    """It does more after its parent's step, which torch also hooks."""

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad, alpha=0.01)


def test_every_optimizer_of_torch():
    def body():
        options = {"total_steps": 4, "spec": "every(3)"}
        kinds = [*OPTIMIZERS, Inherited]
        each = (Script(optimizer=partial(kind, lr=0.01), **options) for kind in kinds)
        return [script.train(0, 4) for script in each]

    assert len(OPTIMIZERS) >= 10
    for runs in zip(*on_threads(2, body), strict=True):
        assert synchronised_steps(runs) == [3, 4]


class Two(Script):
    """A script with two optimizers, one for each linear layer."""

    def __init__(self, spec):
        self.rank = dist.get_rank()
        self.model = DistributedDataParallel(seeded(mlp()))
        self.optimizers = [
            torch.optim.SGD(self.model.module[layer].parameters(), lr=lr, momentum=0.9)
            for layer, lr in ((0, 0.05), (2, 0.02))
        ]
        self.sync = torchcomp.LocalSGD(self.model, self.optimizers, spec, total_steps=TOTAL)

    def step(self, step):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss_of(self.model, *batch(self.rank, step)).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return self.weights()


def in_two_groups(parameters):
    groups = [{"params": parameters[:2], "lr": 0.05}, {"params": parameters[2:], "lr": 0.02}]
    return torch.optim.SGD(groups, momentum=0.9)


def test_two_optimizers_equal_one():
    one = {"spec": "every(3)", "optimizer": in_two_groups, "lr": lambda step: 1.0}
    runs = on_threads(3, lambda: Two("every(3)").train(0, TOTAL))
    assert synchronised_steps(runs) == [3, 6, 8]
    wanted = on_threads(3, lambda: Script(total_steps=TOTAL, **one).train(0, TOTAL))
    for mine, expected in zip(runs, wanted, strict=True):
        assert_close(torch.stack(mine), torch.stack(expected))


def test_one_optimizer_may_not_step_twice_before_the_others():
    def body():
        script = Two("every(3)")
        script.optimizers[1].step()
        with pytest.raises(RuntimeError, match=r"state_dict.*\[1\] of 2"):
            script.sync.state_dict()
        script.optimizers[1].step()

    assert_refused(2, body, torchcomp.ScheduleError, "optimizer 1")


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
