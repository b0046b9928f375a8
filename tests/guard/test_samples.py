"""Elements that are followed: their ages and changes."""

import pytest
import torch

from tests.support.vectors import normal
from torchcomp.aggregators import Law
from torchcomp.engine.bucket import BucketShape
from torchcomp.engine.state import Kind, Slot
from torchcomp.guard.report import SAMPLED as MOST
from torchcomp.guard.watch import Samples

SHAPE = BucketShape(("a", "none", "b"), ((4,), (0,), (2,)), torch.float32)
NUMEL, CPU = 6, torch.device("cpu")
ERROR = Law(before={"error": -1.0}, after={"error": 1.0})


def samples(dtype=torch.float32, law=ERROR, shape=SHAPE, shard=slice(0, 0), **sharded):
    slots = {
        name: Slot(name, Kind.DEBT, shape.names, shape.sizes, dtype, sharded.get(name, False))
        for name, _, _ in law.terms()
    }
    return Samples(shape, law, slots, shard, CPU)


def step(followed, found, gradient, *, sent=(), applied=None, ratios=()):
    """Follow a step of error feedback that sends `sent`. Return the residual that it leaves."""
    left = (found + gradient.to(found.dtype)).index_fill(0, torch.tensor(sent).long(), 0)
    mean = torch.zeros(len(found)).index_fill(0, torch.tensor(sent).long(), 1.0)
    followed.before(gradient)
    followed.after(mean if applied is None else applied, {"error": (found, left)}, dict(ratios))
    return left


def ages(followed):
    followed.take(1)
    return followed._ages.tolist()


def changed(followed):
    return followed.take(1)[2].tolist()


def test_an_element_ages_until_it_is_sent():
    followed, residual = samples(), torch.zeros(NUMEL)
    for number, sent in enumerate([[], [4], [4, 5], []]):
        residual = step(followed, residual, normal(NUMEL, seed=number), sent=sent)
    assert ages(followed) == [4, 4, 4, 4, 1, 1]
    waiting, active, differs = followed.take(2).tolist()
    assert (waiting, active, differs) == ([4, 0], [4, 2], [0, 0])


def test_an_element_is_not_sent_if_it_reaches_no_mean():
    followed = samples()
    step(followed, torch.zeros(NUMEL), normal(NUMEL), sent=[4], applied=torch.zeros(NUMEL))
    # Its residual is zero: nothing waits yet.
    assert ages(followed) == [1, 1, 1, 1, 0, 1]


def test_an_element_without_a_residual_still_waits_if_it_has_before():
    followed, nothing = samples(), torch.zeros(NUMEL)
    residual = step(followed, nothing, normal(NUMEL))
    # To the server, which applies nothing yet.
    residual = step(followed, residual, normal(NUMEL, seed=1), sent=[4], applied=nothing)
    step(followed, residual, nothing)
    assert ages(followed) == [3] * NUMEL


def test_without_gradients_nothing_waits():
    followed, nothing = samples(), torch.zeros(NUMEL)
    for _ in range(3):
        step(followed, nothing, nothing, applied=torch.ones(NUMEL))
    assert ages(followed) == [0] * NUMEL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_residual_that_changes_between_two_steps(dtype):
    followed = samples(dtype)
    residual = step(followed, torch.zeros(NUMEL, dtype=dtype), normal(NUMEL))
    residual = step(followed, residual, normal(NUMEL, seed=1))
    assert changed(followed) == [0, 0]
    residual[5] *= 1.01
    left = step(followed, residual, normal(NUMEL, seed=2))
    step(followed, left, normal(NUMEL, seed=3))
    assert changed(followed) == [0, 1]
    assert changed(followed) == [0, 0], "taken already"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_residual_that_should_have_been_multiplied(dtype):
    followed = samples(dtype)
    left = step(followed, torch.zeros(NUMEL, dtype=dtype), normal(NUMEL))
    left[4:] *= 0.7
    left = step(followed, left, normal(NUMEL, seed=1), ratios={"b": 0.7, "other": 2.0})
    assert changed(followed) == [0, 0]
    left[:4] *= 0.5
    step(followed, left, normal(NUMEL, seed=2), ratios={"a": 0.5, "b": 0.7})
    assert changed(followed) == [0, 2]


