"""JointSpar: the one line that lets a DDP model skip whole layers."""

import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torchcomp import checkpoint
from torchcomp.aggregators import Aggregator
from torchcomp.checks import check_choice
from torchcomp.component import Component
from torchcomp.ddp.checks import (
    OWNER,
    check_is_ddp,
    check_model,
    check_scaler,
    trained_parameters,
)
from torchcomp.ddp.register import register
from torchcomp.errors import SpecError, UnsupportedModelError
from torchcomp.exchange import ProcessGroupExchange
from torchcomp.jointspar.bandit import Baseline, Literal, Mask, Vector
from torchcomp.jointspar.layers import (
    Layers,
    Patterns,
    check_several,
    default_layers,
    layers_by_pattern,
)
from torchcomp.jointspar.sampled import Sampled, by_layer
from torchcomp.jointspar.sampler import Law, Sampler
from torchcomp.jointspar.skip import Skipper
from torchcomp.keys import Key, check_seed
from torchcomp.spec import parse_aggregator

_KEEPER = "_torchcomp_jointspar"
"""Attribute of a DDP model that keeps its JointSpar alive when the user does not."""

_ADVICE = {
    "spec": "build JointSpar with the options that it was saved with",
    "world_size": "torchcomp.redistribute(states, world_size) makes it fit",
}


@dataclass(frozen=True)
class JointSparStats:
    """A snapshot of one rank's counters, after a step.

    Attributes:
        step: steps that counted so far.
        kept: names of the layers whose gradients this rank computed in the last step.
        p: probability of each layer in the next step, by name.
        share: expected cost of the next step as a share of the cost of all layers.
        bytes_sent, total_bytes_sent: payload bytes this rank sent, in the last step and in all.
        dense_bytes_sent, total_dense_bytes_sent: bytes that plain DDP would have sent.
        backward_ms: milliseconds of the last backward pass, without waiting for the exchange.
    """

    step: int
    kept: tuple[str, ...]
    p: Mapping[str, float]
    share: float
    bytes_sent: int
    dense_bytes_sent: int
    total_bytes_sent: int
    total_dense_bytes_sent: int
    backward_ms: float

    def __str__(self) -> str:
        return (
            f"{self.step} steps, {len(self.kept)} of {len(self.p)} layers in the last one "
            f"({self.backward_ms:.3g} ms backward), {self.total_bytes_sent:,} bytes sent instead "
            f"of {self.total_dense_bytes_sent:,}"
        )

    def row(self) -> dict[str, Any]:
        """The same as plain values, for a line of ``metrics.jsonl``."""
        return asdict(self)


