"""JointSpar: skip whole layers of a DDP model in every step, in its backward pass and exchange."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import compress as selected
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torchcomp.checkpoints import checkpoint
from torchcomp.checkpoints.gathering import Gatherable
from torchcomp.ddp.checks import OWNER, check_is_ddp, check_model, device_of, trained_parameters
from torchcomp.ddp.register import Options, register_ddp
from torchcomp.engine.keys import Key, check_seed
from torchcomp.engine.stats import Stats
from torchcomp.exchange import Exchange, ProcessGroupExchange
from torchcomp.jointspar.bandit import BASELINE, Baseline, Literal
from torchcomp.jointspar.layers import default_layers
from torchcomp.jointspar.sampler import Sampled, Sampler, SamplingOptions, by_layer
from torchcomp.jointspar.skip import Skipper
from torchcomp.specs.component import Component
from torchcomp.specs.errors import SpecError, UnsupportedModelError
from torchcomp.specs.spec import parse_aggregator

_ADVICE = {
    "spec": "build JointSpar with the options that the checkpoint was saved with",
    "world_size": "convert it with torchcomp.redistribute(states, world_size)",
}


class JointSpar(Skipper, Gatherable):
    """Keep a random set of layers in every step. Other gradients are neither computed nor sent.

    Source: Liu, Mozafari, "Communication-efficient distributed learning for large batch
    optimization", ICML 2022, Algorithms 1 and 2. The first step keeps all layers. Every later one:

    1. Keep each layer d independently with probability p_d. The set S_t can be empty.
    2. Compute the weight gradients of the layers in S_t, and no others.
    3. Average g_d / p_d of these layers over the ranks: an unbiased estimate of the dense mean.
    4. Learn p from the gradient norms of these layers, by `rule`.

    The training loop works unchanged; passes that ``no_sync`` accumulates use the same set. The
    gradient of a dropped layer is None, so its weights and momentum do not change.

    Args:
        model: a DDP model without another method of torchcomp.
        budget: expected cost of a step, as a share of that of all layers; above 0 and at most 1.
            Start with 0.6.
        costs: the unit of `budget`: "layers" (as in the paper) or "bytes". Start with "bytes".
        compress: how the kept layers are exchanged, such as ``"ef(topk(0.01))"``.
        p_min: lowest probability of a layer, at most `budget`.
        rule: how p is learned: ``Baseline()``, ``Literal(...)``, or None for uniform dropping.
        selection: "shared" draws one set for all ranks, "per-rank" one for each, as in the paper.
            The ranks then exchange every layer that any of them keeps: on many ranks, almost all.
        seed: seed of the draws.

    Attributes:
        layers: maps the name of each layer to the names of its parameters. A layer is a module with
            weights, with its bias and its norm.

    Raises:
        SpecError: if an option is out of its range, or if the model has one layer.
        UnsupportedModelError: as for :func:`torchcomp.register`, and for ``static_graph``. From a
            forward pass: if the last loss was not computed from what the model returned.
        RankMismatchError: if arguments or models differ across ranks.
        NonFiniteError: from ``backward``, if a gradient is not finite. There is no ``scaler=``.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        *,
        budget: float,
        costs: str = "layers",
        compress: str | Component = "mean",
        p_min: float = 0.0125,
        rule: Baseline | Literal | None = BASELINE,
        selection: str = "shared",
        seed: int = 0,
    ) -> None:
        check_is_ddp(model)
        self._exchange = ProcessGroupExchange(model.process_group, device_of(model))
        self._parameters = trained = dict(trained_parameters(model))
        self._names = {id(parameter): name for name, parameter in trained.items()}

        def make() -> tuple[Sampled, dict[str, Any]]:
            check_seed(seed)
            check_model(model)
            if model.static_graph:
                raise UnsupportedModelError(
                    "with static_graph=True, DDP assumes that every step keeps the same layers"
                )
            options = SamplingOptions(budget, costs, p_min, rule, selection)
            grouped = default_layers(trained.items())
            sizes = [sum(trained[name].nbytes for name in names) for names in grouped.values()]
            # Costs must be above 0, also of a layer without elements.
            each = np.maximum(sizes, 1.0) if costs == "bytes" else np.ones(len(grouped))
            sampler = Sampler(options, grouped, each, Key(seed, rank=self._exchange.rank))
            method = Sampled(parse_aggregator(compress), sampler)
            return method, {"method": method, "layers": grouped, "seed": seed}

        method = self._exchange.build("torchcomp.JointSpar", {}, make)
        self._sampler = method.sampler
        self.layers = self._sampler.layers
        self._handle = register_ddp(model, method, Options(seed=seed, check="now"))
        averager = self._handle.averager
        averager.regroup(by_layer(averager.groups, self._sampler.layer_of))
        averager.on_finish(partial(setattr, self._sampler, "exchanged"))
        super().__init__(model.module)
        self._skip_dropped()
        setattr(model, OWNER, f"torchcomp.JointSpar(budget={budget:g})")
        vars(model)["_torchcomp_jointspar"] = self  # keeps it alive

    def __repr__(self) -> str:
        return f"<torchcomp.JointSpar {self._sampler.options}: {self.stats}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> "JointSpar":
        return self  # copies of the model, such as AveragedModel makes, skip no layer

    @property
    def p(self) -> dict[str, float]:
        """Probability of each layer in the next step, by name."""
        return dict(zip(self.layers, self._sampler.p.tolist(), strict=True))

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the layers that the next step keeps on this rank."""
        return tuple(selected(self.layers, self._sampler.kept))

    @property
    def stats(self) -> Stats:
        """Counters of this rank. A step counts also if no layer was exchanged in it."""
        return replace(self._handle.stats, steps=self._sampler.step)

    def probability(self, parameter: Tensor) -> float:
        """Return the p that divided this parameter's gradient in the last step, for LARS."""
        if not self._sampler.shared:
            # How often a mean has a gradient depends on the probabilities of all ranks.
            raise SpecError('LARS needs selection="shared"')
        name = self._names.get(id(parameter))
        # LARS can also train parameters that are in no layer. These are not sampled.
        return 1.0 if name is None else float(self._sampler.applied[self._sampler.layer_of[name]])

    def norm(self, parameter: Tensor) -> float:
        """Return the running average of this gradient's norm before division by p, for LARS."""
        return self._sampler.norm(self._names[id(parameter)])

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state; RuntimeError in the middle of a backward pass."""
        return {**self._handle.state_dict(), "jointspar": self._sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; on CheckpointError or RuntimeError, nothing.

        With ``selection="shared"``, another number of ranks can continue; with a residual, first
        call ``torchcomp.redistribute`` on the states of all.
        """
        # Without slots, such as residuals, a shared selection has the same state on any rank.
        if self._sampler.shared and isinstance(state, Mapping) and state.get("slots") == {}:
            ranks = {"world_size": self._exchange.world_size, "rank": self._exchange.rank}
            state = {**state, **ranks}
        checkpoint.check_header(state, str(self._handle.method), self._exchange, _ADVICE)
        restored = self._sampler.restored(state)
        self._handle.load_state_dict(state)
        vars(self._sampler).update(vars(restored))
        self._skip_dropped()

    @property
    def _gather_over(self) -> Exchange:
        return self._exchange

    def close(self) -> None:
        """Stop skipping layers. The model cannot train any further: DDP cannot remove a hook."""
        self._unhook()
        self._handle.close()

    def __enter__(self) -> "JointSpar":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _forward_begins(self) -> None:
        # Gradients were exchanged, but _backward_done was not called.
        if self._sampler.exchanged:
            raise UnsupportedModelError(
                "the last loss was not computed from the output of the forward pass: return what "
                "it is computed from, also in tuples, lists or dicts"
            )

    def _backward_done(self) -> None:
        sampler = self._sampler
        exchanged, sampler.exchanged = sampler.exchanged, False
        # Otherwise a pass under no_sync, for gradients of inputs, or incomplete.
        if not exchanged:
            return
        # DDP has written zeros, or with find_unused_parameters has left the old gradient.
        for name in sampler.names(~sampler.union(self._exchange)):
            self._parameters[name].grad = None
        sampler.learn()
        sampler.draw()
        self._skip_dropped()

    def _skip_dropped(self) -> None:
        self._skip(self._parameters[name] for name in self._sampler.names(~self._sampler.kept))
