"""Elements that are followed: their ages and changes, in each form of the kernel."""

import math

import pytest
import torch

from tests.kernels.forms import use_form
from tests.support.vectors import normal
from torchcomp import Averager, Guard, watch
from torchcomp.exchange import InProcessExchange
from torchcomp.kernels import backend, follow

NUMEL = 60
INDEX = torch.tensor([3, 4, 5, 20, 41, 59])


@pytest.fixture(params=["torch", "numba", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request, monkeypatch):
    if request.param == "cuda":
        return "cuda"
    use_form(request.param, "follow", monkeypatch)
    return "cpu"


def made(device, dtype=torch.float32, others=(torch.float32,)):
    return follow.follower(INDEX.to(device), NUMEL, dtype, others)


def step(follower, found, gradient, *, sent=(), applied=None, same=True):
    """Follow a step of error feedback that sends `sent`. Return the residual that it leaves."""
    left = (found + gradient.to(found.dtype)).index_fill(0, torch.tensor(sent).long(), 0)
    mean = torch.zeros(NUMEL).index_fill(0, torch.tensor(sent).long(), 1.0)
    mean = mean if applied is None else applied
    device = follower.left.device
    follower.begin(gradient.to(device), 1.0)
    follower.end(found.to(device), 1.0, left.to(device), mean.to(device), same)
    return left


def ages(follower):
    return follower.take()[0].tolist()


def bits(x):
    return x.cpu().view(torch.int32).tolist()


def changed(follower):
    return follower.take()[1].tolist()


def test_an_element_ages_until_it_is_sent(device):
    follower, residual = made(device), torch.zeros(NUMEL)
    for number, sent in enumerate([[], [4], [4, 59, 7], []]):
        residual = step(follower, residual, normal(NUMEL, seed=number), sent=sent, same=number > 0)
    assert ages(follower) == [4, 1, 4, 4, 4, 1]
    assert not any(changed(follower))


def test_an_element_is_not_sent_if_it_reaches_no_mean(device):
    follower = made(device)
    step(follower, torch.zeros(NUMEL), normal(NUMEL), sent=[4], applied=torch.zeros(NUMEL))
    # Its residual is zero: nothing waits yet.
    assert ages(follower) == [1, 0, 1, 1, 1, 1]


def test_an_element_without_a_residual_still_waits_if_it_has_before(device):
    follower, nothing = made(device), torch.zeros(NUMEL)
    residual = step(follower, nothing, normal(NUMEL), same=False)
    # To the server, which applies nothing yet.
    residual = step(follower, residual, normal(NUMEL, seed=1), sent=[4], applied=nothing)
    step(follower, residual, nothing)
    assert ages(follower) == [3] * 6


def test_without_gradients_nothing_waits(device):
    follower, nothing = made(device), torch.zeros(NUMEL)
    for _ in range(3):
        step(follower, nothing, nothing, applied=torch.ones(NUMEL))
    assert ages(follower) == [0] * 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_residual_that_changes_between_two_steps(device, dtype):
    follower = made(device, dtype)
    residual = step(follower, torch.zeros(NUMEL, dtype=dtype), normal(NUMEL), same=False)
    residual = step(follower, residual, normal(NUMEL, seed=1))
    assert not any(changed(follower))
    residual[20] *= 1.01
    residual[21] = 0  # is not followed
    left = step(follower, residual, normal(NUMEL, seed=2))
    step(follower, left, normal(NUMEL, seed=3))
    assert changed(follower) == [False, False, False, True, False, False]
    assert changed(follower) == [False] * 6, "taken already"


def test_a_step_that_does_not_continue_the_last_one_is_not_compared_with_it(device):
    follower = made(device)
    step(follower, normal(NUMEL), normal(NUMEL, seed=1), same=False)
    assert not any(changed(follower))


def test_values_that_enter_the_residual_with_factors(device):
    follower = made(device)
    gradient, error, momentum = (normal(NUMEL, seed=seed) for seed in range(3))
    left = 1.9 * gradient + error + 0.81 * momentum
    left[4] *= 0.9
    moved = [each.to(device) for each in (gradient, momentum, error, left)]
    follower.begin(moved[0], 1.9)
    follower.add(moved[1], 0.81)
    follower.end(moved[2], 1.0, moved[3], torch.ones(NUMEL, device=device), True)
    assert ages(follower) == [1, 0, 1, 1, 1, 1]


def test_an_undone_step_leaves_everything_as_before_it(device):
    follower = made(device)
    first = step(follower, torch.zeros(NUMEL), normal(NUMEL), same=False)
    second = step(follower, first, normal(NUMEL, seed=1), sent=[3, 4])
    mask = torch.tensor([True, False] * 3)
    follower.undo(mask.to(device))
    assert ages(follower) == [1, 0, 1, 2, 1, 2]
    # The next step finds the residuals of both steps.
    kept = second.clone()
    kept[INDEX[mask]] = first[INDEX[mask]]
    step(follower, kept, normal(NUMEL, seed=2))
    assert not any(changed(follower))
    assert ages(follower) == [2, 1, 2, 3, 2, 3]


@pytest.mark.parametrize("special", [0.0, math.nan, math.inf, 1e-42, 3e38])
def test_all_forms_give_the_same_bits(device, special, monkeypatch):
    found = []
    for form in ("as chosen", "torch"):
        if form == "torch":
            use_form("torch", "follow", monkeypatch)
        follower = made(device)
        for number in range(20):
            gradient, momentum, before, after, mean = (
                normal(NUMEL, seed=7 * number + each).to(device) for each in range(5)
            )
            if number % 2:  # what is not sent
                after[:] = 0.9 * gradient - 0.3 * momentum + before
            for values in (gradient, before, after, mean):
                values[number % NUMEL :: 7] = special
            follower.begin(gradient, 0.9)
            follower.add(momentum, -0.3)
            follower.end(before, 1.0, after, mean, number % 3 > 0)
        aged, differs = follower.take()
        found.append([aged.tolist(), differs.tolist(), bits(follower.left)])
        follower.undo(torch.ones(len(INDEX), dtype=torch.bool, device=device))
        found[-1] += [ages(follower), bits(follower.left)]
    assert found[0] == found[1]
    assert max(found[0][0]) > 0


@pytest.mark.parametrize("steps", [1, 2, 3, 20])
def test_steps_are_evaluated_together_as_one_by_one(steps, monkeypatch):
    use_form("torch", "follow", monkeypatch)
    monkeypatch.setattr(follow, "_VALUES", 0)
    found = []
    for most in (1, steps):
        monkeypatch.setattr(follow, "_FEWEST_STEPS", most)
        follower, residual = made("cpu"), torch.zeros(NUMEL)
        for number in range(20):
            sent = torch.randperm(NUMEL, generator=torch.Generator().manual_seed(number))[:10]
            gradient = normal(NUMEL, seed=number) * (number % 5 > 0)
            same = number % 8 > 0
            left = step(follower, residual, gradient, sent=sent.tolist(), same=same)
            residual = left if same else normal(NUMEL, seed=number)
            if number in (9, 10):
                follower.undo(INDEX % 2 == 0)
        found.append([ages(follower), bits(follower.left)])
    assert found[0] == found[1]
    assert len(set(found[0][0])) > 2


def test_gradients_and_residuals_of_several_dtypes(device):
    follower = made(device, others=(torch.bfloat16, torch.float32))
    residual = torch.zeros(NUMEL)
    for number in range(3):
        gradient = normal(NUMEL, dtype=torch.bfloat16, seed=number)
        residual = step(follower, residual, gradient, sent=[4], same=number > 0)
    assert ages(follower) == [3, 0, 3, 3, 3, 3]


@pytest.mark.parametrize(
    "values", [torch.zeros(NUMEL // 2), torch.zeros(NUMEL).bfloat16(), torch.zeros(2 * NUMEL)[::2]]
)
def test_the_numba_form_reads_nothing_else(values, monkeypatch):
    use_form("numba", "follow", monkeypatch)
    follower, right = made("cpu"), torch.zeros(NUMEL)
    for call in (
        lambda: follower.begin(values, 1.0),
        lambda: follower.add(values, 1.0),
        lambda: follower.end(values, 1.0, right, right, True),
        lambda: follower.end(right, 1.0, values, right, True),
        lambda: follower.end(right, 1.0, right, values, True),
    ):
        with pytest.raises(ValueError, match=f"{NUMEL} contiguous"):
            call()


def test_kernels_are_compiled_before_training(monkeypatch):
    use_form("numba", "follow", monkeypatch)
    form = backend.fast_form("follow", "cpu")
    kernels = form._add, form._end
    follow.rehearse.cache_clear()
    averager = Averager(
        "dgc(topk(0.1))",
        InProcessExchange.alone(torch.device("cpu")),
        {"weight": torch.zeros(20, 30)},
    )
    watch(averager, Guard(every=2))
    assert follow.rehearse.cache_info().currsize == 1
    compiled = [len(kernel.signatures) for kernel in kernels]
    for number in range(5):
        averager.average_all({"weight": normal(20, 30, seed=number)})
    assert [len(kernel.signatures) for kernel in kernels] == compiled
    assert all(compiled)
