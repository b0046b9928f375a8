"""The torch optimizer: equals the method, resumes bit for bit, raises on every rank."""

import copy
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from tests.support.outcomes import assert_refused, reloaded
from tests.support.ranks import on_threads
from torchcomp.compressors import RandK, TopK
from torchcomp.specs.errors import CheckpointError, NonFiniteError, RankMismatchError, SpecError
from torchcomp.two_direction import Simulated, TwoDirection, TwoDirectionMethod

UP, DOWN = "randk(0.2, unbiased=True)", "topk(0.2)"
MU = 1e-2


def model():
    net = nn.Linear(6, 3, dtype=torch.float64)
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    return net


def loss_of(net, rank):
    generator = torch.Generator().manual_seed(rank)
    features = torch.randn(20, 6, dtype=torch.float64, generator=generator)
    loss = cross_entropy(net(features), torch.randint(0, 3, (20,), generator=generator))
    return loss + MU / 2 * sum(p.square().sum() for p in net.parameters())


class Run:
    """One rank's training."""

    def __init__(self, state=None, params=None, **changes):
        self.net, self.calls = model(), 0
        options = {"up": UP, "down": DOWN, "lbar": 4.0, "mu": MU, **changes}
        held = self.net.parameters() if params is None else params
        self.optimizer = TwoDirection(held, **options)
        if state is not None:
            self.optimizer.load_state_dict(state)

    def closure(self):
        self.optimizer.zero_grad()
        loss = loss_of(self.net, dist.get_rank())
        loss.backward()
        self.calls += 1
        return loss

    def train(self, steps):
        for _ in range(steps):
            assert isinstance(self.optimizer.step(self.closure), torch.Tensor)
        return self

    @property
    def x(self):
        return parameters_to_vector(self.net.parameters()).detach().clone()


def end(steps, cut=None, edit=lambda state: None, **changes):
    run = Run(**changes).train(steps if cut is None else cut)
    if cut is not None:
        state = reloaded(run.optimizer.state_dict())
        edit(state)
        run = Run(state, **changes).train(steps - cut)
    return run.x, run.optimizer.traffic, run.calls


def test_it_equals_the_method():
    def gradients(x):
        rows = []
        for rank in range(4):
            net = model()
            nn.utils.vector_to_parameters(x, net.parameters())
            loss_of(net, rank).backward()
            rows.append(torch.cat([p.grad.reshape(-1) for p in net.parameters()]))
        return torch.stack(rows)

    server, x0 = Simulated(4), torch.zeros(21, dtype=torch.float64)
    compressors = RandK(0.2, unbiased=True), TopK(0.2)
    method = TwoDirectionMethod(gradients, x0, server, *compressors, lbar=4.0, mu=MU)
    for _ in range(40):
        method.step()
    for x, traffic, calls in on_threads(4, end, 40):
        assert torch.equal(x, method.x)
        assert traffic == server.traffic
        assert calls == method.evaluations


def test_parameters_are_updated_in_place():
    def shared():
        weight = torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last).requires_grad_()
        view, optimizer = weight.detach(), TwoDirection([weight], UP, DOWN, lbar=1.0, mu=0.0)

        def closure():
            loss = (weight - torch.arange(24.0).view(2, 3, 2, 2)).square().mean()
            loss.backward()
            return loss.item()

        losses = [optimizer.step(closure) for _ in range(60)]
        assert losses[-1] < 0.5 * losses[0]
        assert torch.equal(view, weight)

    on_threads(2, shared)


# --- Checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cut", "edit"),
    [
        (0, lambda state: None),
        (17, lambda state: None),
        (9, lambda state: state["slots"].pop("grad_z", None)),  # it can be computed again
    ],
)
def test_a_resumed_run_is_the_same_bit_for_bit(cut, edit):
    whole, resumed = on_threads(2, end, 30), on_threads(2, partial(end, 30, cut, edit))
    for (x, traffic, _), (again, same, _) in zip(whole, resumed, strict=True):
        assert torch.equal(x, again)
        assert traffic == same


def test_a_state_goes_back_and_has_names():
    def load():
        net = model()
        run = Run(params=net.named_parameters())
        fresh = run.optimizer.state_dict()
        run.optimizer.step(lambda: (loss := loss_of(net, 0)).backward() or loss)
        state = run.optimizer.state_dict()
        assert state["slots"]["h_i"]["tensors"].keys() == {"weight", "bias"}
        run.optimizer.load_state_dict(fresh)
        assert run.optimizer.traffic.up_bytes == 0 < state["traffic"]["sent"]

    on_threads(2, load)


def changed(**values):
    def change(state):
        state = copy.deepcopy(state)
        for name, value in values.items():
            (state if name in state else state["two_direction"])[name] = value
        return state

    return change


