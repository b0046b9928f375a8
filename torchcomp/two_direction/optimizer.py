"""2Direction as a torch optimizer, for convex losses with exact local gradients."""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchcomp.aggregators import Mean
from torchcomp.checkpoints import checkpoint
from torchcomp.compressors import Compressor
from torchcomp.engine.keys import check_seed
from torchcomp.engine.state import Kind
from torchcomp.exchange import ProcessGroupExchange
from torchcomp.exchange.traffic import Traffic
from torchcomp.specs.errors import CheckpointError, NonFiniteError, SpecError
from torchcomp.specs.spec import parse_aggregator
from torchcomp.two_direction.method import VECTORS, TwoDirectionMethod
from torchcomp.two_direction.parameter_server import Ranks, ServerTraffic
from torchcomp.two_direction.theory import constants

Closure = Callable[[], Tensor | float]

_ADVICE = "Use the same model and arguments on all ranks."

# What to do if this entry of a checkpoint differs from the run, for the error.
_MISMATCH_ADVICE = {
    "spec": "build the optimizer with the arguments of the run that saved it",
    "world_size": "load it on the same number of ranks",
}

# The section of a checkpoint that only this optimizer has: attribute of the method -> its check.
_SECTION = {
    "evaluations": checkpoint.count,
    "rho": checkpoint.number,
    "second_is_due": checkpoint.flag,
    "traffic": checkpoint.dict_of(checkpoint.count, asdict(ServerTraffic()).keys()),
}

_OWN = ("h_i", "grad_z")  # the vectors of this rank's worker


class _UnusableError(Exception):
    """An error of this rank's closure. If the closure raised, its exception is the cause."""


