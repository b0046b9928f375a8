"""The torch optimizer: equals the method, resumes bit for bit, raises on every rank."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from tests.support.outcomes import reloaded
from tests.support.ranks import on_threads
from torchcomp.compressors import RandK, TopK
from torchcomp.errors import CheckpointError, NonFiniteError, RankMismatchError, SpecError
from torchcomp.two_direction import Simulated, TwoDirection, TwoDirectionMethod

UP, DOWN = "randk(0.2, unbiased=True)", "topk(0.2)"
OPTIONS = {"lbar": 4.0, "mu": 1e-2}
MU = OPTIONS["mu"]


def shard(rank):
    generator = torch.Generator().manual_seed(rank)
    features = torch.randn(20, 6, dtype=torch.float64, generator=generator)
    return features, torch.randint(0, 3, (20,), generator=generator)


def model():
    net = nn.Linear(6, 3, dtype=torch.float64)
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    return net


def closure_of(net, optimizer, rank, mu=MU):
    features, labels = shard(rank)

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(net(features), labels)
        loss = loss + mu / 2 * sum(p.square().sum() for p in net.parameters())
        loss.backward()
        closure.calls += 1
        return loss

    closure.calls = 0
    return closure


def train(steps, resume_after=None, **options):
    rank = dist.get_rank()
    net = model()
    optimizer = TwoDirection(net.parameters(), UP, DOWN, **OPTIONS, **options)
    closure = closure_of(net, optimizer, rank)
    for t in range(steps):
        loss = optimizer.step(closure)
        assert isinstance(loss, torch.Tensor)
        if t + 1 == resume_after:
            state = copy.deepcopy(optimizer.state_dict())
            net = model()
            optimizer = TwoDirection(net.parameters(), UP, DOWN, **OPTIONS, **options)
            optimizer.load_state_dict(state)
            closure = closure_of(net, optimizer, rank)
    return parameters_to_vector(net.parameters()).detach(), optimizer.traffic, closure.calls


def test_it_equals_the_method():
    def gradients(x):
        rows = []
        for rank in range(4):
            net = model()
            nn.utils.vector_to_parameters(x, net.parameters())
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            closure_of(net, optimizer, rank)()
            rows.append(torch.cat([p.grad.reshape(-1) for p in net.parameters()]))
        return torch.stack(rows)

    server = Simulated(4)
    method = TwoDirectionMethod(
        gradients, torch.zeros(21).double(), server, RandK(0.2, unbiased=True), TopK(0.2), **OPTIONS
    )
    for _ in range(40):
        method.step()
    for x, traffic, calls in on_threads(4, train, 40):
        assert torch.equal(x, method.solution)
        assert traffic == server.traffic
        assert calls == method.evaluations


@pytest.mark.thorough
def test_it_converges():
    mu = 0.1

    def slope_at_the_end():
        net = model()
        optimizer = TwoDirection(net.parameters(), UP, DOWN, lbar=4.0, mu=mu)
        closure = closure_of(net, optimizer, dist.get_rank(), mu)
        for _ in range(700):
            optimizer.step(closure)
        closure()
        return torch.cat([p.grad.reshape(-1) for p in net.parameters()])

    slopes = torch.stack(on_threads(2, slope_at_the_end))
    assert slopes.mean(0).square().sum() / (2 * mu) < 1e-10


def test_parameters_are_updated_in_place():
    """Tensors that share their memory see the updates, and channels_last is kept."""

    def shared():
        weight = torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)
        weight.requires_grad_()
        view = weight.detach()
        optimizer = TwoDirection([weight], UP, DOWN, lbar=1.0, mu=0.0)
        target = torch.arange(24.0).view(2, 3, 2, 2)

        def closure():
            optimizer.zero_grad()
            loss = (weight - target).square().mean()
            loss.backward()
            return loss.item()

        losses = [optimizer.step(closure) for _ in range(60)]
        assert losses[-1] < 0.5 * losses[0]
        assert torch.equal(view, weight)
        assert weight.is_contiguous(memory_format=torch.channels_last)

    on_threads(2, shared)


# --- Checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 17])
def test_a_resumed_run_is_the_same_bit_for_bit(after):
    for whole, resumed in zip(
        on_threads(2, train, 40), on_threads(2, train, 40, after), strict=True
    ):
        assert torch.equal(whole[0], resumed[0])
        assert whole[1] == resumed[1]


def resumed_from_another_run(change, parts):
    net = model()
    optimizer = TwoDirection(net.parameters(), UP, DOWN, **OPTIONS)
    optimizer.step(closure_of(net, optimizer, dist.get_rank()))
    state = optimizer.state_dict()
    if change == "rank":
        state["rank"] = 1 - dist.get_rank()
        other = TwoDirection(net.parameters(), UP, DOWN, **OPTIONS)
    else:
        other = TwoDirection(net.parameters(), UP, DOWN, **{**OPTIONS, **change})
    with pytest.raises(CheckpointError, match=parts):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("rank", r"\brank (0.* 1|1.* 0)\b"),
        ({"lbar": 5.0}, r"lbar=4\.0.*lbar=5\.0"),
        ({"seed": 1}, r"\bseed 0\b"),
    ],
)
def test_a_state_of_another_run_is_refused(change, parts):
    on_threads(2, resumed_from_another_run, change, parts)


def test_a_state_from_before_the_first_step_is_a_fresh_start():
    def end(load):
        net = model()
        optimizer = TwoDirection(net.parameters(), UP, DOWN, **OPTIONS)
        if load:
            optimizer.load_state_dict(optimizer.state_dict())
        closure = closure_of(net, optimizer, dist.get_rank())
        for _ in range(5):
            optimizer.step(closure)
        return parameters_to_vector(net.parameters()).detach()

    fresh, loaded = on_threads(2, end, False), on_threads(2, end, True)
    assert torch.equal(fresh[0], loaded[0])


# --- Closures that fail ---------------------------------------------------------------------------


def returns_none(loss):
    loss.backward()


def returns_nan(loss):
    loss.backward()
    return loss * torch.nan


def no_backward(loss):
    return loss


def sparse(loss):
    # One parameter gets a sparse gradient, as from a sparse embedding.
    loss.backward()
    sparse.weight.grad = sparse.weight.grad.to_sparse()
    return loss


def raises(loss):
    raise KeyError("labels")


def one_rank_fails(fault):
    net = model()
    optimizer = TwoDirection(net.parameters(), UP, DOWN, **OPTIONS)
    good = closure_of(net, optimizer, dist.get_rank())
    features, labels = shard(dist.get_rank())

    def bad():
        sparse.weight = net.weight
        return fault(cross_entropy(net(features), labels))

    optimizer.step(good)
    before = parameters_to_vector(net.parameters()).detach().clone()
    try:
        optimizer.step(bad if dist.get_rank() == 1 else good)
    finally:
        assert torch.equal(parameters_to_vector(net.parameters()), before)


@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        (returns_none, r"\bNone\b"),
        (returns_nan, r"\bnan\b"),
        (no_backward, r"loss\.backward\(\)"),
        (sparse, r"\bsparse\b"),
        (raises, r"KeyError\('labels'\)"),
    ],
)
def test_a_fault_of_one_rank_raises_on_every_rank_and_names_the_worker(fault, parts):
    for error in on_threads(3, one_rank_fails, fault, catch=True):
        assert isinstance(error, NonFiniteError)
        assert re.search(rf"worker 1 \(.*closure.*{parts}", str(error))
        assert not re.search("worker [02]", str(error))


def survives_a_fault(at, steps):
    """Make rank 1's closure raise in call number `at`, and then repeat the step."""
    net = model()
    optimizer = TwoDirection(net.parameters(), UP, DOWN, **OPTIONS)
    good = closure_of(net, optimizer, dist.get_rank())
    calls, failures = [], []

    def closure():
        calls.append(None)
        if len(calls) == at and dist.get_rank() == 1:
            raise ConnectionError("labels")
        return good()

    for _ in range(steps):
        try:
            optimizer.step(closure)
        except NonFiniteError as error:
            failures.append(error)
            optimizer.step(closure)
    return parameters_to_vector(net.parameters()).detach(), failures, len(calls)


