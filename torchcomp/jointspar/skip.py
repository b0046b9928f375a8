"""Skipper: a forward pass whose backward pass leaves parameters out, safely under DDP, timed.

Toggling ``requires_grad`` behind DDP's back gives wrong gradients, and rebuilding DDP costs more
than it saves. Instead constants that share their memory replace the dropped parameters while the
module runs: no kernel then computes their gradients, nor those of activations where a whole prefix
of the network is dropped. DDP still waits for the real parameters, so one function ties them to the
output: its backward pass hands them no gradient, which DDP takes for zeros.
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

Place = tuple[nn.Module, str, nn.Parameter]
"""A module, the key of one of its parameters, and that parameter."""


class Clock:
    """Times backward passes, and, where `detailed`, parameters: a GPU has to wait at each of them.

    `by_parameter` sums the seconds from the arrival of the gradient before to that of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._span = 0.0
        self._events: list[torch.cuda.Event] = []
        self.detailed = False
        self.by_parameter: dict[str, float] = defaultdict(float)

    @property
    def backward_ms(self) -> float:
        """Milliseconds of the last backward pass; 0.0 before one."""
        if not self._events:
            return 1000 * self._span
        begin, end = self._events
        end.synchronize()
        return float(begin.elapsed_time(end))

    def begin(self) -> None:
        """Call as a backward pass begins."""
        self._begin = self._last = self._now()
        if self._device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._events[0].record()

    def arrived(self, name: str) -> None:
        """Call when the gradient of a parameter is there."""
        if self.detailed:
            now = self._now()
            self.by_parameter[name] += now - self._last
            self._last = now

    def end(self) -> None:
        """Call when all of its kernels are enqueued."""
        self._span = self._now() - self._begin
        if self._events:
            self._events[1].record()

    def _now(self) -> float:
        if self.detailed and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class Skipper:
    """Installs itself on the module inside DDP; :meth:`close` removes it.

    The method `begins` is called before a forward pass that records a graph, and may raise; `done`
    when DDP has written the gradients, with whether the pass reached any parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        begins: Callable[[], None],
        done: Callable[[bool], None],
    ) -> None:
        self._parameters = parameters
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._places: dict[str, list[Place]] = defaultdict(list)  # a shared one is in several
        for child in module.modules():
            for key, held in child._parameters.items():
                if held is not None and id(held) in names:
                    self._places[names[id(held)]].append((child, key, held))
        self._module = module
        self._begins, self._done = _weakly(begins), _weakly(done)  # their owner holds this
        self.clock = Clock(next(module.parameters()).device)
        self.arrived: set[str] = set()  # whose gradients the last backward pass brought
        self._skipped: list[str] = []
        self._replaced: list[Place] = []
        self._outputs: set[int] = set()
        self._in_backward = False
        self._reached = False
        self._set = 0
        # What accumulates the gradient of each, and what DDP waits for; parameters hold it weakly.
        self._ends = [get_gradient_edge(parameter).node for parameter in parameters.values()]
        arrived = _weakly(self._arrived)
        self._handles: list[Any] = [
            module.register_forward_pre_hook(_weakly(self._before_forward), prepend=True),
            module.register_forward_hook(_weakly(self._after_forward), always_call=True),
            *(
                parameter.register_post_accumulate_grad_hook(partial(arrived, name))  # type: ignore[no-untyped-call]
                for name, parameter in parameters.items()
            ),
        ]

    def skip(self, names: Iterable[str]) -> None:
        """Leave these parameters out of all backward passes of forward passes to come."""
        self._skipped = list(names)
        self._set += 1

    def close(self) -> None:
        """Give the module back as it was; harmless when repeated."""
        self._restore()
        for handle in self._handles:
            handle.remove()

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        # Another module is a copy, which has taken its hooks along.
        if module is not self._module:
            return
        # A backward pass that ended in an error may have left both behind.
        self._in_backward = False
        self._restore()
        if torch.is_grad_enabled():
            self._begins()
            self._replace()

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Restore the parameters and tie them to `output`, which comes back as a copy."""
        if module is not self._module:
            return output
        replaced = [parameter for _, _, parameter in self._replaced]
        self._restore()
        if output is None or not torch.is_grad_enabled():
            return output
        return self._tied(output, replaced)

    def begin_backward(self, drawn: int) -> None:
        """Called by :class:`_Tie`, before anything else of the backward pass."""
        if drawn != self._set:
            raise UnsupportedModelError(
                "this backward pass belongs to a forward pass of an earlier step, when other "
                "layers were kept: run backward before the next step, as DDP requires"
            )
        if self._in_backward:
            return
        self._in_backward = True
        # Checkpointed activations are computed again now, and by the same rules.
        self._replace()
        self._reached = any(map(_is_executed, self._ends))
        self.arrived.clear()
        self.clock.begin()
        after_backward(self._computed)

    def _arrived(self, name: str, parameter: Tensor) -> None:
        self.arrived.add(name)
        self.clock.arrived(name)

    def _computed(self) -> None:
        # All kernels are enqueued; DDP may still be waiting for exchanges.
        self._restore()
        self.clock.end()
        # Behind DDP's own final callback, which writes the gradients.
        after_backward(self._written)

    def _written(self) -> None:
        self._in_backward = False
        self._done(self._reached)

    def _replace(self) -> None:
        for name in self._skipped:
            constant = nn.Parameter(self._parameters[name].detach(), requires_grad=False)
            for module, key, parameter in self._places[name]:
                # torch.func.functional_call has its own weights here, which are not ours to skip.
                if module._parameters[key] is parameter:
                    _place(module, key, constant)
                    self._replaced.append((module, key, parameter))

    def _restore(self) -> None:
        while self._replaced:
            _place(*self._replaced.pop())

    def _tied(self, output: Any, replaced: list[nn.Parameter]) -> Any:
        leaves: list[Any] = []
        _map(leaves.append, output)
        floating = [
            i
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        ]
        if not floating:
            raise UnsupportedModelError(
                f"the forward pass returned no floating-point tensor (but {type(output).__name__}) "
                "that JointSpar can find: return a tensor, or tuples, lists, dicts and dataclasses "
                "of tensors"
            )
        # With everything dropped no output needs gradients; those that did before are tied then.
        self._outputs |= {i for i in floating if leaves[i].requires_grad}
        chosen = [i for i in floating if i in self._outputs] or floating
        ends = (*(leaves[i] for i in chosen), *replaced)
        tied = _Tie.apply(self, self._set, len(chosen), *ends)  # type: ignore[no-untyped-call]
        for i, tensor in zip(chosen, tied, strict=True):
            leaves[i] = tensor
        rest = iter(leaves)
        return _map(lambda _: next(rest), output)


