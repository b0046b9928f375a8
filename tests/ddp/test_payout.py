"""What a method without a memory does with the memory of the one before it, in 16 bits."""

import math

import torch
from torch import Tensor, nn

import torchcomp
from tests.support.models import wrap
from tests.support.ranks import on_threads
from torchcomp.bucket import Bucket
from torchcomp.ddp.payout import is_paid, pay_out
from torchcomp.memory import ErrorMemory

OWED = 2e5
"""More than float16 represents, 65504."""


def paid_out() -> tuple[Tensor, list[float]]:
    model = wrap(nn.Linear(4, 1, bias=False).half())
    handle = torchcomp.register(model, "ef(topk(k=1))")
    model(torch.ones(1, 4).half()).sum().backward()
    state = handle.state_dict()
    state["error"]["weight"].fill_(OWED)
    handle.load_state_dict(state)
    handle.swap("mean")
    applied, norms = torch.zeros(1, 4, dtype=torch.float64), []
    for _ in range(14):
        model.zero_grad()
        model(torch.zeros(1, 4).half()).sum().backward()
        applied += model.module.weight.grad
        norms.append(handle.stats.error_norm)
    return applied, norms


def test_memory_beyond_the_range_of_the_gradients_is_paid_out_over_several_steps() -> None:
    for applied, norms in on_threads(2, paid_out):
        assert applied.tolist() == [[OWED] * 4]
        assert norms == sorted(norms, reverse=True)
        assert norms[0] > norms[-1] == 0


def test_gradients_themselves_are_never_cut() -> None:
    values = [60_000.0, -math.inf, math.nan, 1.0]
    bucket = Bucket(("a",), (4,), torch.tensor(values, dtype=torch.float16))
    expected, memory = bucket.flat.clone(), ErrorMemory()
    pay_out(bucket, memory, world_size=100)
    torch.testing.assert_close(bucket.flat, expected, rtol=0, atol=0, equal_nan=True)
    assert is_paid(memory)
