"""JointSpar: the one line that lets a DDP model skip whole layers."""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchcomp import checkpoint
from torchcomp.aggregators import Aggregator
from torchcomp.algorithms.bandit import Baseline, Literal
from torchcomp.algorithms.kl_projection import Vector
from torchcomp.algorithms.layers import (
    Layers,
    Patterns,
    check_several,
    default_layers,
    layers_by_pattern,
)
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
from torchcomp.errors import CheckpointError, SpecError, UnsupportedModelError
from torchcomp.exchange import Exchange
from torchcomp.jointspar.clock import Clock
from torchcomp.jointspar.sampled import Sampled, by_layer
from torchcomp.jointspar.sampler import Law, Sampler
from torchcomp.jointspar.scaler import allow_empty_steps
from torchcomp.jointspar.selection import Selection
from torchcomp.jointspar.skip import Skipper
from torchcomp.jointspar.stats import JointSparStats
from torchcomp.keys import Key, check_seed
from torchcomp.spec import parse_aggregator

_KEEPER = "_torchcomp_jointspar"
"""Attribute of a DDP model that keeps its JointSpar alive when the user does not."""

_LOCAL_STEPS = "torchcomp.LocalSGD"

_ADVICE = {
    "spec": "build JointSpar with the options that it was saved with",
    "world_size": 'torchcomp.redistribute on the ranks\' "handle" makes it fit',
}