class JointSpar:
    """Keep a random set of layers in every step; neither compute nor send the gradients of others.

    Algorithms 1 and 2 of Liu, Mozafari, "Communication-efficient distributed learning for large
    batch optimization", ICML 2022. In every step

    1. keep each layer d with probability p_d, independently: the set S_t, which may be empty
    2. compute the weight gradients of the layers in S_t, and no others
    3. exchange g_d / p_d of these; the mean is an unbiased estimate of the dense mean
    4. learn p from the norms of what was exchanged (:class:`torchcomp.jointspar.bandit.Bandit`)

    The training loop stays as it is. All passes that ``no_sync`` accumulates share one set. The
    gradient of a dropped layer is None, so its weights and momentum do not move (see `skipped`).

    Args:
        model: a DDP model, on which nothing else of torchcomp is installed.
        budget: expected cost of a step, as a share of the cost of all layers.
        costs: what `budget` counts: "layers" (the paper), "bytes", or "time" of each layer's
            backward pass, measured in the warm-up steps and averaged over the ranks.
        layers: name of each layer -> shell-style patterns of its parameters; by default each
            module that has weights, with its bias and norm.
        compress: how the kept layers are exchanged, such as ``"ef(topk(0.01))"``; the residual of a
            dropped layer waits.
        p_min: least probability of a layer. Gradients are multiplied by up to 1 / p_min.
        rule: how p is learned: ``Baseline()`` (the default, by the text "baseline") or
            ``Literal(...)`` of :mod:`torchcomp.jointspar.bandit`, or None for uniform dropping.
        selection: "shared", the same set on all ranks; or "per-rank", the paper's: the ranks
            exchange what any of them keeps, which saves next to no bytes on many ranks.
        skipped: what the optimizer finds in dropped layers: "none" (no gradient) or "zero", for
            loops that read every gradient.
        warmup_steps: steps that keep all layers first, so that DDP orders its buckets by a whole
            backward pass; 1 by default, 5 with costs="time".
        seed: seed of the draws.
        scaler: the ``GradScaler`` of the loop, if there is one. It lets optimizers step that find
            no gradient, from now on.

    Attributes:
        layers: name of each layer -> names of its parameters.

    Raises:
        SpecError: if an option is out of its range, or the layers are not a partition.
        UnsupportedModelError: as for :func:`torchcomp.register`; also for ``static_graph``, from
            ``backward`` if the forward pass did not use a kept layer, and from a forward pass if
            the loss of the step before did not come from what the model returned.
        RankMismatchError: if the ranks give different arguments or models.
        NonFiniteError: from ``backward``, without a scaler, if a gradient is not finite.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        *,
        budget: float,
        costs: str = "layers",
        layers: Patterns | None = None,
        compress: str | Component = "mean",
        p_min: float = 0.0125,
        rule: Baseline | Literal | str | None = "baseline",
        selection: str = "shared",
        skipped: str = "none",
        warmup_steps: int | None = None,
        seed: int = 0,
        scaler: "torch.amp.GradScaler | None" = None,
    ) -> None:
        check_is_ddp(model)
        device = next(model.module.parameters()).device
        self._exchange = ProcessGroupExchange(model.process_group, device)
        given = {"budget": budget, "costs": costs, "compress": compress, "seed": seed}

        def make() -> tuple[tuple[Law, Layers, Aggregator], dict[str, Any]]:
            check_seed(seed)
            check_scaler(scaler)
            _check_model(model)
            default = 5 if costs == "time" else 1
            steps = default if warmup_steps is None else warmup_steps
            used = Baseline() if rule == "baseline" else rule
            law = Law(budget, costs, p_min, used, selection, steps)  # type: ignore[arg-type]
            grouped = _layers(model, layers)
            check_choice("skipped", skipped, ("none", "zero"))
            inner = parse_aggregator(compress)
            facts = {"law": law, "layers": grouped, "skipped": skipped, "seed": seed}
            return (law, grouped, inner), {**facts, "compress": inner}

        law, self.layers, inner = self._exchange.build("torchcomp.JointSpar", given, make)
        self._model = weakref.ref(model)
        self._parameters = dict(trained_parameters(model))
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._to_none = skipped == "none"
        key = Key(seed, rank=self._exchange.rank)
        self._sampler = Sampler(law, self.layers, self._prices(costs), key)
        method = Sampled(inner, self._sampler)
        self._handle = register(model, method, seed=seed, scaler=scaler)
        averager = self._handle.averager
        averager.regroup(by_layer(averager.groups, self._sampler.layer_of))
        averager.on_finish(self._sampler.finish)
        if self._scaler is not None and self._to_none:
            _allow_empty_steps(self._scaler)
        callbacks = self._forward_begins, self._backward_done
        self._skipper = Skipper(model.module, self._parameters, *callbacks)
        self._skip()
        setattr(model, OWNER, f"torchcomp.JointSpar(budget={budget:g})")
        setattr(model, _KEEPER, self)

    def __repr__(self) -> str:
        return f"<torchcomp.JointSpar {self._sampler.law}: {self.stats}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> "JointSpar":
        # A copy of the model, to average its weights for one, skips nothing.
        return self

    @property
    def p(self) -> dict[str, float]:
        """Probability of each layer in the next step, by name."""
        return dict(zip(self.layers, self._sampler.p.tolist(), strict=True))

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the layers that the next step keeps on this rank."""
        return self._chosen(self._sampler.kept)

    @property
    def stats(self) -> JointSparStats:
        """Counters of this rank."""
        sampler, traffic = self._sampler, self._handle.stats
        return JointSparStats(
            step=sampler.step,
            kept=self._chosen(sampler.last),
            p=self.p,
            share=float(sampler.costs @ sampler.p) / float(sampler.costs.sum()),
            bytes_sent=traffic.bytes_sent,
            dense_bytes_sent=traffic.dense_bytes_sent,
            total_bytes_sent=traffic.total_bytes_sent,
            total_dense_bytes_sent=traffic.total_dense_bytes_sent,
            backward_ms=self._skipper.clock.backward_ms,
        )

    def table(self) -> str:
        """The layers with their parameters, elements, cost and probability, as text."""
        costs, unit = self._sampler.costs, self._sampler.law.costs
        width = max(len(layer) for layer in (*self.layers, "layer"))
        lines = [f"{'layer':<{width}}  tensors    elements  share of {unit}        p"]
        shares, p = costs / costs.sum(), self._sampler.p
        for (layer, names), share, each in zip(self.layers.items(), shares, p, strict=True):
            elements = sum(self._parameters[name].numel() for name in names)
            lines.append(
                f"{layer:<{width}}  {len(names):>7}  {elements:>10,}  "
                f"{share:>{9 + len(unit)}.4f}  {each:>7.4f}"
            )
        return "\n".join(lines)

    # What torchcomp.jointspar.Sampling asks, for LARS.

    def probability(self, parameter: Tensor) -> float:
        """Raise SpecError with ``selection="per-rank"``, where there is no such number."""
        if not self._sampler.shared:
            raise SpecError(
                'LARS needs selection="shared": with sets of their own, how often the ranks have a '
                "gradient depends on probabilities that no rank knows"
            )
        name = self._names.get(id(parameter))
        return 1.0 if name is None else float(self._sampler.applied[self._sampler.layer_of[name]])

    def presence(self, parameter: Tensor) -> float:
        p = self.probability(parameter)
        return p if self._to_none else 1.0

    def norm(self, parameter: Tensor) -> float:
        return self._sampler.norm(self._names[id(parameter)])

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, for ``torch.load(..., weights_only=True)``; every rank saves its own.

        Raises:
            RuntimeError: in the middle of a backward pass.
        """
        return {**self._handle.state_dict(), "jointspar": self._sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; nothing changes on error.

        With a shared selection another number of ranks goes on with the same p. If the method keeps
        a residual, ``torchcomp.redistribute`` on all ranks' states divides it anew first.

        Raises:
            CheckpointError: if it is another model's, method's or rank's, or damaged.
            RuntimeError: in the middle of a backward pass.
        """
        state = self._fitting(state)
        checkpoint.check_header(state, str(self._handle.method), self._exchange, _ADVICE)
        restore = self._sampler.prepare(state)
        self._handle.load_state_dict(state)
        restore()
        self._skip()

    def close(self) -> None:
        """Keep all layers from now on. DDP cannot drop a hook, so the model cannot train on."""
        self._skipper.close()
        self._handle.close()

    def __enter__(self) -> "JointSpar":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _forward_begins(self) -> None:
        """Refuse to go on after a step that passed unnoticed, on all ranks alike."""
        if self._sampler.finished is not None:
            raise UnsupportedModelError(
                "the last backward pass did not come from what the forward pass returned, so no "
                "step would ever be counted and no layer dropped: let the model return the loss, "
                "or what it is computed from, as a tensor or in tuples, lists, dicts or dataclasses"
            )

    def _backward_done(self, reached: bool) -> None:
        """DDP has written the gradients, if the pass `reached` any."""
        sampler = self._sampler
        counts, sampler.finished = sampler.finished, None
        if counts is None:
            if reached:
                self._check_complete()
            return
        for name in sampler.names(~sampler.union(self._exchange)):
            parameter = self._parameters[name]
            parameter.grad = None if self._to_none else torch.zeros_like(parameter)
        if not counts:
            sampler.forget()
            return
        sampler.learn(1.0 if self._scaler is None else float(self._scaler.get_scale()))
        if sampler.bandit is None and sampler.step >= sampler.law.warmup_steps:
            sampler.bandit = sampler.law.bandit(self._measured())
        sampler.draw()
        self._skip()

    def _skip(self) -> None:
        sampler = self._sampler
        self._skipper.skip(sampler.names(~sampler.kept))
        # The first backward pass also touches fresh memory: it would be timed too long.
        self._skipper.clock.detailed = sampler.bandit is None and sampler.step > 0

    def _check_complete(self) -> None:
        """Raise if DDP still waits for layers: it would only say so in the next step."""
        model = self._model()
        if model is None or not model.require_forward_param_sync or model.find_unused_parameters:
            return
        wanted = self._sampler.names(self._sampler.kept)
        unused = [name for name in wanted if name not in self._skipper.arrived]
        if unused:
            raise UnsupportedModelError(
                f"the backward pass reached no gradient of '{unused[0]}' "
                f"({len(unused)} parameters), whose layer is kept: if the forward pass does not "
                "use it, build DDP with find_unused_parameters=True; if it lies in a checkpointed "
                "block, checkpoint with use_reentrant=False"
            )

    def _prices(self, costs: str) -> Vector | None:
        """Cost of each layer; None if it is still to be measured."""
        if costs == "time":
            return None
        if costs == "layers":
            return np.ones(len(self.layers))
        members = self.layers.values()
        sizes = [sum(self._parameters[name].nbytes for name in names) for names in members]
        # A layer without elements costs nothing to send, but costs are above 0.
        return np.maximum(sizes, 1.0)

    def _measured(self) -> Vector:
        """Seconds of each layer's backward pass, averaged over the ranks."""
        times = self._skipper.clock.by_parameter
        mine = [sum(times[name] for name in names) for names in self.layers.values()]
        total = torch.tensor(mine, dtype=torch.float64, device=self._exchange.device)
        self._exchange.all_reduce(total)
        times.clear()
        costs = np.array(total.tolist()) / self._exchange.world_size
        # Nothing is free: a layer at no cost would be kept always, and its time is hardly measured.
        return np.asarray(np.maximum(costs, 1e-3 * float(costs.mean())))

    def _fitting(self, state: Any) -> Any:
        """A checkpoint, made to fit this rank where nothing in it depends on the ranks."""
        here = {"world_size": self._exchange.world_size, "rank": self._exchange.rank}
        if not (self._sampler.shared and isinstance(state, Mapping)) or state.get("slots", True):
            return state
        return state if state.get("world_size") == here["world_size"] else {**state, **here}

    def _chosen(self, mask: Mask) -> tuple[str, ...]:
        return tuple(layer for layer, kept in zip(self.layers, mask, strict=True) if kept)


