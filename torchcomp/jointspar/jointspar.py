"""JointSpar: skip whole layers of a DDP model in every step, in its backward pass and exchange."""

import weakref
from collections.abc import Iterable, Mapping
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
from torchcomp.ddp.arguments import Options, check_scaler
from torchcomp.ddp.checks import (
    OWNER,
    check_is_ddp,
    check_model,
    device_of,
    trained_parameters,
)
from torchcomp.ddp.register import register_ddp
from torchcomp.errors import SpecError, UnsupportedModelError
from torchcomp.exchange import Exchange, ProcessGroupExchange
from torchcomp.gathering import Gatherable
from torchcomp.jointspar.bandit import Baseline, Literal, Mask, Vector
from torchcomp.jointspar.layers import Layers, Patterns, layers_of
from torchcomp.jointspar.sampled import Sampled, by_layer
from torchcomp.jointspar.sampler import Sampler, SamplingOptions
from torchcomp.jointspar.skip import Skipper
from torchcomp.jointspar.stats import JointSparStats
from torchcomp.keys import Key, check_seed
from torchcomp.spec import parse_aggregator

_ATTRIBUTE = "_torchcomp_jointspar"
"""Attribute of a DDP model that keeps its JointSpar alive if the user holds no reference to it."""

_ADVICE = {
    "spec": "build JointSpar with the options that the checkpoint was saved with",
    "world_size": "convert it with torchcomp.redistribute(states, world_size)",
}
"""What to do about a checkpoint that does not belong to this run, for the error message."""


