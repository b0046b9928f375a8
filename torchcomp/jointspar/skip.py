"""Skipper: leave parameters out of the backward pass under DDP, and time the backward pass.

Changing ``requires_grad`` after DDP was built gives wrong gradients, and building DDP again costs
more than it saves. Skipper does the following instead:

1. While the module runs, constants on the same memory replace the dropped parameters. No kernel
   then computes their gradients. If all layers at the front of the network are dropped, no kernel
   computes the gradients of their activations either.
2. DDP still waits for the gradients of the real parameters. One autograd function ties these
   parameters to the output. Its backward pass returns None for them, which DDP takes for zeros.
"""

import copy
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from torchcomp.ddp.executors import after_backward
from torchcomp.errors import UnsupportedModelError

Stamp = Any
"""A point in time: seconds on the CPU, or an event that a stream of a GPU will reach."""

Registration = tuple[nn.Module, str, nn.Parameter]
"""A module, the name that it registers a parameter under, and that parameter."""


class Clock:
    """Times backward passes and, if `detailed`, the gradient of every parameter.

    On a GPU it records events in the stream of the backward pass. The host waits for them only when
    a time is read.

    Args:
        device: device of the parameters.

    Attributes:
        detailed: whether to time every gradient.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._span: tuple[Stamp, Stamp] | None = None
        # A parameter, and the times of the gradient before its own and of its own.
        self._gradients: list[tuple[str, Stamp, Stamp]] = []
        # The seconds of gradients that are no longer listed above.
        self._seconds: dict[str, float] = defaultdict(float)
        self.detailed = False

    @property
    def backward_ms(self) -> float:
        """Milliseconds of the last backward pass, or 0.0 before the first."""
        return 0.0 if self._span is None else 1000 * _seconds(*self._span)

    def begin(self) -> None:
        """Record the beginning of a backward pass."""
        # Keep the events of one step, not of a whole warm-up. A step ends with a wait, so its
        # events have passed. After a pass under no_sync, they can be read later.
        if self._span is not None and _has_passed(self._span[1]):
            self._add_up()
        self._begin = self._last = self._now()

    def arrived(self, name: str) -> None:
        """Record that the kernels of a parameter's gradient have been launched."""
        if self.detailed:
            before, self._last = self._last, self._now()
            self._gradients.append((name, before, self._last))

    def end(self) -> None:
        """Record that all kernels of the backward pass have been launched."""
        self._span = self._begin, self._now()

    def take(self) -> dict[str, float]:
        """Return the seconds of each parameter's gradient since the last call, 0.0 by default.

        A gradient takes the time since the previous one. The times of several backward passes are
        added up.
        """
        self._add_up()
        times, self._seconds = self._seconds, defaultdict(float)
        return times

    def _add_up(self) -> None:
        for name, before, now in self._gradients:
            self._seconds[name] += _seconds(before, now)
        self._gradients.clear()

    def _now(self) -> Stamp:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        # Name the device: the model can be on another one than the current device.
        event.record(torch.cuda.current_stream(self._device))
        return event


def _has_passed(stamp: Stamp) -> bool:
    if isinstance(stamp, float):
        return True
    passed: bool = stamp.query()
    return passed


def _seconds(begin: Stamp, end: Stamp) -> float:
    if not isinstance(begin, float):
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000
    return float(end - begin)