class TwoDirection(torch.optim.Optimizer):
    """2Direction for convex losses with exact local gradients, with one worker per rank.

    The method has no guarantee with mini-batches or dropout: it sends differences of gradients,
    which then do not become small. All ranks must call ``step`` together. Do not wrap the model in
    DDP. All parameters form one flat vector. After a step they contain the method's x, and the next
    step overwrites any other change to them.

    Args:
        params: the model's parameters, equal on all ranks; one floating-point dtype, one device.
        up: unbiased compressor of the workers, or its spec.
        down: contractive compressor of the server, or its spec.
        lbar: inverse of the step size, to be tuned; above 0.
        mu: strong convexity of the mean of all ranks' losses, at least 0.
        p: probability of the coin; 1/(omega + 1) by default.
        tau: momentum of v; 1/(omega + 1) by default.
        gamma0: the initial Gamma.
        group: the process group; None is the default group.
        seed: the run's seed, the same on all ranks.

    Raises:
        SpecError: if a parameter is out of range, a compressor has the wrong kind, or
            torch.distributed is not initialized.
        RankMismatchError: on all ranks, if the arguments differ between ranks.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        up: Compressor | str,
        down: Compressor | str,
        *,
        lbar: float,
        mu: float,
        p: float | None = None,
        tau: float | None = None,
        gamma0: float = 1.0,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(params, {})
        if not dist.is_initialized():
            raise SpecError("TwoDirection needs torch.distributed; call init_process_group first")
        first = self.param_groups[0]
        self._params: list[Tensor] = first["params"]
        # Built from `named_parameters()`, the group has names. Otherwise number the parameters.
        names = first.get("param_names") or map(str, range(len(self._params)))
        self._named = dict(zip(names, self._params, strict=True))
        device = self._params[0].device
        options = dict(up=up, down=down, lbar=lbar, mu=mu, p=p, tau=tau, gamma0=gamma0)
        # `build` raises on every rank if one rank's arguments are invalid or differ.
        self._options = ProcessGroupExchange(group, device).build(
            "TwoDirection", {**options, "seed": seed}, lambda: self._checked(options, seed), _ADVICE
        )
        self._spec = f"2direction({', '.join(f'{k}={v}' for k, v in self._options.items())})"
        self._server = Ranks(group, seed, device)
        # Lets the error on all ranks describe why this rank's closure failed.
        self._server.explain = lambda: str(self._fault or "")
        # Built in the first step: its constructor evaluates gradients, which needs the closure.
        self._method: TwoDirectionMethod | None = None
        self._verified = False
        self._loss: Tensor | float = math.nan
        self._fault: _UnusableError | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise SpecError, because all parameters form one vector from the start."""
        # torch.optim.Optimizer calls this for the first group, before `_server` exists.
        if hasattr(self, "_server"):
            raise SpecError(
                "TwoDirection cannot add a parameter group: all parameters form one vector. Pass "
                "them all to the constructor"
            )
        super().add_param_group(param_group)

    @property
    def traffic(self) -> ServerTraffic:
        """The traffic between this rank's worker and the server."""
        return self._server.traffic

    def step(self, closure: Closure) -> Tensor | float:  # type: ignore[override]
        """Do one iteration.

        Args:
            closure: as for :class:`torch.optim.LBFGS`, over all of this rank's samples. It is
                called twice if z moved in the last iteration, which has probability p.

        Returns:
            The closure's last result: this rank's loss at y, not at x.

        Raises:
            NonFiniteError: on all ranks, if a closure raised, or did not produce a finite loss and
                a finite gradient. The message lists the workers. The step has changed nothing.
            RankMismatchError: on all ranks, in the first step, if the parameters differ.
        """
        x = _flat(self._params)
        self._closure, self._fault = closure, None
        # In the first step after construction or loading: different parameters or steps would not
        # raise later, they would only give wrong results.
        if not self._verified:
            held = vars(self._method) if self._method else {}
            # What the server keeps, which every rank computes.
            shared = {name: held[name] for name in VECTORS if name in held and name not in _OWN}
            values = {
                "parameters": checkpoint.digest_of({"x": x}),
                "server": checkpoint.digest_of(shared),
                **{name: held.get(name) for name in ("iterations", "rho", "second_is_due")},
            }
            self._server.exchange.verify("TwoDirection", values, _ADVICE)
            self._verified = True
        try:
            self._method = method = self._method or self._build(x)
            method.step()
            x = method.x
        except NonFiniteError as error:
            # Show the traceback of the closure's own exception on the rank where it failed.
            raise error from (self._fault and self._fault.__cause__)
        finally:
            # Evaluating gradients moved the parameters to y and z. After an error this restores
            # the old x.
            self._write(x)
        return self._loss

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state. Each rank must save and load its own."""
        traffic = self.traffic
        held = {**vars(self._method), "traffic": asdict(traffic)} if self._method else {}
        step, names = held.get("iterations", 0), list(self._named)
        slots = {}
        for name in VECTORS:
            if (vector := held.get(name)) is not None:
                tensors = dict(zip(names, self._parts(vector), strict=True))
                slots[name] = {**_kind(name), "tensors": tensors}
        # The algorithm's own messages: its ranks do not count control messages.
        dense = step * sum(p.nbytes for p in self._params)
        return {
            **checkpoint.header(self._spec, self._server.exchange),
            **{"step": step, "seed": self._server.seed, "slots": slots},
            **{"scale": 1.0, "lrs": {}, "flushing": False, "groups": [names], "buckets": [names]},
            "traffic": asdict(Traffic(traffic.up_bytes, traffic.down_bytes, dense)),
            "parameters": checkpoint.layout_of(self._named),
            "two_direction": {name: held[name] for name in _SECTION} if held else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state and its parameters. The run continues bit for bit.

        Raises:
            CheckpointError: if the state is damaged, or comes from another rank, other arguments,
                another model or another number of ranks. The optimizer has then not changed.
        """
        self._check(state_dict)  # before the first assignment
        section = state_dict["two_direction"]
        self._method, self._verified = None, False
        self._server.traffic = ServerTraffic(**(section["traffic"] if section else {}))
        if section is None:
            return
        held = {name: section[name] for name in _SECTION.keys() - {"traffic"}}
        held |= {"iterations": state_dict["step"], "grad_z": None}
        for name, slot in state_dict["slots"].items():
            vector = _flat(slot["tensors"][each] for each in self._named)
            vector = vector.to(self._params[0].device)
            # The workers' vectors are rows, of which this process has one.
            held[name] = vector[None] if name in _OWN else vector
        self._method = self._build(held["x"], held)
        self._write(held["x"])

    def _check(self, state: Any) -> None:
        """Require a complete and consistent state of this run and rank."""
        checkpoint.check_header(state, self._spec, self._server.exchange, _MISMATCH_ADVICE)
        checkpoint.check_engine(state, self._named)
        section = checkpoint.optional(checkpoint.record(**_SECTION))
        checkpoint.record(two_direction=section)(state, "the state dict")
        saved, step, slots = state["two_direction"], state["step"], state["slots"]
        # Only grad_z is optional, because it can be computed again.
        kept = [name for name in VECTORS if name != "grad_z" or name in slots] if saved else []
        named = self._named.items()
        forms = {name: checkpoint.tensor(tuple(p.shape), p.dtype) for name, p in named}
        slot = checkpoint.record(tensors=checkpoint.record(**forms))
        checkpoint.dict_of(slot, kept)(slots, "slots")
        wrong = {f"slot '{name}'": each | _kind(name) != each for name, each in slots.items()}
        wrong[f"seed {state['seed']}"] = state["seed"] != self._server.seed
        wrong[f"scale {state['scale']}"] = state["scale"] != 1.0
        wrong[f"step {step}"] = bool(step) and not saved
        if saved:
            # rho starts at 1/gamma0 and never grows. The start and every iteration evaluate a
            # gradient or more, and take one round trip.
            rho, trips = saved["rho"], saved["traffic"]["round_trips"]
            wrong[f"rho {rho}"] = not 0 <= rho <= 1 / self._options["gamma0"]
            wrong[f"{saved['evaluations']} evaluations"] = saved["evaluations"] <= step
            wrong[f"{trips} round trips"] = trips <= step
            wrong[f"step {step}"] = not step and saved["second_is_due"]
        if found := [problem for problem, is_wrong in wrong.items() if is_wrong]:
            raise CheckpointError(
                f"the checkpoint does not match this run: {', '.join(found)}; load the state that "
                "this rank saved, with the arguments of that run"
            )

    def _build(self, x: Tensor, state: dict[str, Any] | None = None) -> TwoDirectionMethod:
        return TwoDirectionMethod(self._gradients, x, self._server, **self._options, state=state)

    def _gradients(self, point: Tensor) -> Tensor:
        """Return the gradient of this rank's loss at `point`, or NaN if the closure fails."""
        try:
            # After a fault, do not call the closure again in this step.
            if self._fault is None:
                return self._evaluate(point)[None]
        except _UnusableError as error:
            self._fault = error
        # Do not raise here: the other ranks wait for this rank's message. A NaN in the message
        # makes all ranks raise.
        return torch.full_like(point, torch.nan)[None]

    def _evaluate(self, point: Tensor) -> Tensor:
        self._write(point)
        # Otherwise a closure without backward() would return the gradient of an earlier point.
        for parameter in self._params:
            parameter.grad = None
        try:
            with torch.enable_grad():
                self._loss = self._closure()
            problem = self._wrong_with(self._loss)
        except Exception as error:
            raise _UnusableError(f"its closure raised {error!r}") from error
        if problem:
            raise _UnusableError(f"its closure {problem}")
        # A parameter that the loss does not touch has no gradient, which means zero.
        return _flat(torch.zeros_like(p) if p.grad is None else p.grad for p in self._params)

    def _wrong_with(self, loss: Tensor | float | None) -> str:
        if loss is None:
            return "returned None instead of the loss"
        value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        grads = [p.grad for p in self._params if p.grad is not None]
        if not math.isfinite(value):
            return f"returned {value:g}"
        if not grads:
            return "left no gradient; it must call loss.backward()"
        if any(grad.layout != torch.strided for grad in grads):
            return "left a sparse gradient, but TwoDirection needs dense gradients"
        return ""

    @torch.no_grad()
    def _write(self, x: Tensor) -> None:
        # In place, because other tensors can share the memory of a parameter.
        for p, part in zip(self._params, self._parts(x), strict=True):
            p.copy_(part)

    def _parts(self, x: Tensor) -> list[Tensor]:
        # One tensor per parameter, of a vector or a matrix of one row.
        parts = x.view(-1).split_with_sizes([p.numel() for p in self._params])
        return [part.view(p.shape) for p, part in zip(self._params, parts, strict=True)]

    def _checked(self, options: dict[str, Any], seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the options with compressors, and the values that must match across ranks."""
        first, problem = self.param_groups[0], ""
        kinds = {(str(p.dtype), str(p.device)) for p in self._params}
        if len(self.param_groups) > 1:
            problem = f"one parameter group, not {len(self.param_groups)}"
        elif unknown := first.keys() - {"params", "param_names"}:
            problem = f"no options of its parameter group, but has {', '.join(unknown)}"
        elif len(kinds) > 1 or not self._params[0].is_floating_point():
            problem = f"parameters of one floating-point dtype on one device, not {sorted(kinds)}"
        if problem:
            raise SpecError(f"TwoDirection takes {problem}: all parameters form one vector")
        check_seed(seed)
        built = {**options, **{role: _compressor(options[role], role) for role in ("up", "down")}}
        d = sum(p.numel() for p in self._params)
        constants(d, **built)  # only for its checks
        return built, {"coordinates": d, "dtype": self._params[0].dtype, **built, "seed": seed}


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _compressor(spec: Compressor | str, role: str) -> Compressor:
    # A spec such as "topk(0.1)" parses as an aggregator: `mean` of the compressor.
    method = parse_aggregator(spec)
    if isinstance(method, Mean):
        return method.compressor
    raise SpecError(f"{role} must be a compressor, such as topk or randk, not '{method}'", role)


def _kind(slot: str) -> dict[str, Any]:
    # The gradients at z can be computed again.
    kind = Kind.CACHE if slot == "grad_z" else Kind.ESTIMATE
    return {"kind": kind.value, "sharded": False}
