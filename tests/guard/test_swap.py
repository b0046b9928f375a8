"""An alarm whose callback changes the method: the run goes on, and nothing is lost."""

import pytest
import torch
import torch.distributed as dist

from tests.guard.runs import accuse
from tests.support.models import Account, assert_conserved, loss_of, mlp, rows, weights, wrap
from tests.support.outcomes import raised_by, same
from tests.support.ranks import on_threads
from torchcomp import Guard, RankMismatchError, register

TOPK = "ef(topk(0.1))"
MANY = "bidirectional(topk(0.1), topk(0.1))"


def swapping(swapped, spec="mean"):
    return Guard(every=2, callback=lambda alarm: swapped.append(swapped[0].swap(spec)))


def trained(spec, options, between=lambda handle: None):
    """Train seven steps with an alarm after the second one."""
    swapped, methods = [], []
    model = wrap(mlp())
    handle = register(model, spec, guard=swapping(swapped), **options)
    swapped.append(handle)
    accuse(handle.averager, "2.weight")
    optimizer, account = torch.optim.SGD(model.parameters(), lr=0.1), Account()
    for step in range(7):
        account.step(model, (rows(step),), optimizer=optimizer)
        between(handle)
        methods.append(str(handle.method))
    account.close(handle)
    state = handle.state_dict()
    handle.close()
    return account, methods, weights(model), (state["step"], state["flushing"], state["slots"])


@pytest.mark.parametrize(
    ("spec", "options"),
    [(TOPK, {}), (TOPK, {"nodes": 2, "check": "late"}), (MANY, {"check": "late"})],
)
def test_the_step_after_an_alarm_sends_the_residual_and_has_the_new_method(spec, options):
    by_rank = on_threads(4 if "nodes" in options else 2, trained, spec, options)
    if "nodes" not in options:
        assert_conserved([account for account, *_ in by_rank], 1e-9)
    for _, methods, parameters, (step, flushing, slots) in by_rank:
        assert methods == [spec] * 2 + ["mean"] * 5
        assert torch.equal(parameters, by_rank[0][2])
        assert (step, flushing, slots) == (7, False, {})


def test_a_swap_in_the_callback_is_that_between_two_steps():
    """Bit for bit, also if one rank settles the step before the others do."""

    def settle_on_rank_0(handle):
        if dist.get_rank() == 0:
            handle.state_dict()

    def by_hand():
        model = wrap(mlp())
        handle = register(model, TOPK, guard=Guard(every=2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(7):
            model.zero_grad()
            loss_of(model(rows(step))).backward()
            optimizer.step()
            if step == 1:
                handle.swap("mean")
        return weights(model)

    expected = on_threads(2, by_hand)
    for between in (lambda handle: None, settle_on_rank_0):
        assert same([each[2] for each in on_threads(2, trained, TOPK, {}, between)], expected)


def test_a_swap_on_some_ranks_only_raises_on_all():
    def body():
        swapped = []
        model = wrap(mlp())
        guard = swapping(swapped) if dist.get_rank() == 1 else Guard(every=2)
        handle = register(model, TOPK, guard=guard)
        swapped.append(handle)
        accuse(handle.averager, "2.weight")
        for step in range(2):
            loss_of(model(rows(step))).backward()
        error = raised_by(lambda: loss_of(model(rows(2))).backward())
        handle.close()
        return type(error), "spec" in str(error), "rank 1" in str(error)

    assert on_threads(3, body) == [(RankMismatchError, True, True)] * 3
