"""Overlap over gloo: groups are exchanged during the backward pass."""

import threading
import time
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

    def noted(self: ProcessGroupExchange, values: Tensor, **options: Any) -> Any:
        result = exchange(self, values, **options)
        exchanged.set()
        return result

    def hold_back(gradient: Tensor) -> None:
        in_time.append(exchanged.wait(timeout=PATIENCE))

    model.module[0].weight.register_hook(hold_back)
    with mock.patch.object(ProcessGroupExchange, collective, noted):
        loss_of(model(rows(2))).backward()
    handle.close()
    return in_time == [True]


def waits_for_a_slow_exchange() -> bool:
    """Whether the handle counts the seconds that a backward pass waits for its last bucket."""
    model = wrap(mlp())
    handle = torchcomp.register(model, "ef(topk(0.1))")
    loss_of(model(rows(0))).backward()
    before, delay, exchange = handle.seconds_waited, 0.3, ProcessGroupExchange.all_gather_rows

    def slow(self: ProcessGroupExchange, message: Tensor) -> Any:
        time.sleep(delay)
        return exchange(self, message)

    with mock.patch.object(ProcessGroupExchange, "all_gather_rows", slow):
        loss_of(model(rows(1))).backward()
    handle.close()
    # The backward pass itself takes milliseconds, and runs beside the first bucket's exchange.
    return 0 < before < before + delay / 2 < handle.seconds_waited


def all_checks() -> tuple[bool, bool, bool]:
    gathered = overlaps("ef(topk(0.1))", "all_gather_rows")
    return gathered, overlaps("mean", "all_reduce"), waits_for_a_slow_exchange()


def test_exchange_overlaps_and_the_rest_of_it_is_waited_for() -> None:
    assert on_processes(2, all_checks) == [(True, True, True)] * 2
