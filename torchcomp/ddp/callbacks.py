"""Callbacks of the autograd engine."""

from collections.abc import Callable
from typing import Any

import torch


def after_backward(callback: Callable[[], None]) -> None:
    """Call this when the backward pass in progress ends, behind the callbacks queued before."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)