class _Tie(torch.autograd.Function):
    """Identity on the outputs, and no gradient for the parameters behind them."""

    @staticmethod
    def forward(ctx: Any, skipper: Skipper, drawn: int, count: int, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.skipper, ctx.drawn, ctx.parameters = skipper, drawn, len(tensors) - count
        # Copies, because an output that is a view could not be changed in place by the caller.
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.skipper.begin_backward(ctx.drawn)
        return (None, None, None, *gradients, *[None] * ctx.parameters)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a method as long as its object lives: a copy of the model takes its hooks along."""
    held = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        alive = held()
        return None if alive is None else alive(*arguments)

    return call


def _is_executed(node: Any) -> bool:
    """Whether the backward pass that runs now reaches this end of the graph."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # torch.autograd.grad of the parameter itself takes the gradient away before this node.
        return False


def _place(module: nn.Module, key: str, parameter: nn.Parameter) -> None:
    module._parameters[key] = parameter
    if isinstance(module, nn.RNNBase):
        # Recurrent modules hold their parameters in a list as well.
        module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """A copy of nested containers, those that DDP knows, with `function` applied to all else."""

    def at(leaf: Any) -> Any:
        if not is_dataclass(leaf) or isinstance(leaf, type):
            return function(leaf)
        changed = copy.copy(leaf)
        for field in fields(leaf):
            # A frozen dataclass refuses plain assignment.
            object.__setattr__(changed, field.name, _map(function, getattr(leaf, field.name)))
        return changed

    return pytree.tree_map(at, value)
