"""Sampler: draws the layers of each step and learns their probabilities; Sampled: averages them."""

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from torchcomp.aggregators.base import Aggregator, Cost
from torchcomp.checkpoints import checkpoint
from torchcomp.checkpoints.checkpoint import count, dict_of, list_of, number, record, text
from torchcomp.engine import host
from torchcomp.engine.bucket import Bucket, BucketShape, Group
from torchcomp.engine.keys import Key
from torchcomp.engine.prepared import Prepared
from torchcomp.engine.state import Slot
from torchcomp.exchange import Exchange
from torchcomp.jointspar import bandit
from torchcomp.jointspar.bandit import BASELINE, Baseline, Literal, Mask, Vector
from torchcomp.jointspar.layers import Layers
from torchcomp.specs.checks import check_fraction
from torchcomp.specs.component import Choices, Component, check_kind
from torchcomp.specs.errors import CheckpointError, SpecError

_NORM_DECAY = 0.9  # weight of the old value in the moving average of the norms that LARS uses
_MOST = 16  # sets of kept layers for which a bucket stays prepared

_LEARNED = {"bandit": bandit.FORM, "averages": dict_of(list_of(number, 2))}
_FORM = record(step=count, layers=dict_of(list_of(text)), applied=list_of(number), **_LEARNED)


@dataclass(frozen=True)
class SamplingOptions(Component):
    """``sampling(budget=0.6)``: how layers are chosen; see :class:`torchcomp.JointSpar`."""

    name: ClassVar[str] = "sampling"
    positional: ClassVar[int] = 0

    budget: float
    costs: Annotated[str, Choices(("layers", "bytes"))] = "layers"
    p_min: float = 0.0125
    rule: Baseline | Literal | None = BASELINE
    selection: Annotated[str, Choices(("shared", "per-rank"))] = "shared"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("budget", self.budget)
        check_fraction("p_min", self.p_min)
        if self.p_min > self.budget:
            problem = f"p_min = {self.p_min:g} must be at most budget = {self.budget:g}"
            raise SpecError(problem, "p_min")
        if not isinstance(self.rule, Baseline | Literal | None):
            problem = f"rule must be Baseline(), Literal(...) or None, not {self.rule!r}"
            raise SpecError(problem, "rule")
        if isinstance(self.rule, Literal) and self.costs != "layers":
            raise SpecError('Literal(...) counts layers: use Baseline(), or costs="layers"', "rule")


class Sampler:
    """Algorithms 1 and 2 of JointSpar on layers with these costs, shape (D,), above 0.

    The first step keeps all layers, so that DDP orders its buckets by a complete backward pass.
    """

    def __init__(self, options: SamplingOptions, layers: Layers, costs: Vector, key: Key) -> None:
        if len(layers) < 2:
            raise SpecError(f"JointSpar needs two layers or more, not {list(layers)}", "layers")
        self.options, self.layers = options, layers
        self.shared = options.selection == "shared"
        self.layer_of = {name: d for d, names in enumerate(layers.values()) for name in names}
        budget = float(options.budget) * float(costs.sum())
        self.bandit = bandit.Bandit(costs, budget, options.p_min, options.rule)
        self.step = 0  # number of committed steps
        self.exchanged = False  # whether the gradients of the next step have been exchanged
        self.applied = np.ones(len(layers))  # p of the last committed step; `p` is the next one's
        self._key = key
        self._averages: dict[str, list[float]] = {}
        self._verified = False  # whether the ranks have been compared
        self.draw()

    def draw(self) -> None:
        p = self.bandit.p if self.step else np.ones(len(self.layers))
        # The name makes it independent of what compressors draw in the same step.
        key = Key(self._key.seed, self.step, rank=self._key.rank).of_tensor("jointspar")
        self.kept, self.p = bandit.sample(p, key, shared=self.shared), p
        self.reset()

    def reset(self) -> None:
        """Discard what an exchange has recorded."""
        # The layers that any rank keeps. With per-rank selection a collective has to find them.
        self._exchanged: Mask | None = self.kept if self.shared else None
        self._norms: dict[str, Tensor] = {}

    def names(self, mask: Mask) -> list[str]:
        return [name for name, d in self.layer_of.items() if mask[d]]

    def union(self, exchange: Exchange) -> Mask:
        """Return the layers to exchange: those that any rank keeps. A collective."""
        # Before the first exchange: ranks with different sets would pair unequal messages.
        if self.shared and not self._verified:
            values = {**self.state_dict(), "kept": self.kept.nonzero()[0], "p": self.p.tolist()}
            exchange.verify("the layers of a step", values, checkpoint.ONE_STEP)
            self._verified = True
        if self._exchanged is None:
            flags = host.copy_to(torch.from_numpy(self.kept.astype(np.uint8)), exchange.device)
            # The host has to know which messages to send: this is the only wait inside a step.
            self._exchanged = exchange.all_reduce_max(flags).cpu().numpy().astype(bool)
        return self._exchanged

    def record_norms(self, parts: Mapping[str, Tensor]) -> None:
        if parts:
            # In float64, a finite float32 gradient has a finite norm.
            norms = torch._foreach_norm(list(parts.values()), 2, dtype=torch.float64)
            self._norms |= zip(parts, norms, strict=True)

    def learn(self) -> None:
        """Update p and the averages after a committed step."""
        held = list(self._norms.values())
        values = torch.stack(held).tolist() if held else []
        norms = dict.fromkeys(self.layer_of, 0.0)
        keep, take = _NORM_DECAY, 1 - _NORM_DECAY
        for name, value in zip(self._norms, values, strict=True):
            # Algorithm 1 takes norms before the division by p. The means were divided, a rank's own
            # gradients not yet.
            p = float(self.p[self.layer_of[name]]) if self.shared else 1.0
            norms[name] = value * p
            total, weight = self._averages.get(name, [0.0, 0.0])
            self._averages[name] = [keep * total + take * norms[name], keep * weight + take]
        # The first step teaches p nothing: it keeps every layer with probability 1.
        if self.step and self.options.rule is not None:
            by_layer = [math.hypot(*(norms[n] for n in names)) for names in self.layers.values()]
            self.bandit.update(self.kept, by_layer)
        self.applied = self.p
        self.step += 1

    def norm(self, name: str) -> float:
        total, weight = self._averages.get(name, [0.0, 0.0])
        return total / weight if weight else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "layers": {layer: list(names) for layer, names in self.layers.items()},
            "bandit": self.bandit.state_dict(),
            "applied": self.applied.tolist(),
            "averages": {name: list(pair) for name, pair in sorted(self._averages.items())},
        }

    def restored(self, state: Mapping[str, Any]) -> "Sampler":
        """Return what this sampler becomes with a state of JointSpar; CheckpointError if bad."""
        record(seed=count, jointspar=_FORM)(state, "the state")
        section, found = state["jointspar"], copy.copy(self)
        # Also in another order, p would belong to other layers.
        if list(section["layers"].items()) != list(self.state_dict()["layers"].items()):
            raise CheckpointError("the checkpoint groups parameters into other layers")
        found.step, found.exchanged, found.bandit = section["step"], False, copy.copy(self.bandit)
        found.bandit.load_state_dict(section["bandit"])
        found.applied = np.array(section["applied"], dtype=np.float64)
        found._averages = {name: list(pair) for name, pair in section["averages"].items()}
        # With the checkpoint's seed, the run continues with the layers it would have drawn.
        found._key = Key(state["seed"], rank=self._key.rank)
        found.draw()
        found._verified = False  # it is possible that only some ranks have loaded a checkpoint
        return found


