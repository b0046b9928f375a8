"""The guard with two levels, with FSDP2, and with a manager whose ranks change."""

import pytest
import torch
import torch.distributed as dist

import torchcomp
from tests.ddp.test_managed import train
from tests.fsdp.runs import NEEDS_HOOK, Run
from tests.guard.runs import accuse, plain
from tests.support.cases import thorough
from tests.support.models import loss_of, mlp, rows, wrap
from tests.support.ranks import on_processes, on_threads
from torchcomp import Guard

TOPK = "ef(topk(0.1))"
SPECS = [TOPK, *thorough(["mean", "bidirectional(topk(0.1), topk(0.1))"])]


@pytest.mark.parametrize("spec", SPECS)
def test_two_levels_name_all_ranks_of_a_node_and_the_replicas_that_differ(spec):
    def body():
        alarms, rank = [], dist.get_rank()
        model = wrap(mlp(torch.float32))
        guard = Guard(every=2, callback=alarms.append)
        handle = torchcomp.register(model, spec, nodes=2, guard=guard)
        for step in range(8):
            if step == 6 and rank == 1:
                with torch.no_grad():
                    model.module[2].bias[3] += 1
            is_silent = step >= 4 and rank in (2, 3)
            model.zero_grad()
            loss_of(model(rows(step, torch.float32)) * (not is_silent)).backward()
        handle.close()
        return [plain(alarm)[:4] for alarm in alarms], str(handle.guard.report)

    found = on_threads(4, body)
    assert all(each == found[0] for each in found)
    silent, differing = (6, "silent rank", (), (2, 3)), (6, "replicas", ("2.bias",), (1,))
    assert found[0][0] == [silent, differing]


def sharded():
    alarms = []
    run = Run((2, 2), TOPK, options={"guard": Guard(every=2, callback=alarms.append)})
    run.train(range(2))
    if run.mesh["replicate"].get_local_rank() == 1:
        run.backward = lambda step: loss_of(run.model(rows(step, run.dtype)) * 0).backward()
    run.train(range(2, 4))
    run.backward = type(run).backward.__get__(run)
    with torch.no_grad():
        if dist.get_rank() == 3:
            next(iter(run.model.parameters())).to_local().view(-1)[0].add_(1)
    run.train(range(4, 7))
    run.handle.close()
    return [plain(alarm)[:4] for alarm in alarms], str(run.handle.guard.report)


@NEEDS_HOOK
def test_fsdp2_names_all_ranks_of_a_replica_and_the_replicas_that_differ():
    by_rank = on_processes(4, sharded)
    alarms, report = by_rank[0]
    assert by_rank == [(alarms, report)] * 4
    silent, differing = (4, "silent rank", (), (2, 3)), (4, "replicas", ("0.weight",), (3,))
    assert alarms == [silent, differing]
    assert "step=6" in report


SPANS = {"a": (0, 14), "b": (0, 6), "c": (3, 14)}


@pytest.mark.parametrize("spec", SPECS)
def test_the_guard_goes_on_with_ranks_that_join_and_leave(spec, monkeypatch):
    told, register = {}, torchcomp.register

    def guarded(*args, manager, **options):
        alarms = told[manager.name] = []
        guard = Guard(every=2, age=4, callback=alarms.append)
        return register(*args, manager=manager, guard=guard, **options)

    monkeypatch.setattr(torchcomp, "register", guarded)
    compared = {}

    def body(rank):
        accuse(rank.handle.averager, "2.weight")
        while rank.manager.current_step() < SPANS[rank.manager.name][1]:
            rank.step()
            rank.handle.state_dict()
            compared[rank.manager.name] = rank.handle.guard.report

    records = train(SPANS, body, spec)
    assert {name: record.error for name, record in records.items()} == dict.fromkeys(SPANS)
    assert torch.equal(records["a"].weights, records["c"].weights)
    assert {name: report.step for name, report in compared.items()} == {"a": 14, "b": 6, "c": 14}
    # Without a residual, what `accuse` adds also counts as lost.
    expected = {"imbalance", "lost"} if spec == "mean" else {"imbalance"}
    kinds = {name: {alarm.kind for alarm in alarms} for name, alarms in told.items()}
    assert kinds == dict.fromkeys(SPANS, expected)
