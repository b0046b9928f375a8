"""Skipper: leave parameters out of the backward pass under DDP.

Changing ``requires_grad`` after DDP was built gives wrong gradients. Instead, constants on the same
memory replace the dropped parameters while the module runs, so no kernel computes their gradients.
DDP still waits for the real parameters: one autograd function ties them to the output, and returns
None for them, which DDP takes for zeros.
"""

import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchcomp.ddp.executors import after_backward
from torchcomp.specs.errors import UnsupportedModelError

Registration = tuple[nn.Module, str, nn.Parameter]  # a module, a name in it, and its parameter


class Skipper(ABC):
    """Skips parameters of the module inside DDP by hooks, until `_unhook` removes them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # By the parameter's id. A shared parameter is registered in several modules.
        self._registrations: dict[int, list[Registration]] = defaultdict(list)
        for child in module.modules():
            for key, held in child.named_parameters(recurse=False, remove_duplicate=False):
                self._registrations[id(held)].append((child, key, held))
        self._skipped: list[nn.Parameter] = []
        self._replaced: list[Registration] = []
        self._outputs: set[int] = set()
        self._in_backward = False
        self._selection = 0  # counts the calls of _skip()
        self._hooks = [
            # First, because other forward pre-hooks can compute with parameters.
            module.register_forward_pre_hook(_weakly(self._before_forward), prepend=True),
            # Also after a forward pass that raised.
            module.register_forward_hook(_weakly(self._after_forward), always_call=True),
        ]

    @abstractmethod
    def _forward_begins(self) -> None: ...  # before a pass that records a graph; can raise

    @abstractmethod
    def _backward_done(self) -> None: ...  # after DDP has written the gradients

    def _skip(self, parameters: Iterable[nn.Parameter]) -> None:
        self._skipped = list(parameters)
        self._selection += 1

    def _unhook(self) -> None:
        self._restore()
        for hook in self._hooks:
            hook.remove()

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if module is not self._module:
            return  # deepcopy copies the hooks of a module along with it: copies skip nothing
        # A backward pass that raised can leave the flag set and parameters replaced.
        self._in_backward = False
        self._restore()
        if torch.is_grad_enabled():
            self._forward_begins()
            self._replace()

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if module is not self._module:
            return output
        replaced = [parameter for _, _, parameter in self._replaced]
        self._restore()
        if output is None or not torch.is_grad_enabled():
            return output
        return self._tied(output, replaced)

    def _begin_backward(self, selection: int) -> None:
        if selection != self._selection:
            raise UnsupportedModelError(
                "this backward pass belongs to a forward pass of an earlier step, which kept other "
                "layers: run backward before the next step, as DDP requires"
            )
        if self._in_backward:
            return  # several forward passes before one backward pass have a _Tie each
        self._in_backward = True
        # Checkpointed blocks run their forward pass again now, and must skip the same parameters.
        self._replace()
        after_backward(self._computed)

    def _computed(self) -> None:
        # All kernels are launched, but DDP can still be waiting for the exchange. Queued now, the
        # next function runs after DDP's final callback, which writes the gradients.
        self._restore()
        after_backward(self._written)

    def _written(self) -> None:
        self._in_backward = False
        self._backward_done()

    def _replace(self) -> None:
        for skipped in self._skipped:
            constant = nn.Parameter(skipped.detach(), requires_grad=False)
            for module, key, parameter in self._registrations[id(skipped)]:
                # torch.func.functional_call registers the caller's weights, which must stay.
                if getattr(module, key) is parameter:
                    setattr(module, key, constant)
                    self._replaced.append((module, key, parameter))

    def _restore(self) -> None:
        while self._replaced:
            setattr(*self._replaced.pop())

    def _tied(self, output: Any, replaced: list[nn.Parameter]) -> Any:
        leaves, structure = pytree.tree_flatten(output)
        found = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        floating = [i for i, x in found.items() if x.is_floating_point() or x.is_complex()]
        if not floating:
            raise UnsupportedModelError(
                f"the output of the forward pass, of type {type(output).__name__}, has no floating-"
                "point tensor: return one, also in tuples, lists and dicts"
            )
        # Constants in the output must not require gradients. But with all layers dropped no output
        # requires any, so the ones that ever did are tied.
        self._outputs |= {i for i in floating if leaves[i].requires_grad}
        chosen = [i for i in floating if i in self._outputs] or floating
        # One function for all of them: its backward pass runs, whichever outputs the loss uses.
        tensors = (*(leaves[i] for i in chosen), *replaced)
        tied = _Tie.apply(self, self._selection, len(chosen), *tensors)  # type: ignore[no-untyped-call]
        changed = dict(enumerate(leaves)) | dict(zip(chosen, tied, strict=True))
        return pytree.tree_unflatten(list(changed.values()), structure)


class _Tie(torch.autograd.Function):
    """The identity on the first `count` tensors. The others, parameters, get no gradient."""

    @staticmethod
    def forward(ctx: Any, skipper: Skipper, selection: int, count: int, *tensors: Tensor) -> Any:
        # An output that the loss does not use keeps None instead of a tensor of zeros.
        ctx.set_materialize_grads(False)
        ctx.skipper, ctx.selection, ctx.parameters = skipper, selection, len(tensors) - count
        # Copies: autograd refuses in-place changes of outputs that are views of inputs.
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.skipper._begin_backward(ctx.selection)
        return (None, None, None, *gradients, *[None] * ctx.parameters)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    reference = weakref.WeakMethod(method)
    return lambda *arguments: alive(*arguments) if (alive := reference()) else None
