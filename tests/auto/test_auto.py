"""register(model, "auto"): time candidates between uncompressed steps, go on with the best."""

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import torchcomp
from tests.guard.runs import accuse
from tests.support.clock import Clock
from tests.support.logs import messages_of
from tests.support.models import Branches, loss_of, mlp, residual_norm, rows, seeded, weights, wrap
from tests.support.outcomes import caught, raised_by, reloaded, same
from tests.support.ranks import on_processes, on_threads
from torchcomp import Auto, Guard
from torchcomp.advisor import auto
from torchcomp.aggregators import Mean
from torchcomp.ddp import register
from torchcomp.ddp.buckets import Buckets

TOPK = "ef(topk(0.1))"
AUTO = Auto(candidates=[TOPK], steps=20)
STEPS = 20
SECONDS = 0.02  # of the average of a bucket on the slow network of these tests
BUCKETS = 3  # of the model, see SMALL_BUCKETS
COMPUTE = 0.004  # of the rest of a step. All buckets are ready at its end.

CLOCK = Clock()
_mean, _join = Mean.aggregate, Buckets.join


@dataclass(frozen=True)
class Part(Mean):
    """Averages as mean does, in a part of the time that it takes on the slow network."""

    name = "part"

    part: float = 1.0
    rank: int | None = None  # the only one that it takes time on

    def aggregate(self, g, bucket, key):
        if self.rank in (None, dist.get_rank()):
            CLOCK.exchange(SECONDS * self.part)
        _mean(self, g, bucket, key)


class OfTheModel(Part):
    """Averages the whole model as one bucket."""

    name, whole_model, depends_on_grouping = "of_the_model", True, True


@pytest.fixture(autouse=True)
def clock():
    def join(self):
        CLOCK.join()
        return _join(self)

    with (
        mock.patch.object(auto, "now", CLOCK.moment),
        mock.patch.object(Buckets, "join", join),
        mock.patch.object(auto.AutoHandle, "_exchange", CLOCK.alone(auto.AutoHandle._exchange)),
    ):
        yield


@pytest.fixture
def slow_mean():
    """An uncompressed average that takes long, as on a slow network."""

    def slow(self, *args):
        CLOCK.exchange(SECONDS)
        _mean(self, *args)

    with mock.patch.object(Mean, "aggregate", slow):
        yield


def made(spec=AUTO, **options):
    model = wrap(mlp())
    return model, torchcomp.register(model, spec, **options)