def test_a_fault_in_any_call_changes_nothing():
    steps = 8
    expected, _, calls = on_threads(2, survives_a_fault, 0, steps)[1]
    # Some calls are at a z that has moved. They belong to the previous iteration.
    assert calls > 1 + steps
    for at in range(1, calls + 1):
        for rank, (x, failures, _) in enumerate(on_threads(2, survives_a_fault, at, steps)):
            (error,) = failures
            assert re.search(r"worker 1 \(.*ConnectionError\('labels'\)", str(error))
            assert isinstance(error.__cause__, ConnectionError) == (rank == 1)
            assert torch.equal(x, expected)


def test_a_gradient_that_is_not_deterministic_is_found_on_request():
    def noisy():
        net = model()
        optimizer = TwoDirection(
            net.parameters(), UP, DOWN, **OPTIONS, check_deterministic=dist.get_rank() >= 0
        )
        features, labels = shard(dist.get_rank())
        generator = torch.Generator().manual_seed(0)

        def closure():
            optimizer.zero_grad()
            chosen = torch.randint(0, 20, (5,), generator=generator)
            loss = cross_entropy(net(features[chosen]), labels[chosen])
            loss.backward()
            return loss

        optimizer.step(closure)

    for error in on_threads(2, noisy, catch=True):
        assert isinstance(error, NonFiniteError)
        assert re.search(r"worker 0 \(.*deterministic.*worker 1 \(.*deterministic", str(error))
    assert len(on_threads(2, train, 3)) == 2