OTHER_STATES = [
    (lambda state: {**state, "rank": 1 - state["rank"]}, {}, "rank"),
    (lambda state: state, {"lbar": 5.0}, "lbar=5.0"),
    (lambda state: state, {"seed": 1}, "seed 0"),
    (changed(slots={}), {}, "'x'"),
    (lambda state: (state["slots"]["v"]["tensors"]["0"].fill_(torch.nan), state)[1], {}, "'0'"),
    (changed(two_direction=None), {}, "unknown"),
]


@pytest.mark.parametrize(("state_of", "options", "word"), OTHER_STATES)
def test_another_state_is_refused_and_changes_nothing(state_of, options, word):
    def body():
        run = Run(**options).train(1)
        state, before = Run().train(3).optimizer.state_dict(), run.x
        try:
            run.optimizer.load_state_dict(state_of(state))
        finally:
            assert torch.equal(run.x, before)
            run.train(1)

    assert_refused(2, body, CheckpointError, word)


# --- Closures that fail ---------------------------------------------------------------------------


def sparse(run, loss):
    loss.backward()
    run.net.weight.grad = run.net.weight.grad.to_sparse()
    return loss


FAULTS = [
    (lambda run, loss: loss.backward(), "None"),
    (lambda run, loss: loss.backward() or loss * torch.nan, "nan"),
    (lambda run, loss: loss, "loss.backward()"),
    (sparse, "dense"),
]


@pytest.mark.parametrize(("fault", "word"), FAULTS)
def test_a_fault_of_one_rank_raises_on_every_rank_and_names_the_worker(fault, word):
    def body():
        run = Run().train(1)
        before = run.x

        bad = lambda: fault(run, loss_of(run.net, 1))  # noqa: E731
        try:
            run.optimizer.step(bad if dist.get_rank() == 1 else run.closure)
        finally:
            assert torch.equal(run.x, before)

    assert_refused(3, body, NonFiniteError, match=rf"worker 1 \(.*closure.*{re.escape(word)}")


def survives_a_fault(at, steps):
    """Make rank 1's closure raise in call number `at`, and then repeat the step."""
    run, failures, calls = Run(), [], []

    def closure():
        calls.append(None)
        if len(calls) == at and dist.get_rank() == 1:
            raise ConnectionError("labels")
        return run.closure()

    for _ in range(steps):
        try:
            run.optimizer.step(closure)
        except NonFiniteError as error:
            failures.append(error)
            run.optimizer.step(closure)
    return run.x, failures, len(calls)


def test_a_fault_in_any_call_changes_nothing():
    steps = 8
    expected, _, calls = on_threads(2, survives_a_fault, 0, steps)[1]
    # Some calls are at a z that has moved. They belong to the previous iteration.
    assert calls > 1 + steps
    for at in range(1, calls + 1):
        for rank, (x, failures, _) in enumerate(on_threads(2, survives_a_fault, at, steps)):
            (error,) = failures
            assert "ConnectionError('labels')" in str(error)
            assert isinstance(error.__cause__, ConnectionError) == (rank == 1)
            assert torch.equal(x, expected)


MIXED = [torch.zeros(2, dtype=dtype) for dtype in (torch.float32, torch.float64)]


def groups(**options):
    return [{"params": [p], **options} for p in model().parameters()]


REFUSED = [
    (lambda rank: {"up": "ef(topk(0.2))"}, SpecError, "up", "ef(topk(0.2))"),
    (lambda rank: {"down": UP}, SpecError, "down", "alpha"),
    (lambda rank: {"params": MIXED}, SpecError, None, "torch.float64"),
    (lambda rank: {"params": groups()}, SpecError, None, "2"),
    (lambda rank: {"params": groups(lr=0.1)[:1]}, SpecError, None, "lr"),
    (lambda rank: {"params": [torch.zeros(21 + rank)]}, RankMismatchError, None, "coordinates"),
    (lambda rank: {"mu": -1.0 if rank else MU}, RankMismatchError, None, "-1.0"),
]


@pytest.mark.parametrize(("change", "error", "field", "word"), REFUSED)
def test_refusals(change, error, field, word):
    assert_refused(2, lambda: Run(**change(dist.get_rank())), error, word, field=field)


def test_calls_at_the_wrong_time_and_different_parameters_are_refused():
    with pytest.raises(SpecError, match="init_process_group"):
        Run()
    assert_refused(1, lambda: Run().optimizer.add_param_group(groups()[0]), SpecError, "add")

    def start():
        run = Run()
        nn.init.constant_(run.net.bias, dist.get_rank())
        run.train(1)

    assert_refused(2, start, RankMismatchError, "parameters", "rank 0", "rank 1")
