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

# The section of a checkpoint that only this optimizer has: attribute of the method -> its check.
_SECTION = {
    "evaluations": checkpoint.count,
    "rho": checkpoint.number,
    "second_is_due": checkpoint.flag,
    "traffic": checkpoint.dict_of(checkpoint.count, asdict(ServerTraffic()).keys()),
}

_OWN = ("h_i", "grad_z")  # the vectors of this rank's worker


class TwoDirection(torch.optim.Optimizer):
    """2Direction for convex losses with exact local gradients, with one worker per rank.

    The method has no guarantee with mini-batches or dropout. All ranks must call ``step`` together.
    Do not wrap the model in DDP. All parameters form one flat vector. After a step they contain the
    method's x, and the next step overwrites any other change to them.

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
        SpecError: if an argument is wrong, or torch.distributed is not initialized.
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
        names = first.get("param_names") or map(str, range(len(self._params)))
        self._named = dict(zip(names, self._params, strict=True))
        device = self._params[0].device
        options = dict(up=up, down=down, lbar=lbar, mu=mu, p=p, tau=tau, gamma0=gamma0)
        self._options = ProcessGroupExchange(group, device).build(
            "TwoDirection", {**options, "seed": seed}, lambda: self._checked(options, seed), _ADVICE
        )
        self._spec = f"2direction({', '.join(f'{k}={v}' for k, v in self._options.items())})"
        self._server = Ranks(group, seed, device)
        self._server.explain = lambda: f"closure: {self._raised!r}" if self._raised else ""
        self._method: TwoDirectionMethod | None = None  # built in the first step, with its closure
        self._verified = False
        self._raised: Exception | None = None  # by this step's closure

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise SpecError, because all parameters form one vector from the start."""
        if hasattr(self, "_server"):  # not in torch's constructor
            raise SpecError("TwoDirection cannot add parameters: pass all to the constructor")
        super().add_param_group(param_group)

    @property
    def traffic(self) -> ServerTraffic:
        """The traffic between this rank's worker and the server."""
        return self._server.traffic

    def step(self, closure: Closure) -> Tensor | float:  # type: ignore[override]
        """Do one iteration, and return this rank's loss at y, not at x.

        Args:
            closure: as for :class:`torch.optim.LBFGS`, over all samples; called once or twice.

        Raises:
            NonFiniteError: on all ranks, if a closure raised, or did not produce a finite loss and
                a finite gradient. The step has changed nothing.
            RankMismatchError: on all ranks, in the first step, if the parameters differ.
        """
        x = _flat(self._params)
        self._closure, self._raised = closure, None
        if not self._verified:  # different parameters or steps would give wrong results
            held = vars(self._method) if self._method else {}
            values = {name: held.get(name) for name in ("iterations", "rho", "second_is_due")}
            shared = {name: held[name] for name in VECTORS if name in held and name not in _OWN}
            values["checksum of parameters"] = checkpoint.digest_of(shared | {"x now": x})
            self._server.exchange.verify("TwoDirection", values, _ADVICE)
            self._verified = True
        try:
            self._method = method = self._method or self._build(x)
            method.step()
            x = method.x
        except NonFiniteError as error:
            raise error from self._raised  # the closure's own, on the rank where it failed
        finally:
            self._write(x)  # evaluating gradients has moved the parameters to y and z
        return self._loss

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state. Each rank must save and load its own."""
        traffic = self.traffic
        held = {**vars(self._method), "traffic": asdict(traffic)} if self._method else {}
        step, slots = held.get("iterations", 0), {}
        for name in VECTORS:
            if (vector := held.get(name)) is not None:
                tensors = dict(zip(self._named, self._parts(vector), strict=True))
                slots[name] = {**_kind(name), "tensors": tensors}
        return {
            **checkpoint.header(self._spec, self._server.exchange),
            **{"step": step, "slots": slots, **self._fixed(step, traffic)},
            "parameters": checkpoint.layout_of(self._named),
            "two_direction": {name: held[name] for name in _SECTION} if held else None,
        }

    def _fixed(self, step: int, traffic: ServerTraffic) -> dict[str, Any]:
        """Return what every checkpoint has, and follows from the rest here."""
        names, dense = list(self._named), step * sum(p.nbytes for p in self._params)
        return {
            **{"scale": 1.0, "lrs": {}, "flushing": False, "groups": [names], "buckets": [names]},
            "traffic": asdict(Traffic(traffic.up_bytes, traffic.down_bytes, dense)),
            "seed": self._server.seed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state and its parameters. The run continues bit for bit.

        Raises:
            CheckpointError: if the state is damaged or does not fit; nothing has changed then.
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
            held[name] = vector[None] if name in _OWN else vector  # one row for each worker
        self._method = self._build(held["x"], held)
        self._write(held["x"])

    def _check(self, state: Any) -> None:
        checkpoint.check_header(state, self._spec, self._server.exchange, {})
        checkpoint.check_engine(state, self._named)
        section = checkpoint.optional(checkpoint.record(**_SECTION))
        checkpoint.record(two_direction=section)(state, "the state dict")
        saved, slots = state["two_direction"], state["slots"]
        # Only grad_z is optional, because it can be computed again.
        kept = [name for name in VECTORS if name != "grad_z" or name in slots] if saved else []
        named = self._named.items()
        forms = {name: checkpoint.tensor(tuple(p.shape), p.dtype) for name, p in named}
        slot = checkpoint.record(tensors=checkpoint.record(**forms))
        checkpoint.dict_of(slot, kept)(slots, "slots")
        wrong = [f"slot '{name}'" for name, each in slots.items() if each | _kind(name) != each]
        fixed = self._fixed(state["step"], ServerTraffic(**(saved["traffic"] if saved else {})))
        wrong += [f"{key} {state[key]}" for key, value in fixed.items() if state[key] != value]
        if saved and not 0 <= saved["rho"] <= 1 / self._options["gamma0"]:
            wrong.append(f"rho {saved['rho']}")
        if wrong:
            raise CheckpointError(f"the checkpoint does not match this run: {', '.join(wrong)}")

    def _build(self, x: Tensor, state: dict[str, Any] | None = None) -> TwoDirectionMethod:
        return TwoDirectionMethod(self._gradients, x, self._server, **self._options, state=state)

    def _gradients(self, point: Tensor) -> Tensor:
        if self._raised is None:  # after a fault, do not call the closure again
            self._write(point)
            for parameter in self._params:
                parameter.grad = None
            try:
                return self._evaluated()[None]
            except Exception as error:
                self._raised = error
        # The others wait for this rank's message. A NaN in it makes all ranks raise.
        return torch.full_like(point, torch.nan)[None]

    @torch.enable_grad()
    def _evaluated(self) -> Tensor:
        self._loss = loss = self._closure()
        value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        grads = [p.grad for p in self._params if p.grad is not None]
        dense = grads and all(grad.layout == torch.strided for grad in grads)
        if not (dense and math.isfinite(value)):
            expected = "a finite loss, and call loss.backward() for dense gradients"
            raise SpecError(f"closure must return {expected}; it returned {value:g}")
        # A parameter that the loss does not touch has no gradient, which means zero.
        return _flat(torch.zeros_like(p) if p.grad is None else p.grad for p in self._params)

    @torch.no_grad()
    def _write(self, x: Tensor) -> None:
        # In place, because other tensors can share the memory of a parameter.
        for p, part in zip(self._params, self._parts(x), strict=True):
            p.copy_(part)

    def _parts(self, x: Tensor) -> list[Tensor]:
        parts = x.view(-1).split_with_sizes([p.numel() for p in self._params])
        return [part.view(p.shape) for p, part in zip(self._params, parts, strict=True)]

    def _checked(self, options: dict[str, Any], seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        dtype = self._params[0].dtype
        options_of_group = self.param_groups[0].keys() - {"params", "param_names"}
        kinds = {(str(p.dtype), str(p.device)) for p in self._params}
        single = len(self.param_groups) == len(kinds) == 1 and dtype.is_floating_point
        if not single or options_of_group:
            raise SpecError(
                "TwoDirection takes parameters of one floating-point dtype on one device, in one "
                f"group without options, not {len(self.param_groups)} groups with the options "
                f"{sorted(options_of_group)}, of {sorted(kinds)}"
            )
        check_seed(seed)
        built = {**options, **{role: _compressor(options[role], role) for role in ("up", "down")}}
        d = sum(p.numel() for p in self._params)
        constants(d, **built)  # only for its checks
        return built, {"coordinates": d, "dtype": dtype, **built, "seed": seed}


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _compressor(spec: Compressor | str, role: str) -> Compressor:
    method = parse_aggregator(spec)  # "topk(0.1)" is the `mean` of the compressor
    if isinstance(method, Mean):
        return method.compressor
    raise SpecError(f"{role} must be a compressor, such as topk or randk, not '{method}'", role)


def _kind(slot: str) -> dict[str, Any]:
    kind = Kind.CACHE if slot == "grad_z" else Kind.ESTIMATE
    return {"kind": kind.value, "sharded": False}
