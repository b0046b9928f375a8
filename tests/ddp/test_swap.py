"""A swap to a method without a residual flushes a residual that exceeds the range of float16."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchcomp
from tests.support.models import kept, residual_norm, wrap
from tests.support.ranks import on_threads

RESIDUAL = 2e5
"""Larger than the largest float16, 65504."""


def after_a_swap(residuals: list[float]) -> tuple[Tensor, list[float], list[bool]]:
    model = wrap(nn.Linear(4, 1, bias=False).half())
    handle = torchcomp.register(model, "ef(topk(k=1))")
    model(torch.ones(1, 4).half()).sum().backward()
    state = handle.state_dict()
    kept(state)["weight"].fill_(residuals[dist.get_rank()])
    handle.load_state_dict(state)
    handle.swap("mean")
    applied, norms, flushing = torch.zeros(1, 4, dtype=torch.float64), [], []
    for _ in range(14):
        model.zero_grad()
        model(torch.zeros(1, 4).half()).sum().backward()
        applied += model.module.weight.grad
        norms.append(residual_norm(handle))
        handle.averager.settle()
        flushing.append(handle.state_dict()["flushing"])
    return applied, norms, flushing


def test_a_residual_beyond_the_range_of_the_gradients_is_sent_in_several_steps() -> None:
    for applied, norms, _ in on_threads(2, after_a_swap, [RESIDUAL, RESIDUAL]):
        assert applied.tolist() == [[RESIDUAL] * 4]
        assert norms == sorted(norms, reverse=True)
        assert norms[0] > norms[-1] == 0


def test_ranks_send_until_none_has_a_residual_left() -> None:
    found = on_threads(2, after_a_swap, [RESIDUAL, 0.0])
    for applied, _, flushing in found:
        assert applied.tolist() == [[RESIDUAL / 2] * 4]
        assert flushing == found[0][2]
        assert 1 < flushing.count(True) < len(flushing)