class JointSpar:
    """Keep a random set of layers in every step; neither compute nor send the gradients of others.

    Algorithms 1 and 2 of Liu, Mozafari, "Communication-efficient distributed learning for large
    batch optimization", ICML 2022. In every step

    1. keep each layer d with probability p_d, independently: the set S_t, which may be empty
    2. compute the weight gradients of the layers in S_t, and no others
    3. exchange g_d / p_d of these; the mean is an unbiased estimate of the dense mean
    4. learn p from the norms of what was exchanged (:class:`torchcomp.algorithms.bandit.Bandit`)

    The training loop stays as it is. The set is drawn when a step ends, so all forward and backward
    passes that ``no_sync`` accumulates share it. The gradient of a dropped layer is None, so its
    weights, momentum and weight decay stand still (see `skipped`).

    Args:
        model: a DDP model, on which nothing else of torchcomp is installed.
        budget: expected cost of a step, as a share of the cost of all layers.
        costs: what `budget` counts: "layers" (the paper), "bytes" or "time" (of each layer's
            backward pass, measured in the warm-up steps and averaged over the ranks).
        layers: name of each layer -> shell-style patterns of its parameters; by default each
            module that has weights, with its bias and norm.
        compress: how the kept layers are exchanged, such as ``"ef(topk(0.01))"``. An error memory
            of a dropped layer stays as it is until the layer is kept again.
        p_min: least probability of a layer. Gradients are multiplied by up to 1 / p_min.
        rule: how p is learned: ``Baseline()`` (the default, by the text "baseline") or
            ``Literal(...)`` of :mod:`torchcomp.algorithms.bandit`, or None for uniform dropping.
        selection: "shared", the same set on all ranks; or "per-rank", the paper's: then the ranks
            exchange whatever any of them keeps, which saves next to no bytes on many ranks.
        skipped: what the optimizer finds in dropped layers: "none" (no gradient) or "zero", for
            loops that read every gradient.
        warmup_steps: steps that keep all layers first, so that DDP orders its buckets by a whole
            backward pass; 1 by default, 5 with costs="time".
        seed: seed of the draws.
        scaler: the ``GradScaler`` of the loop, if there is one. From now on it bears optimizers
            that find no gradient in a step.

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
        self._exchange = Exchange(model.process_group, device)
        given = {"budget": budget, "costs": costs, "compress": compress, "seed": seed}

        def build() -> tuple[tuple[Law, Layers, Aggregator], dict[str, Any]]:
            check_seed(seed)
            check_scaler(scaler)
            _check_model(model)
            steps = warmup_steps
            if steps is None:
                steps = 5 if costs == "time" else 1
            used = Baseline() if isinstance(rule, str) and rule == "baseline" else rule
            law = Law(budget, costs, p_min, used, selection, steps)  # type: ignore[arg-type]
            grouped = _layers(model, layers)
            check_choice("skipped", skipped, ("none", "zero"))
            inner = parse_aggregator(compress)
            facts = {"law": law, "layers": grouped, "skipped": skipped, "seed": seed}
            return (law, grouped, inner), {**facts, "compress": inner}

        law, grouped, inner = self._exchange.agree("torchcomp.JointSpar", given, build)
        self._model = weakref.ref(model)
        self._parameters = dict(trained_parameters(model))
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._to_none = skipped == "none"
        self._clock = Clock(device)
        self._arrived: set[str] = set()
        self._selection = Selection(grouped, law.selection == "shared")
        priced = None if costs == "time" else _prices(costs, grouped, self._parameters)
        key = Key(seed, rank=self._exchange.rank)
        self._sampler = Sampler(law, self._selection, priced, key)
        self._sampler.draw()
        self._last_kept = self._selection.kept
        method = Sampled(inner, self._selection, str(law))
        self._handle = register(model, method, seed=seed, scaler=scaler)
        self._handle.regroup(by_layer(self._handle.groups, self._selection))
        if self._scaler is not None and self._to_none:
            allow_empty_steps(self._scaler)
        self._settled = 0
        self._skipper = Skipper(model.module, self._parameters, self)
        self._skip()
        setattr(model, OWNER, f"torchcomp.JointSpar(budget={budget:g})")
        setattr(model, _KEEPER, self)

    def __repr__(self) -> str:
        return f"<torchcomp.JointSpar {self._sampler.law}: {self.stats}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> "JointSpar":
        # A copy of the model, to average its weights for one, skips nothing.
        return self

    @property
    def layers(self) -> Layers:
        """Name of each layer -> names of its parameters."""
        return self._selection.layers

    @property
    def p(self) -> dict[str, float]:
        """Probability of each layer in the next step, by name."""
        return dict(zip(self.layers, self._sampler.p.tolist(), strict=True))

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the layers that the next step keeps on this rank."""
        return _chosen(self.layers, self._selection.kept)

    @property
    def stats(self) -> JointSparStats:
        """Counters of this rank."""
        sampler, traffic = self._sampler, self._handle.stats
        share = float(sampler.costs @ sampler.p) / float(sampler.costs.sum())
        return JointSparStats(
            step=sampler.step,
            kept=_chosen(self.layers, self._last_kept) if sampler.step else (),
            p=self.p,
            share=share,
            bytes_sent=traffic.bytes_sent,
            dense_bytes_sent=traffic.dense_bytes_sent,
            total_bytes_sent=traffic.total_bytes_sent,
            total_dense_bytes_sent=traffic.total_dense_bytes_sent,
            backward_ms=self._clock.backward_ms,
        )

    def table(self) -> str:
        """The layers with their parameters, elements, cost and probability, as text."""
        costs, p = self._sampler.costs, self._sampler.p
        width = max(len(layer) for layer in (*self.layers, "layer"))
        unit = self._sampler.law.costs
        lines = [f"{'layer':<{width}}  tensors    elements  share of {unit}        p"]
        for place, (layer, names) in enumerate(self.layers.items()):
            elements = sum(self._parameters[name].numel() for name in names)
            lines.append(
                f"{layer:<{width}}  {len(names):>7}  {elements:>10,}  "
                f"{costs[place] / costs.sum():>{9 + len(unit)}.4f}  {p[place]:>7.4f}"
            )
        return "\n".join(lines)

    # What LARS asks (see torchcomp.algorithms.lars.Sampling).

    def probability(self, parameter: Tensor) -> float:
        """P of this parameter's layer in the step that was exchanged last.

        Raises:
            SpecError: if the ranks keep layers of their own, where there is no such number.
        """
        if not self._selection.shared:
            raise SpecError(
                'LARS needs selection="shared": with sets of their own, how often the ranks have a '
                "gradient depends on probabilities that no rank knows"
            )
        name = self._names.get(id(parameter))
        return 1.0 if name is None else float(self._sampler.applied[self._selection.layer(name)])

    def presence(self, parameter: Tensor) -> float:
        """Share of the steps in which the optimizer finds a gradient of this parameter.

        Raises:
            SpecError: as :meth:`probability`.
        """
        p = self.probability(parameter)
        return p if self._to_none else 1.0

    def norm(self, parameter: Tensor) -> float:
        """Running average of this parameter's mean gradient's norm, before the division by p."""
        return self._sampler.norm(self._names[id(parameter)])

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: plain tensors, numbers and strings.

        Every rank saves its own. It loads with ``torch.load(..., weights_only=True)``.

        Raises:
            RuntimeError: in the middle of a backward pass.
        """
        return {"handle": self._handle.state_dict(), **self._sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; nothing changes on error.

        With a shared selection another number of ranks goes on with the same p. What an error
        memory holds is then divided anew by ``torchcomp.redistribute`` on the ranks' "handle".

        Raises:
            CheckpointError: if it is another model's, method's or rank's, of other layers, or
                damaged.
            RuntimeError: in the middle of a backward pass.
        """
        _check_keys(state, (*self._sampler.state_dict(), "handle"))
        handle, saved = self._handle, self._fitting(state["handle"])
        checkpoint.check_header(saved, str(handle.method), self._exchange, (), _ADVICE)
        sampler = self._sampler.restored(state)
        handle.load_state_dict(saved)
        self._sampler = sampler
        self._sampler.draw()
        self._selection.doubt()
        self._settled = handle.step
        self._skip()

    def close(self) -> None:
        """Keep all layers from now on. DDP cannot drop a hook, so the model cannot train on."""
        self._skipper.close()
        self._handle.close()

    def __enter__(self) -> "JointSpar":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Called by the skipper.

    def forward_begins(self) -> None:
        """Refuse to go on after a step that passed unnoticed; the same on all ranks."""
        if self._handle.step != self._settled:
            raise UnsupportedModelError(
                "the last backward pass did not come from what the forward pass returned, so no "
                "step would ever be counted and no layer dropped: let the model return the loss, "
                "or what it is computed from, as a tensor or in tuples, lists, dicts or dataclasses"
            )

    def backward_begins(self) -> None:
        """Nothing of it has run yet."""
        self._arrived.clear()
        # The first backward pass also touches fresh memory: it would be timed too long.
        self._clock.detailed = self._sampler.measuring and self._sampler.step > 0
        self._clock.begin()

    def gradient_arrived(self, name: str) -> None:
        """The gradient of this parameter is there, on this rank."""
        self._arrived.add(name)
        self._clock.arrived(name)

    def backward_computed(self) -> None:
        """All kernels are enqueued."""
        self._clock.end()

    def backward_done(self, reached: bool) -> None:
        """DDP has written the gradients, if the pass `reached` any."""
        settled = self._handle.step
        if settled == self._settled:
            if reached:
                self._check_complete()
            return
        self._settled = settled
        self._drop_gradients()
        if self._selection.means_are_finite():
            self._advance()
        else:
            self._selection.forget()

    def _advance(self) -> None:
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        self._last_kept = self._selection.kept
        self._sampler.learn({n: norm / scale for n, norm in self._selection.norms().items()})
        if self._sampler.measuring and not self._sampler.warming_up:
            self._sampler.price(self._measured())
        self._sampler.draw()
        self._skip()

    def _drop_gradients(self) -> None:
        exchanged = self._selection.agree(self._exchange)
        for name in self._selection.names(~exchanged):
            parameter = self._parameters[name]
            parameter.grad = None if self._to_none else torch.zeros_like(parameter)

    def _skip(self) -> None:
        self._skipper.skip(self._selection.names(~self._selection.kept))

    def _check_complete(self) -> None:
        """Raise if DDP still waits for layers; it would only say so in the next step."""
        model = self._model()
        if model is None or not model.require_forward_param_sync or model.find_unused_parameters:
            return
        wanted = self._selection.names(self._selection.kept)
        unused = [name for name in wanted if name not in self._arrived]
        if unused:
            raise UnsupportedModelError(
                f"the backward pass reached no gradient of '{unused[0]}' "
                f"({len(unused)} parameters), whose layer is kept: if the forward pass does not "
                "use it, build DDP with find_unused_parameters=True; if it lies in a checkpointed "
                "block, checkpoint with use_reentrant=False"
            )

    def _measured(self) -> Vector:
        """Seconds of each layer's backward pass, averaged over the ranks."""
        times = self._clock.by_parameter
        mine = [sum(times[name] for name in names) for names in self.layers.values()]
        total = torch.tensor(mine, dtype=torch.float64, device=self._exchange.device)
        self._exchange.sum(total)
        costs = np.array(total.tolist()) / self._exchange.world_size
        self._clock.reset()
        # Nothing is free: a layer at no cost would be kept always, and its time is hardly measured.
        priced: Vector = np.maximum(costs, 1e-3 * float(costs.mean()))
        return priced

    def _fitting(self, state: Any) -> Any:
        """The handle's part of a checkpoint, made to fit this rank where nothing depends on it."""
        if not (self._selection.shared and isinstance(state, Mapping)):
            return state
        same = state.get("world_size") == self._exchange.world_size
        if same or state.get("error", True) or state.get("owner", True):
            return state
        return {**state, "world_size": self._exchange.world_size, "rank": self._exchange.rank}