def _layers(model: DistributedDataParallel, patterns: Patterns | None) -> Layers:
    trained = trained_parameters(model)
    if patterns is None:
        layers = default_layers(trained)
    else:
        frozen = [name for name, p in model.module.named_parameters() if not p.requires_grad]
        layers = layers_by_pattern(patterns, [name for name, _ in trained], frozen)
    check_several(layers)
    return layers


def _check_model(model: DistributedDataParallel) -> None:
    owner = getattr(model, OWNER, "")
    if owner.startswith("torchcomp.LocalSGD"):
        raise UnsupportedModelError(
            f"{owner} is already installed on this model: its ranks exchange weights, all of them "
            "and no gradients, so there are neither bytes to save nor reduced norms to learn from; "
            "use one or the other"
        )
    check_model(model)
    if model.static_graph:
        raise UnsupportedModelError(
            "static_graph=True makes DDP take the first step's set of layers for that of all "
            "steps, silently: build DistributedDataParallel without it"
        )


def _allow_empty_steps(scaler: torch.amp.GradScaler) -> None:
    """Let optimizers step with this scaler when none of their parameters has a gradient.

    A scaler raises where it has no gradient to check; now none counts as "no infinity found". It
    has no public method for this, so the private one is wrapped that PyTorch's own sharded scaler
    overrides. A gradient of zeros would let momentum and weight decay move a dropped layer.
    """
    scaler._unscale_grads_ = partial(_unscaled, scaler)  # type: ignore[method-assign]


def _unscaled(
    scaler: torch.amp.GradScaler, optimizer: Any, inverse: Tensor, found: Tensor, fp16: bool
) -> dict[torch.device, Tensor]:
    """Whether an infinity was found, by device; `found` comes in as zero."""
    own = type(scaler)._unscale_grads_
    return own(scaler, optimizer, inverse, found, fp16) or {found.device: found}
