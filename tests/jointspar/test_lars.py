"""LARS compared with its paper, and its mean update on sampled gradients."""

import math

import pytest
import torch

from torchcomp import reference
from torchcomp.jointspar import LARS
from torchcomp.specs.errors import SpecError, UnsupportedModelError

SHAPES = ((4, 3), (4,), (2, 2, 3, 3), ())
OPTIONS = {"lr": 0.7, "momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.02}


def tensors(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


def start(dtype=torch.float64):
    return [*tensors(0, dtype)[:-1], torch.zeros((), dtype=dtype)]


def parameters(dtype=torch.float64):
    return [torch.nn.Parameter(x) for x in start(dtype)]


def set_gradients(params, gradients):
    for x, g in zip(params, gradients, strict=True):
        x.grad = None if g is None else g.clone()


class Coin:
    """Sampling with one probability for all parameters, and fixed norms."""

    def __init__(self, p, norms=()):
        self.p, self.norms = p, dict(norms)

    def probability(self, parameter):
        return self.p

    def norm(self, parameter):
        return self.norms[parameter]


@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("p", [1.0, 0.3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_the_reference(exclude, p, dtype, tolerance):
    params = parameters(dtype)
    sampled = None if p == 1 else Coin(p, dict.fromkeys(params, 2.5))
    optimizer = LARS(params, **OPTIONS, exclude_vectors=exclude, sampled=sampled)
    xs = [x.double() for x in start(dtype)]
    vs = [torch.zeros_like(x) for x in xs]
    for step in range(20):
        gradients = tensors(step + 1, dtype)
        if step % 3 == 1:
            gradients[0] = None
        if step % 5 == 2:
            gradients[2] = torch.zeros_like(gradients[2])
        set_gradients(params, gradients)
        assert optimizer.step(lambda: 2.0) == 2.0
        for i, g in enumerate(gradients):
            if g is not None:
                eta = None if exclude and g.dim() <= 1 else 0.02
                options = (0.7, 0.9, 0.01, eta)
                norm = 2.5 if sampled else None
                xs[i], vs[i] = reference.lars(xs[i], vs[i], g.double(), options, p, norm)
    for x, wanted in zip(params, xs, strict=True):
        torch.testing.assert_close(x.detach().double(), wanted, rtol=tolerance, atol=tolerance)


def moved(gradients, p, kept, **options):
    """Return the change of each parameter by one step."""
    params = parameters()
    norms = {x: float(g.norm()) for x, g in zip(params, gradients, strict=True)}
    optimizer = LARS(params, **{**OPTIONS, **options}, sampled=Coin(p, norms))
    set_gradients(params, [g / p if kept else None for g in gradients])
    optimizer.step()
    return [x.detach() - x0 for x, x0 in zip(params, start(), strict=True)]


@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("p", [0.0125, 0.3])
def test_the_mean_update_on_a_fixed_gradient_is_the_dense_one(p, exclude):
    g, options = tensors(1), {"exclude_vectors": exclude}
    dense, kept = moved(g, 1.0, True, **options), moved(g, p, True, **options)
    for full, a, b in zip(dense, kept, moved(g, p, False, **options), strict=True):
        torch.testing.assert_close(p * a + (1 - p) * b, full, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("size", "value", "gradient", "running", "expected"),
    # |x| = 1e5, then |x| / |g| = 1.7e7, then a running |g| of 1e5: all above 65504.
    [(1000, 100.0, 0.01, None, 90.0), (100, 1.0, 6e-8, None, 0.9), (100, 1.0, 1000.0, 1e5, 0.9)],
)
def test_half_precision_neither_overflows_nor_vanishes(size, value, gradient, running, expected):
    x = torch.nn.Parameter(torch.full((size, size), value, dtype=torch.float16))
    x.grad = torch.full_like(x, gradient)
    sampled = None if running is None else Coin(0.5, {x: running})
    LARS([x], 1.0, trust_coefficient=0.1, sampled=sampled).step()
    torch.testing.assert_close(x.detach(), torch.full_like(x, expected), rtol=2e-3, atol=0)


BAD = {"lr": math.nan, "momentum": 1.0, "weight_decay": -0.1, "trust_coefficient": 0.0}


@pytest.mark.parametrize(
    ("field", "value"), [*BAD.items(), ("exclude_vectors", "no"), ("sampled", "all")]
)
def test_bad_options_are_refused_also_in_a_later_group(field, value):
    first, second = parameters()[:2]
    with pytest.raises(SpecError) as caught:
        LARS([first], **{"lr": 1.0, field: value})
    assert caught.value.field == field
    if field != "sampled":
        optimizer = LARS([first], 0.1)
        with pytest.raises(SpecError):
            optimizer.add_param_group({"params": [second], field: value})
        assert len(optimizer.param_groups) == 1


def test_a_sparse_gradient_is_refused_before_any_parameter_changes():
    dense, table = torch.nn.Parameter(torch.ones(2)), torch.nn.Embedding(5, 3, sparse=True)
    optimizer = LARS([dense, table.weight], 0.1)
    (table(torch.tensor([1])).sum() + dense.sum()).backward()
    with pytest.raises(UnsupportedModelError, match="sparse=False"):
        optimizer.step()
    assert torch.equal(dense.detach(), torch.ones(2))