# --- Arguments ------------------------------------------------------------------------------------


def test_unequal_shards_are_refused():
    def build():
        samples = 20 if dist.get_rank() else 19
        TwoDirection(model().parameters(), UP, DOWN, **OPTIONS, samples=samples)

    for error in on_threads(2, build, catch=True):
        assert isinstance(error, RankMismatchError)
        assert re.search("samples.*19 on rank 0.*20 on rank 1", str(error))


def test_different_models_are_refused():
    def build(classes):
        net = nn.Linear(6, classes + dist.get_rank())
        TwoDirection(net.parameters(), UP, DOWN, **OPTIONS)

    for error in on_threads(2, build, 3, catch=True):
        assert isinstance(error, RankMismatchError)
        assert re.search("coordinates.*21 on rank 0.*28 on rank 1", str(error))


def test_different_parameters_are_refused_before_anything_starts():
    def start():
        net = model()
        nn.init.constant_(net.bias, dist.get_rank())
        optimizer = TwoDirection(net.parameters(), UP, DOWN, **OPTIONS)
        optimizer.step(closure_of(net, optimizer, dist.get_rank()))

    for error in on_threads(2, start, catch=True):
        assert isinstance(error, RankMismatchError)
        assert re.search("TwoDirection.*parameters.*on rank 0.*on rank 1", str(error))


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"up": "ef(topk(0.2))"}, r"up: .*ef\(topk\(0\.2\)\)"),
        ({"up": "topk(0.2)"}, r"up: .*topk\(0\.2\).*unbiased.*omega"),
        ({"down": "randk(0.2, unbiased=True)"}, r"down: .*randk\(0\.2.*contractive.*alpha"),
        ({"mu": -1.0}, r"mu\b.*lbar = 4\b.*-1\.0"),
    ],
)
def test_bad_arguments_are_refused(change, parts):
    def build():
        arguments = {"up": UP, "down": DOWN, **OPTIONS, **change}
        up, down = arguments.pop("up"), arguments.pop("down")
        with pytest.raises(SpecError, match=parts):
            TwoDirection(model().parameters(), up, down, **arguments)

    on_threads(2, build)


def test_bad_arguments_of_one_rank_raise_on_every_rank():
    def build():
        mu = -1.0 if dist.get_rank() else MU
        TwoDirection(model().parameters(), UP, DOWN, lbar=4.0, mu=mu)

    for error in on_threads(2, build, catch=True):
        assert isinstance(error, RankMismatchError)
        assert re.search(r"mu\b.*lbar = 4\b.*-1\.0", str(error))