def _check_keys(state: Any, wanted: Iterable[str]) -> None:
    if not isinstance(state, Mapping):
        raise CheckpointError(f"expected a state dict of JointSpar, not {type(state).__name__}")
    missing = [key for key in wanted if key not in state]
    if missing:
        raise CheckpointError(f"not a state dict of JointSpar: it lacks {', '.join(missing)}")


def _chosen(layers: Layers, mask: Any) -> tuple[str, ...]:
    return tuple(layer for layer, kept in zip(layers, mask, strict=True) if kept)


def _layers(model: DistributedDataParallel, patterns: Patterns | None) -> Layers:
    trained = trained_parameters(model)
    if patterns is None:
        layers = default_layers(trained)
    else:
        names = [name for name, _ in trained]
        frozen = [name for name, p in model.module.named_parameters() if not p.requires_grad]
        layers = layers_by_pattern(patterns, names, frozen)
    check_several(layers)
    return layers


def _prices(costs: str, layers: Layers, parameters: dict[str, nn.Parameter]) -> Vector:
    if costs == "layers":
        return np.ones(len(layers))
    sizes = [sum(parameters[name].nbytes for name in names) for names in layers.values()]
    # A layer without elements costs nothing to send, but costs are above 0.
    return np.maximum(np.array(sizes, dtype=np.float64), 1.0)


def _check_model(model: DistributedDataParallel) -> None:
    owner = getattr(model, OWNER, "")
    if owner.startswith(_LOCAL_STEPS):
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
