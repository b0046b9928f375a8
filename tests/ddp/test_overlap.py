"""Overlap over gloo: groups are exchanged during the backward pass."""

import threading
from typing import Any
from unittest import mock

from torch import Tensor

import torchcomp
from tests.support.models import loss_of, mlp, rows, wrap
from tests.support.patience import PATIENCE
from tests.support.ranks import on_processes
from torchcomp.exchange import ProcessGroupExchange


def overlaps(spec: str, collective: str) -> bool:
    """Whether an exchange starts and ends while a hook delays the last gradient of backward."""
    model = wrap(mlp())
    handle = torchcomp.register(model, spec)
    for step in range(2):
        loss_of(model(rows(step))).backward()
    exchanged = threading.Event()
    in_time = []
    exchange = getattr(ProcessGroupExchange, collective)

    def noted(self: ProcessGroupExchange, values: Tensor) -> Any:
        result = exchange(self, values)
        exchanged.set()
        return result

    def hold_back(gradient: Tensor) -> None:
        in_time.append(exchanged.wait(timeout=PATIENCE))

    model.module[0].weight.register_hook(hold_back)
    with mock.patch.object(ProcessGroupExchange, collective, noted):
        loss_of(model(rows(2))).backward()
    handle.close()
    return in_time == [True]


def both() -> tuple[bool, bool]:
    gathered = overlaps("ef(topk(0.1))", "all_gather")
    return gathered, overlaps("mean", "all_reduce")


def test_first_exchange_ends_before_the_last_gradient_is_ready() -> None:
    assert on_processes(2, both) == [(True, True)] * 2