def train(model, steps, first=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    for step in range(first, first + steps):
        CLOCK.advance(COMPUTE)
        optimizer.zero_grad()
        loss_of(model(rows(step))).backward()
        optimizer.step()


def trained(spec, steps):
    model, handle = made(spec)
    methods = []
    for step in range(steps):
        train(model, 1, step)
        methods.append(str(handle.method))
    # Nothing watches the steps after the trial.
    assert (handle.averager.observer is None) == (steps >= STEPS)
    return str(handle.method), handle.choice, methods


def test_training_is_that_of_mean_bit_for_bit_while_candidates_are_timed():
    candidates = Auto(candidates=[TOPK, "powersgd(1)", "bidirectional(topk(0.1), topk(0.1))"])

    def after(spec):
        model, handle = made(spec)
        train(model, 60)  # all candidates were timed, and none was chosen yet
        return [weights(model), handle.stats.steps, handle.stats.bytes_sent]

    for found, of_mean in on_threads(2, lambda: [*map(after, (candidates, "mean"))]):
        assert same(found, of_mean)


def test_the_fast_candidate_is_chosen_on_a_slow_network(slow_mean, caplog):
    found = on_threads(2, trained, AUTO, STEPS + 5)
    for method, choice, methods in found:
        assert method == choice.method == TOPK
        assert methods == ["mean"] * (STEPS - 1) + [TOPK] * 6
        assert choice.step == STEPS
        assert choice == found[0][1]
        average = BUCKETS * SECONDS
        assert [*choice.seconds.values()] == pytest.approx([COMPUTE + average, COMPUTE])
        assert [choice.alone, choice.average] == pytest.approx([COMPUTE, average])
    (message,) = messages_of("advisor.auto", caplog)
    assert TOPK in message


def test_a_candidate_is_timed_with_the_buckets_that_it_would_have():
    candidates = Auto(candidates=[OfTheModel()], steps=STEPS)
    for _, choice, _ in on_threads(2, trained, candidates, STEPS):
        # Once, and not for each of DDP's buckets.
        assert choice.seconds["of_the_model"] == pytest.approx(COMPUTE + SECONDS)


def test_mean_is_kept_if_no_candidate_is_faster():
    slow = Auto(candidates=[Part(rank=1)], steps=20)
    for method, choice, _ in on_threads(2, trained, slow, STEPS + 5):
        assert method == choice.method == "mean"
        # Rank 1 alone is slow, and its time counts on both.
        assert choice.seconds["part(rank=1)"] == pytest.approx(BUCKETS * SECONDS + COMPUTE)
        assert choice.seconds["mean"] == pytest.approx(COMPUTE)


@pytest.mark.parametrize(
    ("parts", "chosen"),
    [
        ([0.96, 0.99], "mean"),  # not worth it
        ([0.9, 0.87], "part(part=0.9)"),  # liked more, and hardly slower
        ([0.9, 0.5], "part(part=0.5)"),
    ],
)
def test_the_first_method_is_chosen_that_no_other_is_worth_changing_for(parts, chosen, slow_mean):
    candidates = Auto(candidates=[Part(part=each) for each in parts], steps=16)
    assert [method for method, *_ in on_threads(2, trained, candidates, 20)] == [chosen] * 2


def resumed(at, auto=AUTO, later=None):
    found = []
    for each in (auto, later or auto):
        model, handle = made(each)
        if found:
            handle.load_state_dict(found[0][0])
            model.load_state_dict(found[0][1])
        else:
            train(model, at)
            found.append(reloaded([handle.state_dict(), model.state_dict()]))
        train(model, 5, at)
        found.append([handle.choice, str(handle.method), weights(model)])
    return found


# With an object of a class of the user, which parse() does not know.
FAST = Auto(candidates=[Part(part=0.0)], steps=20)


@pytest.mark.parametrize(("auto", "chosen"), [(AUTO, TOPK), (FAST, "part(part=0.0)")])
def test_a_run_resumes_with_the_choice_bit_for_bit(auto, chosen, slow_mean):
    for (state, _), straight, again in on_threads(2, resumed, STEPS + 3, auto):
        assert state["spec"] == straight[0].method == chosen
        assert same(straight, again)


@pytest.mark.parametrize(
    ("at", "later", "spec"),
    [(STEPS - 5, AUTO, "mean"), (STEPS + 2, Auto(candidates=["powersgd(1)"], steps=20), TOPK)],
    ids=["in a trial", "with other candidates"],
)
def test_a_trial_begins_again_after_a_resume(at, later, spec, slow_mean):
    for (state, _), straight, again in on_threads(2, resumed, at, AUTO, later):
        assert (state["spec"], straight[0].step, again[:2]) == (spec, STEPS, [None, "mean"])


def loads_another_method():
    model, other = made("ef(topk(0.2))")
    train(model, 3)
    model, handle = made()
    handle.load_state_dict(reloaded(other.state_dict()))
    assert (str(handle.method), residual_norm(handle) > 0) == ("mean", True)
    train(model, 3)
    assert (str(handle.method), residual_norm(handle)) == ("mean", 0)
    train(model, STEPS)
    assert handle.choice.method == TOPK
    assert handle.choice.step > 3 + STEPS  # a step that sends the residual is not of the trial


def test_the_residual_of_another_checkpoint_is_sent_before_the_trial(slow_mean):
    on_threads(2, loads_another_method)


CHOICE = {"method": "mean", "seconds": {"mean": 1.0}, "alone": 1.0, "average": 1.0, "step": 9}


@pytest.mark.parametrize(
    "damage",
    [
        {"auto": {}},
        {"auto": {"trial": True, "choice": {}}},
        {"auto": {"trial": 3, "choice": None}},
        {"auto": {"trial": False, "choice": CHOICE | {"seconds": {"mean": "long"}}}},
        {"auto": {"trial": False, "choice": CHOICE | {"step": -1}}},
        {"spec": "nothing(3)"},
        {"spec": [3]},
    ],
)
def test_a_damaged_checkpoint_changes_nothing(damage):
    def body():
        model, handle = made()
        train(model, 2)
        before = handle.state_dict()
        error = raised_by(lambda: handle.load_state_dict({**before, **damage}))
        assert isinstance(error, torchcomp.CheckpointError)
        assert same(handle.state_dict(), before)

    on_threads(2, body)


@dataclass(frozen=True)
class Broken(Mean):
    """Raises on rank 1; if not `alone`, on all ranks, but on none that is alone."""

    name = "broken"

    alone: bool = False

    def aggregate(self, g, bucket, key):
        if dist.get_rank() == 1 if self.alone else bucket.exchange.world_size > 1:
            raise OSError("planted")


def with_a_broken_candidate():
    model = wrap(mlp())
    handle = torchcomp.register(model, Auto(candidates=[Broken()], steps=20))
    error, steps = None, 0
    while error is None:
        before = handle.state_dict()
        model.zero_grad()
        error = caught(loss_of(model(rows(steps))).backward)
        steps += 1
    assert steps == 10  # the second step of the block of the candidate
    return before, handle.state_dict(), error


def test_a_candidate_that_fails_raises_at_the_end_of_the_backward_pass(caplog):
    with mock.patch.object(register, "rehearse_all"):
        found = on_threads(2, with_a_broken_candidate)
    for before, later, error in found:
        # The bytes of the step were sent.
        assert same(before | {"traffic": None}, later | {"traffic": None})
        assert isinstance(error, OSError)
    assert any(str(Broken()) in message for message in messages_of("advisor.auto", caplog))


@pytest.mark.parametrize("others", [[], [TOPK]])
def test_a_candidate_that_fails_on_one_rank_is_left_out_on_all(others, slow_mean, caplog):
    candidates = Auto(candidates=[Broken(alone=True), *others], steps=STEPS)
    with mock.patch.object(register, "rehearse_all"):
        found = on_threads(2, trained, candidates, STEPS + 2)
    for method, choice, methods in found:
        assert methods[: STEPS - 1] == ["mean"] * (STEPS - 1)
        assert method == (TOPK if others else "mean")
        assert (choice is None) == (not others)
    assert any("alone=True" in message for message in messages_of("advisor.auto", caplog))


def scaled(spec):
    """Train with a GradScaler, accumulated gradients, and an overflow while a trial runs."""
    model, scaler = wrap(mlp()), torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    guard = Guard(every=4)
    handle = torchcomp.register(model, spec, scaler=scaler, lr_inside=optimizer, guard=guard)
    for step in range(16):
        CLOCK.advance(COMPUTE)
        optimizer.zero_grad()
        with model.no_sync():
            scaler.scale(loss_of(model(rows(step + 50)))).backward()
        loss = scaler.scale(loss_of(model(rows(step))))
        (loss * float("inf") if step == 11 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [weights(model), scaler.get_scale(), handle.stats.steps, handle.guard.report.step]


def test_a_trial_follows_the_scaler_the_learning_rates_and_the_guard():
    assert same(on_threads(2, scaled, AUTO), on_threads(2, scaled, "mean"))


def swaps(at):
    model, handle = made()
    train(model, at)
    handle.swap("powersgd(1)")
    state = reloaded(handle.state_dict())
    train(model, STEPS)
    _, again = made()
    again.load_state_dict(state)
    return handle.choice, str(handle.method), str(again.method)


@pytest.mark.parametrize("at", [12, STEPS + 2])
def test_a_swap_ends_auto(at, slow_mean):
    assert on_threads(2, swaps, at) == [(None, "powersgd(1)", "powersgd(1)")] * 2


def swapped_by_a_guard():
    """Train with a guard that finds the first comparison wrong, at the step of the choice."""
    guard = Guard(every=STEPS, callback=lambda alarm: handle.swap("powersgd(1)"))
    model, handle = made(guard=guard)
    accuse(handle.averager, "2.weight")
    train(model, STEPS + 2)
    return str(handle.method), handle.choice


def test_the_swap_of_a_guard_comes_before_the_choice(slow_mean):
    assert on_threads(2, swapped_by_a_guard) == [("powersgd(1)", None)] * 2


def real_ranks(options, nodes, check):
    torch.set_num_threads(1)
    module = seeded(Branches()) if options else mlp(torch.float32)
    model = wrap(module, **options)
    handle = torchcomp.register(model, Auto(candidates=[TOPK], steps=20), nodes=nodes, check=check)
    for step in range(STEPS + 4):
        model.zero_grad()
        inputs = rows(step, torch.float32)
        out = model(inputs, ["left"]) if options else model(inputs)
        loss_of(out).backward()
    applied = {n: p.grad for n, p in model.module.named_parameters() if p.grad is not None}
    choice = handle.choice
    handle.close()
    return applied, choice


@pytest.mark.parametrize(
    ("options", "nodes", "check"),
    [({"find_unused_parameters": True}, None, "step"), ({}, 2, "late")],
)
def test_gloo_ranks_choose_alike(options, nodes, check):
    found = on_processes(2 if nodes is None else 4, real_ranks, options, nodes, check)
    for applied, choice in found:
        assert choice == found[0][1]
        assert choice.seconds.keys() == {"mean", TOPK}
        assert 0 < choice.alone <= min(choice.seconds.values())
        assert same(applied, found[0][0])
