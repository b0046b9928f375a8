"""Seeded faults: each is found at the next comparisons, with its kind, parameters and ranks."""

import pytest
import torch
import torch.distributed as dist

from tests.engine import small
from tests.guard.runs import EVERY, Watched, drifting, run
from tests.support.cases import thorough
from tests.support.models import loss_of, mlp, rows, wrap
from tests.support.ranks import on_threads
from torchcomp import Guard, register
from torchcomp.engine.state import Kind

TOPK = "ef(topk(0.1))"
PER_TENSOR = 'ef(topk(0.1, scope="tensor"), memory_dtype="bf16")'
EXACT = 'bidirectional(topk(0.1), topk(0.1), selection="exact")'
METHODS = [TOPK, *thorough([PER_TENSOR, "powersgd(rank=1)", "dgc(topk(0.1))", EXACT])]
RANKS = 3
FIRST, LAST = 12, 5 * EVERY  # the first step with a fault, and the end


class Rank:
    """A rank whose steps a test changes, after the method and before the guard reads them."""

    def __init__(self, exchange, method, fault, gradients=drifting):
        self.watched, self.rank = Watched(exchange, method), exchange.rank
        self.averager, self.exchange = self.watched.averager, exchange
        guard, self.step, self.saved = self.watched.guard, 0, {}
        before, after = guard.before, guard.after

        def keep(bucket, method):
            self.gradient = {name: part.clone() for name, part in bucket.parts().items()}
            before(bucket, method)

        def change(bucket, method):
            self.mean = bucket.parts()
            if self.averager.step >= FIRST:
                fault(self)
            after(bucket, method)

        guard.before, guard.after = keep, change
        run(self.averager, 0, FIRST, gradients)
        assert not self.watched.alarms
        run(self.averager, FIRST, LAST, gradients)

    @property
    def residual(self):
        """That after the step, by parameter of the bucket: views."""
        found = dict(self.averager.state.pending("error"))
        return {name: found[name] for name in self.mean}

    def whole(self, name):
        """The residual of `ef` if nothing is sent."""
        return dict(self.averager.state.items("error"))[name] + self.gradient[name]

    def withhold(self, name, keep=False):
        """Take the message of rank 1 out of the mean, and lose or keep it. All ranks call this."""
        message = self.whole(name) - self.residual[name] if self.rank == 1 else None
        for each in self.exchange.gather_objects(message):
            if each is not None:
                self.mean[name].sub_(each.to(self.mean[name].dtype), alpha=1 / RANKS)
        if keep and self.rank == 1:
            self.residual[name].copy_(self.whole(name))


def found(method, fault, gradients=drifting):
    """Return the parameters and ranks of the first alarm of each kind."""

    def body(exchange):
        alarms = Rank(exchange, method, fault, gradients).watched.alarms
        return {a.kind: (a.parameters, a.ranks) for a in reversed(alarms)}

    by_rank = small.on_ranks(RANKS, body)
    assert all(each == by_rank[0] for each in by_rank)
    return by_rank[0]


SOME = {"conv", "matrix"}  # of a parameter of one element, everything may have been sent
BOTH = [TOPK, PER_TENSOR]
WITHOUT = ["mean", *thorough(["ef21(topk(0.1))"])]
FAULTS = {}


def planted(kind, names=None, ranks=(), methods=METHODS):
    """Register a fault and its alarm, which names these parameters, one of a set, or SOME."""

    def register_fault(fault):
        for method in methods:
            spec = method if isinstance(method, str) else method.values[0]
            marks = () if isinstance(method, str) else method.marks
            case = pytest.param(spec, fault, kind, names, ranks, marks=marks)
            FAULTS[f"{fault.__name__}, {spec}"] = case
        return fault

    return register_fault


@planted("imbalance")
def error_feedback_is_off(rank):
    for part in rank.residual.values():
        part.zero_()


@planted("imbalance", methods=[*METHODS, *WITHOUT])
def a_wrong_scale(rank):
    for part in rank.mean.values():
        part.mul_(2)


planted("imbalance", {""}, methods=['mean(quantize("int4"))', "topk(0.6)"])(a_wrong_scale)