class JointSpar(Gatherable):
    """Keep a random set of layers in every step. Other gradients are neither computed nor sent.

    Source: Liu, Mozafari, "Communication-efficient distributed learning for large batch
    optimization", ICML 2022, Algorithms 1 and 2. Every step does the following:

    1. Keep each layer d independently with probability p_d. The set S_t of kept layers can be
       empty.
    2. Compute the weight gradients of the layers in S_t, and no others.
    3. Average g_d / p_d of these layers over the ranks. The result is an unbiased estimate of the
       dense mean.
    4. Learn p from the gradient norms of these layers
       (:class:`torchcomp.jointspar.bandit.Bandit`).

    The training loop works unchanged. All backward passes that ``no_sync`` accumulates use the same
    set. The gradient of a dropped layer is None, so its weights and momentum do not change (see
    `skipped`).

    Args:
        model: a DDP model without another method of torchcomp.
        budget: expected cost of a step, as a share of the cost of all layers. Above 0 and at most
            1.
        costs: the unit of `budget`: "layers" (as in the paper), "bytes", or "time". The time is
            that of each layer's backward pass. It is measured in the warm-up steps and averaged
            over the ranks.
        layers: a mapping from layer names to shell-style patterns of parameter names. By default,
            each module with weights is a layer, with its bias and its norm.
        compress: how the kept layers are exchanged, such as ``"ef(topk(0.01))"``. While a layer is
            dropped, its residual does not change.
        p_min: lowest probability of a layer, at most `budget`. Gradients are multiplied by up to
            1 / p_min.
        rule: how p is learned: "baseline" or ``Baseline()``, ``Literal(...)`` (both classes are in
            :mod:`torchcomp.jointspar.bandit`), or None for uniform dropping.
        selection: "shared" draws one set for all ranks. "per-rank" draws one set for each rank, as
            in the paper. The ranks then exchange every layer that any of them keeps, which saves
            almost no bytes on many ranks.
        skipped: the gradients that the optimizer finds in dropped layers: "none" (``grad`` is None)
            or "zero", for loops that read every gradient.
        warmup_steps: number of first steps that keep all layers. DDP then orders its buckets by a
            complete backward pass. The default is 1, or 5 with costs="time".
        seed: seed of the draws.
        scaler: the ``GradScaler`` of the training loop, if there is one. From now on it also
            accepts an optimizer whose parameters have no gradient.

    Attributes:
        layers: maps the name of each layer to the names of its parameters.

    Raises:
        SpecError: if an option is out of its range, or if a parameter is not in exactly one layer.
        UnsupportedModelError: as for :func:`torchcomp.register`, and for ``static_graph``. From
            ``backward``: if the forward pass did not use a kept layer. From a forward pass: if the
            loss of the step before was not computed from what the model returned.
        RankMismatchError: if arguments or models differ across ranks.
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
        self._exchange = ProcessGroupExchange(model.process_group, device_of(model))
        arguments = {"budget": budget, "costs": costs, "compress": compress, "seed": seed}

        # `build` calls this and verifies the values across ranks. An argument that is refused on
        # one rank only must not leave the other ranks waiting in a collective.
        def make() -> tuple[tuple[SamplingOptions, Layers, Aggregator], dict[str, Any]]:
            check_seed(seed)
            check_scaler(scaler)
            _check_model(model)
            default = 5 if costs == "time" else 1
            steps = default if warmup_steps is None else warmup_steps
            used = Baseline() if rule == "baseline" else rule
            # A rule that is another str is refused by SamplingOptions.
            options = SamplingOptions(budget, costs, p_min, used, selection, steps)  # type: ignore[arg-type]
            grouped = layers_of(model, layers)
            check_choice("skipped", skipped, ("none", "zero"))
            inner = parse_aggregator(compress)
            values = {"options": options, "layers": grouped, "skipped": skipped, "seed": seed}
            return (options, grouped, inner), {**values, "compress": inner}

        options, self.layers, inner = self._exchange.build("torchcomp.JointSpar", arguments, make)
        # Weak: the model refers to this object, and a cycle would live until garbage collection.
        self._model = weakref.ref(model)
        self._parameters = dict(trained_parameters(model))
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._to_none = skipped == "none"
        key = Key(seed, rank=self._exchange.rank)
        self._sampler = Sampler(options, self.layers, self._costs_in_advance(costs), key)
        method = Sampled(inner, self._sampler)
        self._handle = register_ddp(model, method, Options(seed=seed, scaler=scaler, check="now"))
        averager = self._handle.averager
        # A DDP bucket can contain several layers, and each step keeps different ones.
        averager.regroup(by_layer(averager.groups, self._sampler.layer_of))
        averager.on_finish(self._sampler.finish)
        if scaler is not None and scaler.is_enabled() and self._to_none:
            _allow_empty_steps(scaler)
        callbacks = self._forward_begins, self._backward_done
        self._skipper = Skipper(model.module, self._parameters, *callbacks)
        self._skip()
        setattr(model, OWNER, f"torchcomp.JointSpar(budget={budget:g})")
        setattr(model, _ATTRIBUTE, self)

    def __repr__(self) -> str:
        return f"<torchcomp.JointSpar {self._sampler.options}: {self.stats}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> "JointSpar":
        # Copies of the model, such as AveragedModel makes, skip no layer and need no second object.
        return self

    @property
    def p(self) -> dict[str, float]:
        """Probability of each layer in the next step, by name."""
        return dict(zip(self.layers, self._sampler.p.tolist(), strict=True))

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the layers that the next step keeps on this rank."""
        return self._names_of(self._sampler.kept)

    @property
    def stats(self) -> JointSparStats:
        """Counters of this rank."""
        sampler, traffic = self._sampler, self._handle.stats
        return JointSparStats(
            step=sampler.step,
            kept=self._names_of(sampler.last),
            p=self.p,
            share=float(sampler.costs @ sampler.p) / float(sampler.costs.sum()),
            bytes_sent=traffic.bytes_sent,
            dense_bytes_sent=traffic.dense_bytes_sent,
            total_bytes_sent=traffic.total_bytes_sent,
            total_dense_bytes_sent=traffic.total_dense_bytes_sent,
            control_bytes_sent=traffic.control_bytes_sent,
            total_control_bytes_sent=traffic.total_control_bytes_sent,
            backward_ms=self._skipper.clock.backward_ms,
        )

    def table(self) -> str:
        """Return a text table of the layers: parameters, elements, share of the cost, and p."""
        costs, unit = self._sampler.costs, self._sampler.options.costs
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

    # These three methods implement the protocol torchcomp.jointspar.Sampling, which LARS uses.

    def probability(self, parameter: Tensor) -> float:
        """Return the p that divided this parameter's gradient in the last step.

        Raises:
            SpecError: with ``selection="per-rank"``, where each rank divides by another p.
        """
        if not self._sampler.shared:
            raise SpecError(
                'LARS needs selection="shared": with selection="per-rank", how often a mean has a '
                "gradient depends on the probabilities of all ranks, and each rank has only its own"
            )
        name = self._names.get(id(parameter))
        # LARS can also train parameters that are in no layer. These are not sampled.
        return 1.0 if name is None else float(self._sampler.applied[self._sampler.layer_of[name]])

    def presence(self, parameter: Tensor) -> float:
        """Return the share of steps in which this parameter has a gradient, zeros included."""
        p = self.probability(parameter)
        return p if self._to_none else 1.0

    def norm(self, parameter: Tensor) -> float:
        """Return the running average of this parameter's gradient norm, before division by p."""
        return self._sampler.norm(self._names[id(parameter)])

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state. Every rank must save its own.

        ``torch.load(..., weights_only=True)`` can load it.

        Raises:
            RuntimeError: in the middle of a backward pass.
        """
        return {**self._handle.state_dict(), "jointspar": self._sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. Nothing changes on error.

        With ``selection="shared"``, a run with another number of ranks can load the state and
        continue with the same p. If `compress` keeps a residual, first convert the states of all
        ranks with ``torchcomp.redistribute``.

        Raises:
            CheckpointError: if the state is damaged, or belongs to another model, method or rank.
            RuntimeError: in the middle of a backward pass.
        """
        state = self._adapted(state)
        # Check both sections before either is restored, so that an error changes nothing.
        checkpoint.check_header(state, str(self._handle.method), self._exchange, _ADVICE)
        restore = self._sampler.prepare(state)
        self._handle.load_state_dict(state)
        restore()
        self._skip()

    @property
    def _gather_over(self) -> Exchange:
        return self._exchange

    def close(self) -> None:
        """Stop skipping layers. The model cannot train any further: DDP cannot remove a hook."""
        self._skipper.close()
        self._handle.close()

    def __enter__(self) -> "JointSpar":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _forward_begins(self) -> None:
        """Raise if the last backward pass bypassed the output of the forward pass."""
        # Gradients were exchanged, but _backward_done was not called. Every rank finds the same.
        if self._sampler.committed is not None:
            raise UnsupportedModelError(
                "the last backward pass did not go through the output of the forward pass, so "
                "JointSpar can neither count steps nor drop layers: return the loss, or what it is "
                "computed from, as a tensor or in tuples, lists, dicts or dataclasses"
            )

    def _backward_done(self, reached: bool) -> None:
        """End a backward pass, after DDP has written the gradients.

        Args:
            reached: whether the pass computed a gradient of any parameter.
        """
        sampler = self._sampler
        committed, sampler.committed = sampler.committed, None
        # Nothing was exchanged: a pass under no_sync, for gradients of inputs, or incomplete.
        if committed is None:
            if reached:
                self._check_complete()
            return
        # No rank kept these layers. DDP has written zeros there, or with find_unused_parameters has
        # left the old gradient.
        self._clear(
            self._parameters[name] for name in sampler.names(~sampler.union(self._exchange))
        )
        # The scaler makes the optimizer skip a step that was rolled back. Its layers, which are
        # still drawn, are used for the next one.
        if not committed:
            sampler.reset()
            return
        sampler.learn(self._handle.averager.scale)
        if sampler.bandit is None and sampler.step >= sampler.options.warmup_steps:
            sampler.bandit = sampler.options.bandit(self._measured_costs())
        sampler.draw()
        self._skip()

    def _clear(self, dropped: Iterable[Tensor]) -> None:
        """Set the gradients of dropped parameters to None or zeros, as the user chose."""
        zeros = []
        for parameter in dropped:
            if self._to_none:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            zeros.append(parameter.grad)
        if zeros:
            torch._foreach_zero_(zeros)

    def _skip(self) -> None:
        sampler = self._sampler
        self._skipper.skip(sampler.names(~sampler.kept))
        # The first backward pass also touches fresh memory, which makes it too slow to be timed.
        self._skipper.clock.detailed = sampler.bandit is None and sampler.step > 0

    def _check_complete(self) -> None:
        """Raise if DDP still waits for gradients of kept layers."""
        # Left alone, DDP would raise in the next forward pass, without the cause.
        model = self._model()
        # require_forward_param_sync is False after a forward pass under no_sync.
        if model is None or not model.require_forward_param_sync or model.find_unused_parameters:
            return
        wanted = self._sampler.names(self._sampler.kept)
        unused = [name for name in wanted if name not in self._skipper.arrived]
        if unused:
            raise UnsupportedModelError(
                f"the backward pass computed no gradient of '{unused[0]}' "
                f"({len(unused)} parameters), although its layer is kept: if the forward pass does "
                "not use it, build DDP with find_unused_parameters=True; if it is in a "
                "checkpointed block, use checkpoint(..., use_reentrant=False)"
            )

    def _costs_in_advance(self, costs: str) -> Vector | None:
        """Return the cost of each layer, or None if it has yet to be measured."""
        if costs == "time":
            return None
        if costs == "layers":
            return np.ones(len(self.layers))
        members = self.layers.values()
        sizes = [sum(self._parameters[name].nbytes for name in names) for names in members]
        # Costs must be above 0, also of a layer without elements.
        return np.maximum(sizes, 1.0)

    def _measured_costs(self) -> Vector:
        """Return the seconds of each layer's backward pass, averaged over the ranks."""
        times = self._skipper.clock.take()
        mine = [sum(times[name] for name in names) for names in self.layers.values()]
        # All ranks must use the same costs, because they must draw the same layers.
        total = torch.tensor(mine, dtype=torch.float64, device=self._exchange.device)
        self._exchange.all_reduce(total)
        costs = np.array(total.tolist()) / self._exchange.world_size
        # A layer at almost no cost would always be kept, although such short times are inaccurate.
        return np.asarray(np.maximum(costs, 1e-3 * float(costs.mean())))

    def _adapted(self, state: Any) -> Any:
        """Return a checkpoint as one of this rank and world size, if it contains no slots."""
        # With a shared selection only slots, such as residuals, differ between ranks.
        here = {"world_size": self._exchange.world_size, "rank": self._exchange.rank}
        if not (self._sampler.shared and isinstance(state, Mapping)):
            return state
        slots = state.get("slots")
        if not isinstance(slots, Mapping) or slots:
            return state
        return state if state.get("world_size") == here["world_size"] else {**state, **here}

    def _names_of(self, mask: Mask) -> tuple[str, ...]:
        return tuple(layer for layer, kept in zip(self.layers, mask, strict=True) if kept)


