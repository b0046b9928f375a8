"""FSDPHandle: the all-reduce hooks of one FSDP2 model."""

import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchcomp.aggregators import Aggregator
from torchcomp.ddp.buckets import Buckets
from torchcomp.ddp.executors import after_backward, side_stream
from torchcomp.ddp.handle import SCALER_ADVICE, Handle
from torchcomp.ddp.loop import OptimizerLRs
from torchcomp.engine.bucket import Bucket
from torchcomp.engine.nonfinite import FiniteWatch
from torchcomp.fsdp.units import Unit, all_parameters, units_of
from torchcomp.kernels.swap import fill_where
from torchcomp.specs.errors import ON_ALL_RANKS, SpecError, UnsupportedModelError


class FSDPHandle(Handle):
    """The handle of a model of ``fully_shard``: FSDP2 calls the hook with this rank's shard."""

    _after_close = "FSDP2 keeps its hook: call handle.swap('mean') instead of close()"

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        buckets: Buckets,
        scaler: "torch.amp.GradScaler | None",
        lrs: OptimizerLRs | None = None,
    ) -> None:
        self._parameters = all_parameters(units)
        super().__init__(model, buckets, self._parameters, scaler, lrs)
        device = buckets.everyone.device
        self._stream = side_stream(device) if device.type == "cuda" else None
        self._pass = -1  # the backward pass in progress
        self._begun = False  # whether it has begun a step
        self._failure: Exception | None = None
        self._watch = FiniteWatch(self.averager.exchange)
        self._unsent: dict[str, Tensor] = {}  # of backward passes without an all-reduce, by unit
        self._checked = False
        model.register_forward_hook(self._after_forward)
        for unit in units:
            unit.module.set_all_reduce_hook(partial(self._reduce, model, unit), stream=self._stream)
            # Of each unit: register_fsdp_forward_method lets the root run without its hooks.
            module: Any = unit.module
            module.register_forward_pre_hook(partial(self._before_forward, unit))

    @staticmethod
    def _check_method(aggregator: Aggregator) -> None:
        # FSDP2 needs the mean of each unit before it reduces the next one.
        if aggregator.whole_model:
            problem = f'{aggregator} selects over the whole model: use scope="bucket" with FSDP2'
            raise SpecError(problem, "scope")

    # --- Called in the forward pass ---

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, unit: Unit, module: nn.Module, args: object) -> None:
        self._thread = threading.current_thread()
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint
        if self._pass != -1:  # of a backward pass that raised
            self._pass = -1
            self._unsent.clear()
        if unit.awaits_end and torch.is_grad_enabled():
            raise RuntimeError(
                "the last backward pass raised. Call model.zero_grad() and model.reset_iter_state()"
                "; before torch 2.13, build and register the model again, with handle.state_dict()"
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_forward(self, module: nn.Module, args: object, outputs: object) -> None:
        for output in pytree.tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(self._enter)  # type: ignore[no-untyped-call]

    # --- Called in the backward pass, in the same order on all ranks ---

    def _enter(self, gradient: Tensor | None = None) -> None:
        # Reentrant checkpoints run backward passes inside this one. All of them are one step.
        if self._pass != torch._C._current_graph_task_id():
            self._pass, self._begun = torch._C._current_graph_task_id(), False
            if self._discarded is not None and self._discarded.open:
                self._discarded.look()
            after_backward(self._finish_backward)

    def _reduce(self, model: nn.Module, unit: Unit, flat: Tensor) -> None:
        if not unit.group.all_reduce_grads:
            # FSDP2 adds `flat` to the gradients after the hook: keep it until the exchange instead.
            kept = self._unsent.get(unit.names[0])
            self._unsent[unit.names[0]] = flat.clone() if kept is None else kept.add_(flat)
            flat.zero_()
            return
        if unit.names[0] in self._unsent:
            flat.add_(self._unsent.pop(unit.names[0]))
        if self._pass == -1:
            self._enter()  # of a loss that is not computed from the outputs of the model
        try:
            if not self._begun:
                self._begin(model)
            if self._failure is None:
                self._average(unit, flat)
        except ON_ALL_RANKS as error:
            # Raised at the end, which FSDP2 must reach. Another error is raised at once, or the
            # other ranks would wait for this one.
            self._failure = error
        except Exception as error:
            self.averager.exchange.leave(error)
            raise

    def _begin(self, model: nn.Module) -> None:
        self._begun, self._failure = True, None
        self._enter_pass()
        self._watch = FiniteWatch(self.averager.exchange, "in the shard of rank")
        try:
            self._require_open("a backward pass")
            # Units that were made after `register` have no hook.
            names = self.averager.parameters.keys()
            if not self._checked and all_parameters(units_of(model)).keys() != names:
                problem = "modules were sharded, frozen or added after torchcomp.register"
                raise UnsupportedModelError(f"{problem}: do that before")
            self._checked = True
        except (RuntimeError, UnsupportedModelError) as error:
            self._failure = error  # on all ranks
        else:
            self.averager.begin(*self._begin_step(), self._watch)

    def _average(self, unit: Unit, flat: Tensor) -> None:
        shape = self.averager.shape_of(unit.names)
        if (flat.numel(), flat.dtype) != (shape.numel, shape.dtype):
            raise UnsupportedModelError(
                f"FSDP2 reduces {flat.numel()} elements of '{unit.names[0]}' and others in "
                f"{flat.dtype}, expected {shape.numel} in {shape.dtype}. Set reduce_dtype, and "
                "freeze what gets no gradient, or call set_reduce_scatter_unused_params(True)"
            )
        after = unit.divisor(self._buckets.place.node_size)  # to the unit of the gradients
        if after != 1:
            flat.div_(after)
        bucket = Bucket(shape, flat)
        if self.averager.guarded:
            self._watch.before(bucket)
        self.averager.average(bucket)
        if after != 1:
            flat.mul_(after)

    # --- Called at the end of the backward pass ---

    def _finish_backward(self) -> None:
        self._pass = -1
        if not self._begun:
            return  # FSDP2 only accumulates
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure  # and the next pass abandons this one
        stream = self._stream
        caller = None if stream is None else torch.cuda.current_stream(stream.device)
        with torch.cuda.stream(stream):
            self.averager.finish(may_skip=self._loss_scale is not None, advice=SCALER_ADVICE)
            if self.averager.void is not None:
                gradients: Any = (each.grad for each in self._parameters.values())
                for gradient in gradients:
                    if gradient is not None:
                        fill_where(self.averager.void, gradient.to_local(), self._void_value)
        if caller is not None and stream is not None:
            caller.wait_stream(stream)
        self._running = False