def test_a_shard_is_compared_where_its_owner_has_it():
    law = Law(before={"error": -1.0, "server": -1.0}, after={"error": 1.0, "server": 1.0})
    followed = samples(law=law, shard=slice(3, 5), server=True)
    residual, left = torch.zeros(NUMEL), torch.tensor([1.0, 2.0])
    for found in (torch.zeros(2), left, torch.tensor([1.0, 7.0])):
        followed.before(residual)
        followed.after(residual, {"error": (residual, residual), "server": (found, left)}, {})
    assert changed(followed) == [0, 1]


def test_values_that_enter_the_residual_with_factors():
    law = Law(gradient=1.9, before={"error": -1.0, "momentum": -0.81}, after={"error": 1.0})
    followed = samples(law=law)
    gradient, error, momentum = (normal(NUMEL, seed=seed) for seed in range(3))
    left = 1.9 * gradient + error + 0.81 * momentum
    left[4] *= 0.9
    followed.before(gradient)
    slots = {"error": (error, left), "momentum": (momentum, momentum)}
    followed.after(torch.ones(NUMEL), slots, {})
    assert ages(followed) == [1, 1, 1, 1, 0, 1]


@pytest.mark.parametrize("taken", [False, True])
def test_an_undone_step_leaves_everything_as_before_it(taken):
    followed = samples()
    first = step(followed, torch.zeros(NUMEL), normal(NUMEL))
    second = step(followed, first, normal(NUMEL, seed=1), sent=[3, 4])
    if taken:
        followed.take(1)
    followed.undo(["b", "other"])
    assert ages(followed) == [2, 2, 2, 0, 1, 1]
    # The next step finds the residuals of both steps.
    step(followed, torch.cat([second[:4], first[4:]]), normal(NUMEL, seed=2))
    assert changed(followed) == [0, 0]
    assert ages(followed) == [3, 3, 3, 1, 2, 2]


@pytest.mark.parametrize("steps", [2, 3, 20])
def test_steps_are_evaluated_together_as_one_by_one(steps):
    found = []
    for most in (1, steps):
        followed, residual = samples(), torch.zeros(NUMEL)
        followed._most, counts = most, []
        for number in range(20):
            sent = torch.randperm(NUMEL, generator=torch.Generator().manual_seed(number))[:1]
            gradient = normal(NUMEL, seed=number) * (number % 5 > 0)
            left = step(followed, residual, gradient, sent=sent.tolist())
            residual = left if number % 8 else normal(NUMEL, seed=number)
            if number in (9, 10):
                followed.undo(["a"])
                counts.append(followed.take(2))
        found.append([ages(followed), torch.stack(counts).tolist(), changed(followed)])
    assert found[0] == found[1]
    assert len(set(found[0][0])) > 2


def test_gradients_and_residuals_of_several_dtypes():
    followed, residual = samples(), torch.zeros(NUMEL)
    for number in range(3):
        gradient = normal(NUMEL, dtype=torch.bfloat16, seed=number)
        residual = step(followed, residual, gradient, sent=[4])
    assert ages(followed) == [3, 3, 3, 3, 0, 3]


def test_of_a_large_parameter_all_ranks_and_buckets_follow_the_same_elements():
    large = BucketShape(("x", "y"), ((10_000,), (5,)), torch.float32)
    other = BucketShape(("y", "x"), ((5,), (10_000,)), torch.float32)
    one, two = samples(shape=large), samples(shape=other)
    assert len(one._at) == MOST + 5
    assert (one._at[:MOST] + 5).tolist() == two._at[5:].tolist()
    assert one._owner.tolist() == [0] * MOST + [1] * 5