@dataclass(frozen=True)
class Sampled(Aggregator):
    """Algorithm 2 of JointSpar on one bucket, from the gradient to the mean.

    1. Set g_hat_d = g_d / p_d for the layers that this rank keeps, and 0 for the others.
    2. Average g_hat by `inner`, as one vector of the layers that any rank keeps. Nothing else is
       sent, and the residuals of other layers do not change.
    """

    name: ClassVar[str] = "jointspar"

    inner: Aggregator
    sampler: Sampler = field(compare=False)

    def __post_init__(self) -> None:
        check_kind(self, "inner", Aggregator)
        if self.inner.whole_model:
            raise SpecError(
                f'{self.inner}: dropped layers need scope="bucket" or "tensor"', "inner"
            )

    def __str__(self) -> str:
        return f"{self.name}({self.inner}, {self.sampler.options})"

    @property
    def depends_on_grouping(self) -> bool:
        return self.inner.depends_on_grouping

    @property
    def rehearsed(self) -> Aggregator:
        return self.inner.rehearsed  # which layers are kept is known only inside a step

    def slots(self, shape: BucketShape, world_size: int, rank: int) -> tuple[Slot, ...]:
        return self.inner.slots(shape, world_size, rank)

    def cost(self, shape: BucketShape, world_size: int, rank: int = 0, node: int = 1) -> Cost:
        return self.inner.cost(shape, world_size, rank, node)

    def prepare(self, bucket: Prepared) -> None:
        bucket.work = {}  # by the parameters of the kept layers, which are others in every step

    def aggregate(self, g: Tensor, bucket: Prepared, key: Key) -> None:
        sampler, whole = self.sampler, Bucket(bucket.shape, g)
        parts = whole.parts()
        layers = {name: sampler.layer_of[name] for name in parts}
        exchanged = sampler.union(bucket.exchange)
        kept = {name: x for name, x in parts.items() if sampler.kept[layers[name]]}
        if not sampler.shared:
            # Before the division by p: each rank learns from its own undivided gradients.
            sampler.record_norms(kept)
        # 1. g_hat
        factors = [1 / float(sampler.p[layers[name]]) for name in kept]
        if any(factor != 1 for factor in factors):
            torch._foreach_mul_(list(kept.values()), factors)
        if len(kept) < len(parts):
            torch._foreach_zero_([x for name, x in parts.items() if name not in kept])
        # 2. The mean. All ranks have the same `exchanged`.
        sent = {name: x for name, x in parts.items() if exchanged[layers[name]]}
        if not sent:
            return
        packed = whole
        if len(sent) < len(parts):
            packed = Bucket(bucket.shape.select(sent), torch.cat(list(sent.values())))
        if packed.shape not in bucket.work:
            if len(bucket.work) >= _MOST:
                bucket.work.clear()
            context = bucket.exchange, bucket.state, bucket.device
            bucket.work[packed.shape] = self.inner.prepared(packed.shape, *context)
        self.inner.aggregate(packed.flat, bucket.work[packed.shape], key)
        means = packed.parts()
        if sampler.shared:
            sampler.record_norms(means)
        if packed is not whole:
            torch._foreach_copy_(list(sent.values()), list(means.values()))


def by_layer(groups: Iterable[Group], layer_of: Mapping[str, int]) -> tuple[Group, ...]:
    """Split groups of parameters, so that each new group is of one layer."""
    divided: dict[tuple[int, int], list[str]] = {}
    for i, group in enumerate(groups):
        for name in group:
            divided.setdefault((i, layer_of[name]), []).append(name)
    return tuple(map(tuple, divided.values()))
