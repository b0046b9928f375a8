"""Waiting: layers wait for the means of what they read."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from torchcomp.local_sgd.hooks import Undo
from torchcomp.local_sgd.overlapped import OverlappedAverage


def wait_in_forward(model: nn.Module, averages: list[OverlappedAverage]) -> Iterator[Undo]:
    """Let every layer of `model`, and its ``state_dict``, wait for what they read.

    A layer is a module with parameters of its own, and waits for those of its children, too, which
    it may read without calling them; so does a compiled module.

    Yields:
        What undoes each of the changes.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        everything = _finisher(module, averages, None)
        saving = module.register_state_dict_pre_hook(everything)  # type: ignore[no-untyped-call]
        yield saving.remove
    for layer in _layers(model):
        needed = {names[id(p)].replace("_orig_mod.", "") for p in layer.parameters()}
        yield layer.register_forward_pre_hook(_finisher(layer, averages, needed)).remove


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    compiled = isinstance(module, OptimizedModule) or module._compiled_call_impl is not None
    if compiled or any(True for _ in module.parameters(recurse=False)):
        yield module
        return
    for child in module.children():
        yield from _layers(child)


def _finisher(module: nn.Module, averages: list[OverlappedAverage], names: set[str] | None) -> Any:
    owner = weakref.ref(module)

    def finish(module: nn.Module, *args: Any) -> None:
        if module is owner():  # and not a copy of it, which takes its hooks along
            for average in averages:
                average.finish(names)

    return torch.compiler.disable(finish)  # type: ignore[no-untyped-call]