@planted("imbalance", ("conv",), methods=[*METHODS, *WITHOUT])
def a_wrong_scale_of_one_layer(rank):
    if "conv" in rank.mean:
        rank.mean["conv"].mul_(1.1)


@planted("imbalance", methods=[TOPK])
def messages_arrive_as_zeros(rank):
    for name in rank.mean:
        rank.withhold(name)


@planted("silent rank", (), (1,), BOTH)
def a_rank_sends_zeros_and_keeps_all_in_its_residual(rank):
    for name in rank.mean:
        rank.withhold(name, keep=True)


@planted("residual changed", None, (1,))
def a_stale_residual(rank):
    if rank.rank == 1:
        state = rank.averager.state
        commit = state.commit

        def stale():
            # Caches stay equal on all ranks, which are compared after an alarm.
            for flat in state._in_flight:
                if flat.slot.kind is not Kind.CACHE:
                    flat.after.copy_(flat.before)
            commit()

        state.commit = stale


@planted("residual changed", {*SOME}, (1,))
def an_old_residual_is_restored_once(rank):
    held = dict(rank.averager.state.items("error"))
    for name in rank.mean if rank.rank == 1 else ():
        if rank.averager.step == FIRST:
            rank.saved[name] = held[name].clone()
        elif rank.averager.step == FIRST + 2:
            held[name].copy_(rank.saved[name])


SLOTS = {EXACT: "server_error", "dgc(topk(0.1))": "momentum", "ef21(topk(0.1))": "estimate"}


@planted("residual changed", {*SOME}, (1,), SLOTS)
def another_slot_is_written_once(rank):
    if rank.averager.step == FIRST + 1 and rank.rank == 1:
        held = dict(rank.averager.state.items(SLOTS[str(rank.averager.aggregator)]))
        for name in held.keys() & rank.mean.keys():
            held[name].zero_()


@planted("starved", ("matrix",), (0, 1, 2))
def a_layer_never_travels(rank):
    if "matrix" in rank.mean:
        rank.residual["matrix"].add_(rank.mean["matrix"])
        rank.mean["matrix"].zero_()


@planted("starved", ("matrix",), (0, 1, 2), BOTH)
def the_ratio_is_too_small_for_one_layer(rank):
    if "matrix" in rank.mean:
        left, whole = rank.residual["matrix"], rank.whole("matrix")
        # A single element travels.
        left[1:].copy_(whole[1:])
        rank.mean["matrix"][1:].zero_()


@planted("starved", ("matrix",), (1,), BOTH)
def one_rank_leaves_a_layer_out(rank):
    if "matrix" in rank.mean:
        rank.withhold("matrix", keep=True)


@pytest.mark.parametrize(
    ("method", "fault", "kind", "names", "ranks"), FAULTS.values(), ids=list(FAULTS)
)
def test_a_fault_is_found(method, fault, kind, names, ranks):
    found_names, found_ranks = found(method, fault)[kind]
    assert found_ranks == ranks
    if names is None:
        assert set(found_names) >= SOME
    elif isinstance(names, set):
        assert names & {"", *found_names}  # "" stands for any or none
    else:
        assert found_names == names


@pytest.mark.parametrize("method", [*METHODS, *thorough(["mean", "topk(0.9)", "ef21(topk(0.1))"])])
def test_a_rank_whose_gradients_are_zeros(method):
    def gradients(step, rank):
        scale = 0 if rank == 2 and step >= FIRST else 1
        return {name: g.mul_(scale) for name, g in drifting(step, rank).items()}

    assert found(method, lambda rank: None, gradients)["silent rank"] == ((), (2,))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("spec", ["mean", TOPK])
def test_a_desynchronised_replica(spec, frozen):
    def body():
        alarms = []
        made = mlp()
        made[2].weight.requires_grad_(not frozen)
        model = wrap(made)
        handle = register(model, spec, guard=Guard(every=2, callback=alarms.append))
        for step in range(9):
            if step == 3 and dist.get_rank() == 1:
                with torch.no_grad():
                    model.module[2].weight[3, 4] += 1e-9
            loss_of(model(rows(step))).backward()
        handle.close()
        return [(a.step, a.kind, a.parameters, a.ranks) for a in alarms]

    assert on_threads(3, body) == [[(4, "replicas", ("2.weight",), (1,))]] * 3
