"""LARS compared with plain loops in float64, and its mean update on sampled gradients."""

import copy
import math

import pytest
import torch

from torchcomp.errors import SpecError, UnsupportedModelError
from torchcomp.jointspar import LARS

SHAPES = ((4, 3), (4,), (2, 2, 3, 3), ())
OPTIONS = {"lr": 0.7, "momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.02}


def tensors(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


def parameters(dtype=torch.float64):
    return [torch.nn.Parameter(x) for x in tensors(0, dtype)]


def set_gradients(params, gradients):
    for x, g in zip(params, gradients, strict=True):
        x.grad = None if g is None else g.clone()


class Reference:
    """The algorithm, entry by entry, in Python floats."""

    def __init__(self, start, exclude=False, **options):
        self.x = [x.flatten().tolist() for x in start]
        self.v = [[0.0] * len(x) for x in self.x]
        self.exclude, self.options = exclude, options

    def step(self, gradients):
        lr, m = self.options["lr"], self.options["momentum"]
        for layer, gradient in enumerate(gradients):
            if gradient is None:
                continue
            x, v, g = self.x[layer], self.v[layer], gradient.flatten().tolist()
            decay, trust = self.options["weight_decay"], 1.0
            if self.exclude and gradient.dim() <= 1:
                decay = 0.0
            else:
                size, norm = math.hypot(*x), math.hypot(*g)
                trust = self.options["trust_coefficient"]
                if size and norm:
                    trust *= size / (norm + decay * size)
            for i in range(len(x)):
                v[i] = m * v[i] + lr * trust * (g[i] + decay * x[i])
                x[i] -= v[i]


@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_plain_loops(exclude, dtype, tolerance):
    params = parameters(dtype)
    optimizer = LARS(params, **OPTIONS, exclude_vectors=exclude)
    reference = Reference(tensors(0, dtype), exclude, **OPTIONS)
    for step in range(20):
        gradients = tensors(step + 1, dtype)
        if step % 3 == 1:
            gradients[0] = None
        if step % 5 == 2:
            gradients[2] = torch.zeros_like(gradients[2])
        set_gradients(params, gradients)
        optimizer.step()
        reference.step(gradients)
    for x, expected in zip(params, reference.x, strict=True):
        wanted = torch.tensor(expected, dtype=torch.float64).reshape(x.shape)
        torch.testing.assert_close(x.detach().double(), wanted, rtol=tolerance, atol=tolerance)


def test_a_tensor_that_starts_at_zero_moves():
    x = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = LARS([x], 1.0, trust_coefficient=0.5)
    x.grad = torch.ones_like(x)
    optimizer.step()
    assert x.tolist() == [-0.5] * 3


def test_parameter_groups_have_their_own_options():
    first, second = parameters()[:2]
    LARS([{"params": [first], "weight_decay": 0.1}, {"params": [second]}], 0.1)
    with pytest.raises(SpecError, match=r"weight_decay.*-1"):
        LARS([{"params": [first], "weight_decay": -1}], 0.1)


def test_without_a_gradient_nothing_moves():
    params = parameters()
    optimizer = LARS(params, **OPTIONS)
    set_gradients(params, tensors(1))
    optimizer.step()
    before = [x.detach().clone() for x in params]
    velocity = copy.deepcopy(optimizer.state_dict()["state"])
    set_gradients(params, [None] * len(params))
    optimizer.step()
    for x, held in zip(params, before, strict=True):
        assert torch.equal(x, held)
    for number, state in optimizer.state_dict()["state"].items():
        assert torch.equal(state["momentum"], velocity[number]["momentum"])


def test_a_checkpoint_resumes_bit_for_bit():
    whole, halves = parameters(), parameters()
    one, other = LARS(whole, **OPTIONS), LARS(halves, **OPTIONS)
    for step in range(10):
        for params, optimizer in ((whole, one), (halves, other)):
            set_gradients(params, tensors(step + 1))
            optimizer.step()
        if step == 4:
            saved = copy.deepcopy(other.state_dict())
            other = LARS(halves, lr=99.0)
            other.load_state_dict(saved)
    for x, y in zip(whole, halves, strict=True):
        assert torch.equal(x, y)


def test_the_closure_is_called_with_gradients():
    x = torch.nn.Parameter(torch.ones(2))
    optimizer = LARS([x], 0.1)

    def closure():
        optimizer.zero_grad()
        loss = x.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 2.0
    assert (x < 1).all()


# --- Sampled gradients ----------------------------------------------------------------------------


class Coin:
    """Sampling with one probability for all parameters, and fixed norms."""

    def __init__(self, p, norms=(), zeros=False):
        self.p, self.norms, self.zeros = p, dict(norms), zeros

    def probability(self, parameter):
        return self.p

    def presence(self, parameter):
        return 1.0 if self.zeros else self.p

    def norm(self, parameter):
        return self.norms[parameter]


def moved(gradients, p, kept, zeros=False, **options):
    """Return the change of each parameter by one step."""
    params = parameters()
    coin = Coin(p, {x: float(g.norm()) for x, g in zip(params, gradients, strict=True)}, zeros)
    optimizer = LARS(params, **{**OPTIONS, **options}, sampled=coin)
    dropped = [torch.zeros_like(g) if zeros else None for g in gradients]
    set_gradients(params, [g / p for g in gradients] if kept else dropped)
    optimizer.step()
    return [x.detach() - x0 for x, x0 in zip(params, tensors(0), strict=True)]


@pytest.mark.parametrize("zeros", [False, True], ids=["dropped is None", "dropped is zero"])
@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("p", [0.0125, 0.3, 0.9])
def test_the_mean_update_on_a_fixed_gradient_is_the_dense_one(p, exclude, zeros):
    g = tensors(1)
    options = {"exclude_vectors": exclude}
    dense = moved(g, 1.0, True, **options)
    kept, dropped = (moved(g, p, keep, zeros, **options) for keep in (True, False))
    for full, a, b in zip(dense, kept, dropped, strict=True):
        torch.testing.assert_close(p * a + (1 - p) * b, full, rtol=1e-12, atol=1e-15)


def test_with_its_own_norm_the_mean_update_would_be_p_times_the_dense_one():
    """Plain LARS, without decay, would fail the test above: it cancels the 1 / p."""
    g, p = tensors(1), 0.25
    dense = moved(g, 1.0, True, weight_decay=0.0)
    params = parameters()
    optimizer = LARS(params, **{**OPTIONS, "weight_decay": 0.0})
    set_gradients(params, [x / p for x in g])
    optimizer.step()
    for x, x0, full in zip(params, tensors(0), dense, strict=True):
        torch.testing.assert_close(p * (x.detach() - x0), p * full, rtol=1e-12, atol=0)


@pytest.mark.parametrize("pauses", [True, False], ids=["gradient None", "gradient zero"])
def test_with_momentum_the_long_run_is_the_dense_one_whether_or_not_momentum_pauses(pauses):
    p, steps, momentum, start = 0.5, 10_000, 0.8, 1e9
    x = torch.nn.Parameter(torch.tensor([start], dtype=torch.float64))
    coin = Coin(p, {x: start}, zeros=not pauses)
    optimizer = LARS([x], 1.0, momentum=momentum, trust_coefficient=1.0, sampled=coin)
    kept = torch.rand(steps, generator=torch.Generator().manual_seed(0)) < p
    for keep in kept:
        skipped = None if pauses else torch.zeros_like(x)
        x.grad = torch.full_like(x, 1 / p) if keep else skipped
        optimizer.step()
    dense = steps / (1 - momentum)
    error = dense * math.sqrt((1 / p - 1) / steps)
    assert abs(start - x.item() - dense) < 4 * error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"lr.*-1\.0"),
        ({"lr": math.nan}, "lr.*nan"),
        ({"lr": 1.0, "momentum": 1.0}, r"momentum.* 1\.0"),
        ({"lr": 1.0, "weight_decay": -0.1}, r"weight_decay.*-0\.1"),
        ({"lr": 1.0, "trust_coefficient": 0.0}, r"trust_coefficient.* 0\.0"),
        ({"lr": 1.0, "exclude_vectors": "no"}, "exclude_vectors.*True.*False.*'no'"),
        ({"lr": 1.0, "sampled": "all"}, "sampled.*JointSpar.*'all'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(SpecError, match=message):
        LARS(parameters(), **options)


def test_a_group_that_is_added_later_is_checked_and_not_added():
    first, second = parameters()[:2]
    optimizer = LARS([first], 0.1)
    with pytest.raises(SpecError, match=r"lr.*-5\.0"):
        optimizer.add_param_group({"params": [second], "lr": -5.0})
    assert len(optimizer.param_groups) == 1


def test_a_sparse_gradient_is_refused_before_any_parameter_changes():
    dense, table = torch.nn.Parameter(torch.ones(2)), torch.nn.Embedding(5, 3, sparse=True)
    optimizer = LARS([dense, table.weight], 0.1)
    (table(torch.tensor([1])).sum() + dense.sum()).backward()
    with pytest.raises(UnsupportedModelError, match=r"\(5, 3\).*sparse=False"):
        optimizer.step()
    assert torch.equal(dense.detach(), torch.ones(2))


@pytest.mark.parametrize(
    ("size", "value", "gradient", "running", "expected"),
    [
        # |x| = 1e5, then |x| / |g| = 1.7e7, then a running |g| of 1e5: all above 65504.
        (1000, 100.0, 0.01, None, 90.0),
        (100, 1.0, 6e-8, None, 0.9),
        (100, 1.0, 1000.0, 1e5, 0.9),
    ],
)
def test_half_precision_neither_overflows_nor_vanishes(size, value, gradient, running, expected):
    x = torch.nn.Parameter(torch.full((size, size), value, dtype=torch.float16))
    x.grad = torch.full_like(x, gradient)
    sampled = None if running is None else Coin(0.5, {x: running})
    LARS([x], 1.0, trust_coefficient=0.1, sampled=sampled).step()
    torch.testing.assert_close(x.detach(), torch.full_like(x, expected), rtol=2e-3, atol=0)