def test_parameters_that_cannot_form_one_vector_are_refused():
    with pytest.raises(SpecError, match="init_process_group"):
        TwoDirection(model().parameters(), UP, DOWN, **OPTIONS)
    mixed = [torch.zeros(2, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    first, second = model().parameters()
    refused = {
        r"torch\.float32.*torch\.float64": mixed,
        r"group.*\b2\b": [{"params": [first]}, {"params": [second]}],
        r"\blr\b": [{"params": [first], "lr": 0.1}],
    }

    def build():
        for parts, parameters in refused.items():
            with pytest.raises(SpecError, match=parts):
                TwoDirection(parameters, UP, DOWN, **OPTIONS)
        optimizer = TwoDirection([first], UP, DOWN, **OPTIONS)
        with pytest.raises(SpecError, match=r"TwoDirection.*\badd\b.*\bgroup\b"):
            optimizer.add_param_group({"params": [second]})

    on_threads(2, build)


def test_other_objects_are_refused_as_states():
    def load():
        optimizer = TwoDirection(model().parameters(), UP, DOWN, **OPTIONS)
        with pytest.raises(CheckpointError, match=r"NoneType$"):
            optimizer.load_state_dict(None)
        for state in (
            {},
            {"method": None},
            torch.optim.SGD(model().parameters()).state_dict(),
        ):
            with pytest.raises(CheckpointError, match="'version'"):
                optimizer.load_state_dict(state)

    on_threads(1, load)


def paths(value, path=()):
    """Yield the path of every entry of a state."""
    for key, each in value.items() if isinstance(value, dict) else ():
        yield (*path, key)
        yield from paths(each, (*path, key))


def damaged(state, path, damage):
    """Return a copy of the state with one entry changed, or None if the damage does not apply."""
    state = copy.deepcopy(state)
    *parents, last = path
    holder = state
    for key in parents:
        holder = holder[key]
    value = holder[last]
    if damage == "missing":
        del holder[last]
    elif damage == "another type":
        holder[last] = object()
    elif damage == "negative" and type(value) in (int, float):
        holder[last] = -1
    elif damage == "NaN" and isinstance(value, (torch.Tensor, float)):
        holder[last] = value * torch.nan
    else:
        return None
    return state


def test_a_damaged_state_is_refused_and_changes_nothing():
    def load():
        net = model()
        optimizer = TwoDirection(net.parameters(), UP, DOWN, **OPTIONS)
        closure = closure_of(net, optimizer, dist.get_rank())
        for _ in range(3):
            optimizer.step(closure)
        state, tried = optimizer.state_dict(), 0
        for path in paths(state):
            for damage in ("missing", "another type", "negative", "NaN"):
                broken = damaged(state, path, damage)
                # grad_z is optional: it can be computed again.
                if broken is None or (path == ("slots", "grad_z") and damage == "missing"):
                    continue
                with pytest.raises(CheckpointError):
                    optimizer.load_state_dict(broken)
                tried += 1
        assert tried > 100
        after = optimizer.state_dict()
        assert after["slots"].keys() == state["slots"].keys()
        assert all(
            torch.equal(after["slots"][name]["tensors"]["0"], slot["tensors"]["0"])
            for name, slot in state["slots"].items()
        )
        optimizer.step(closure)

    on_threads(2, load)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"step": 1000}, r"\b4 round trips"),
        ({"step": 0}, r"\bstep 0\b"),
        ({"evaluations": 2}, r"\b2 evaluations"),
        ({"rho": 2.0}, r"\brho 2\.0"),
        ({"slots": {}}, r"\bslots\b.*'h'"),
        ({"two_direction": None}, r"\bslots\b.*\bunknown\b.*'h'"),
    ],
)
def test_an_impossible_state_is_refused(change, parts):
    def load():
        net = model()
        optimizer = TwoDirection(net.parameters(), UP, DOWN, **OPTIONS)
        for _ in range(3):
            optimizer.step(closure_of(net, optimizer, dist.get_rank()))
        state = copy.deepcopy(optimizer.state_dict())
        for name, value in change.items():
            (state if name in state else state["two_direction"])[name] = value
        with pytest.raises(CheckpointError, match=parts):
            optimizer.load_state_dict(state)

    on_threads(2, load)


def test_a_state_without_the_gradients_at_z_gives_the_same_run():
    def end(dropped):
        net = model()
        optimizer = TwoDirection(net.parameters(), UP, DOWN, **OPTIONS)
        closure = closure_of(net, optimizer, dist.get_rank())
        for t in range(20):
            optimizer.step(closure)
            if dropped and t == 9:
                state = optimizer.state_dict()
                state["slots"].pop("grad_z", None)
                optimizer.load_state_dict(state)
        return parameters_to_vector(net.parameters()).detach()

    assert torch.equal(on_threads(2, end, True)[0], on_threads(2, end, False)[0])


def test_a_state_is_saved_by_the_names_of_its_parameters_and_loads_as_weights_only():
    def save():
        net = model()
        optimizer = TwoDirection(net.named_parameters(), UP, DOWN, **OPTIONS)
        optimizer.step(closure_of(net, optimizer, dist.get_rank()))
        state = reloaded(optimizer.state_dict())
        assert state["slots"]["h_i"]["tensors"].keys() == {"weight", "bias"}
        optimizer.load_state_dict(state)

    on_threads(2, save)


def test_loading_a_state_restores_its_traffic():
    def load():
        net = model()
        optimizer = TwoDirection(net.parameters(), UP, DOWN, **OPTIONS)
        fresh = optimizer.state_dict()
        closure = closure_of(net, optimizer, dist.get_rank())
        optimizer.step(closure)
        later = copy.deepcopy(optimizer.state_dict())
        sent = optimizer.traffic.nbytes
        optimizer.load_state_dict(fresh)
        assert optimizer.traffic.nbytes == 0 < sent
        optimizer.load_state_dict(later)
        assert optimizer.traffic.nbytes == sent

    on_threads(2, load)