def _check_model(model: DistributedDataParallel) -> None:
    owner = getattr(model, OWNER, "")
    if owner.startswith("torchcomp.LocalSGD"):
        raise UnsupportedModelError(
            f"{owner} is already installed on this model: its ranks average weights and never "
            "gradients, so JointSpar could neither save bytes nor learn from gradient norms; use "
            "one of the two"
        )
    check_model(model)
    if model.static_graph:
        raise UnsupportedModelError(
            "with static_graph=True, DDP silently assumes that every step keeps the layers of the "
            "first step: build DistributedDataParallel without it"
        )


def _allow_empty_steps(scaler: torch.amp.GradScaler) -> None:
    """Let this scaler step optimizers none of whose parameters has a gradient.

    A ``GradScaler`` raises if an optimizer has no gradient to check. With this, it treats such an
    optimizer as one without infinities.
    """
    # GradScaler has no public method for this. PyTorch's own ShardedGradScaler overrides the same
    # private one. Gradients of zero would also avoid the error. But with them, momentum and weight
    # decay would change a dropped layer. This is a partial instead of a closure because a scaler
    # must stay picklable.
    scaler._unscale_grads_ = partial(_unscaled, scaler)  # type: ignore[method-assign]


def _unscaled(
    scaler: torch.amp.GradScaler, optimizer: Any, inverse: Tensor, found: Tensor, fp16: bool
) -> dict[torch.device, Tensor]:
    """Return for each device whether an infinity was found, as ``GradScaler._unscale_grads_``."""
    original = type(scaler)._unscale_grads_
    # The original returns no device if it found no gradient. `found` is passed in as zero.
    return original(scaler, optimizer, inverse, found, fp16) or {found.device: found}