class Skipper:
    """Skips parameters of the module inside DDP, by hooks that :meth:`close` removes.

    Args:
        module: the module inside DDP.
        parameters: its trained parameters, by name.
        on_forward: a bound method that is called before a forward pass that records a graph. It can
            raise.
        on_backward: a bound method that is called after DDP has written the gradients. Its argument
            is whether the backward pass reached any parameter.

    Attributes:
        clock: times the backward passes.
        arrived: names of the parameters whose gradients the last backward pass computed.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        on_forward: Callable[[], None],
        on_backward: Callable[[bool], None],
    ) -> None:
        self._parameters = parameters
        names = {id(parameter): name for name, parameter in parameters.items()}
        # A shared parameter is registered in several modules.
        self._registrations: dict[str, list[Registration]] = defaultdict(list)
        for child in module.modules():
            for key, held in child.named_parameters(recurse=False, remove_duplicate=False):
                if id(held) in names:
                    self._registrations[names[id(held)]].append((child, key, held))
        self._module = module
        # Weak, because the owner of these methods refers to this object.
        self._on_forward, self._on_backward = _weakly(on_forward), _weakly(on_backward)
        self.clock = Clock(next(iter(parameters.values())).device)
        self.arrived: set[str] = set()
        self._skipped: list[str] = []
        self._replaced: list[Registration] = []
        self._outputs: set[int] = set()
        self._in_backward = False
        self._reached = False
        self._selection = 0  # counts the calls of skip()
        # The graph nodes that accumulate gradients, which DDP waits for. A parameter refers to its
        # node only weakly, so they are stored here.
        self._accumulators = [get_gradient_edge(p).node for p in parameters.values()]
        arrived = _weakly(self._arrived)
        self._handles: list[Any] = [
            # First, because other forward pre-hooks can compute with parameters.
            module.register_forward_pre_hook(_weakly(self._before_forward), prepend=True),
            # Also after a forward pass that raised: the parameters must be restored.
            module.register_forward_hook(_weakly(self._after_forward), always_call=True),
            *(
                parameter.register_post_accumulate_grad_hook(partial(arrived, name))  # type: ignore[no-untyped-call]
                for name, parameter in parameters.items()
            ),
        ]

    def skip(self, names: Iterable[str]) -> None:
        """Leave these parameters out of the backward passes of all later forward passes."""
        self._skipped = list(names)
        self._selection += 1

    def close(self) -> None:
        """Restore the module and remove the hooks. Further calls have no effect."""
        self._restore()
        for handle in self._handles:
            handle.remove()

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        # deepcopy copies the hooks of a module along with it. Copies skip nothing.
        if module is not self._module:
            return
        # A backward pass that raised can leave the flag set and parameters replaced.
        self._in_backward = False
        self._restore()
        if torch.is_grad_enabled():
            self._on_forward()
            self._replace()

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Restore the parameters and return a copy of `output` that is tied to them."""
        if module is not self._module:
            return output
        replaced = [parameter for _, _, parameter in self._replaced]
        self._restore()
        if output is None or not torch.is_grad_enabled():
            return output
        return self._tied(output, replaced)

    def begin_backward(self, selection: int) -> None:
        """Begin a backward pass. :class:`_Tie` calls this before any other node runs.

        Args:
            selection: the value of ``_selection`` during the forward pass.

        Raises:
            UnsupportedModelError: if :meth:`skip` was called since the forward pass.
        """
        if selection != self._selection:
            raise UnsupportedModelError(
                "this backward pass belongs to a forward pass of an earlier step, which kept other "
                "layers: run backward before the next step, as DDP requires"
            )
        # Several forward passes before one backward pass have a _Tie each.
        if self._in_backward:
            return
        self._in_backward = True
        # Checkpointed blocks run their forward pass again now, and must skip the same parameters.
        self._replace()
        self._reached = any(map(_is_executed, self._accumulators))
        self.arrived.clear()
        self.clock.begin()
        after_backward(self._computed)

    def _arrived(self, name: str, parameter: Tensor) -> None:
        self.arrived.add(name)
        self.clock.arrived(name)

    def _computed(self) -> None:
        # All kernels are launched, but DDP can still be waiting for the exchange.
        self._restore()
        self.clock.end()
        # Queued now, it runs after DDP's final callback, which writes the gradients.
        after_backward(self._written)

    def _written(self) -> None:
        self._in_backward = False
        self._on_backward(self._reached)

    def _replace(self) -> None:
        for name in self._skipped:
            constant = nn.Parameter(self._parameters[name].detach(), requires_grad=False)
            for module, key, parameter in self._registrations[name]:
                # torch.func.functional_call registers the caller's weights, which must stay.
                if getattr(module, key) is parameter:
                    setattr(module, key, constant)
                    self._replaced.append((module, key, parameter))

    def _restore(self) -> None:
        while self._replaced:
            setattr(*self._replaced.pop())

    def _tied(self, output: Any, replaced: list[nn.Parameter]) -> Any:
        """Return a copy of `output` whose backward pass also reaches the replaced parameters."""
        leaves: list[Any] = []
        _map_leaves(leaves.append, output)
        floating = [
            i
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        ]
        if not floating:
            raise UnsupportedModelError(
                "JointSpar found no floating-point tensor in the output of the forward pass, of "
                f"type {type(output).__name__}: return a tensor, or tuples, lists, dicts and "
                "dataclasses of tensors"
            )
        # Constants in the output must not require gradients. But with all layers dropped no output
        # requires any, so the ones that ever did are tied.
        self._outputs |= {i for i in floating if leaves[i].requires_grad}
        chosen = [i for i in floating if i in self._outputs] or floating
        # One function for all of them: its backward pass runs, whichever outputs the loss uses.
        tensors = (*(leaves[i] for i in chosen), *replaced)
        tied = _Tie.apply(self, self._selection, len(chosen), *tensors)  # type: ignore[no-untyped-call]
        for i, tensor in zip(chosen, tied, strict=True):
            leaves[i] = tensor
        remaining = iter(leaves)
        return _map_leaves(lambda _: next(remaining), output)


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
        ctx.skipper.begin_backward(ctx.selection)
        return (None, None, None, *gradients, *[None] * ctx.parameters)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method as long as its object is alive, and then does nothing.

    Hooks with a strong reference would keep the object alive, also in copies of the model.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*arguments)

    return call


def _is_executed(node: Any) -> bool:
    """Return whether the current backward pass executes this node."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # torch.autograd.grad with respect to the parameter itself captures its gradient before this
        # node, and this function raises for a captured input.
        return False


def _map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a copy of nested containers with `function` applied to everything else in them.

    The containers are those that DDP supports in outputs: pytrees and dataclasses.
    """

    def apply(leaf: Any) -> Any:
        if not is_dataclass(leaf) or isinstance(leaf, type):
            return function(leaf)
        changed = copy.copy(leaf)
        for field in fields(leaf):
            # A frozen dataclass refuses plain assignment.
            object.__setattr__(
                changed, field.name, _map_leaves(function, getattr(leaf, field.name))
            )
        return changed

    return pytree.tree_map(apply, value)
