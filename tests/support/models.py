"""Small models, the specs to train them with, and the bookkeeping of their gradients."""

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchcomp
from tests.support.outcomes import flat
from torchcomp.aggregators import Mean
from torchcomp.engine.bucket import BucketShape, memory_order

METHODS = (
    "mean",
    "topk(0.1)",
    'topk(k=3, scope="tensor")',
    "randk(0.1)",
    'randk(k=3, scope="tensor", unbiased=True)',
    'cast("bf16")',
    'mean(cast("fp16"), exchange="allgather")',
    "ef(identity)",
    "ef(topk(0.1))",
    "ef(warmup(topk(0.1), steps=3))",
    'ef(topk(0.1, scope="tensor"), memory_dtype="bf16")',
    "ef(randk(0.1))",
    'ef(randk(k=3, scope="tensor"), exchange="allgather")',
    'ef(cast("bf16"))',
    'ef(cast("fp16"), exchange="allgather")',
    'ef(topk(0.1), exchange="sharded")',
    'ef(topk(0.1, values="int8"))',
    'ef(quantize("int8"))',
    "powersgd(rank=1)",
    "ef21(topk(0.1))",
    "dgc(topk(0.1))",
    "bidirectional(topk(0.1), topk(0.1))",
    'bidirectional(topk(0.1), topk(0.1), selection="exact")',
    'bidirectional(topk(0.1, scope="model"), topk(0.1, scope="model"))',
    'bidirectional(topk(k=3, scope="tensor"), topk(k=3, scope="tensor"), "exact", "bf16")',
    'bidirectional(identity, topk(0.1), selection="exact")',
    "bidirectional(topk(0.1), identity)",
    'bidirectional(randk(0.1), quantize("int4", rounding="stochastic"))',
    'bidirectional(topk(0.2, values="int4", rounding="stochastic"), topk(0.2, values="bf16"))',
)
"""Specs of tests over all methods. Together they contain every aggregator and compressor."""

THROUGH_DDP = (
    "mean",
    "ef(topk(0.1))",
    'ef(topk(0.1, scope="tensor"), memory_dtype="bf16")',
    'ef(randk(k=3, scope="tensor"), exchange="allgather")',
    'ef(cast("bf16"))',
    'ef(topk(0.1), exchange="sharded")',
    "powersgd(rank=1)",
    "ef21(topk(0.1))",
    "dgc(topk(0.1))",
    'bidirectional(topk(0.1), topk(0.1), selection="exact")',
    'bidirectional(topk(0.1, scope="model"), topk(0.1, scope="model"))',
)
"""A subset of METHODS: one spec for each code path of buckets, groups and state in DDP."""

WITH_RESIDUAL = tuple(spec for spec in METHODS if not isinstance(torchcomp.parse(spec), Mean))

CONSERVING = (
    "ef(topk(0.1))",
    'bidirectional(topk(0.1), topk(0.1), selection="exact")',
    'ef(topk(k=3, scope="tensor"))',
    'bidirectional(topk(0.2), topk(k=3, scope="tensor"))',
    'bidirectional(topk(0.1, scope="model"), randk(0.3))',
    'bidirectional(topk(0.2, values="int8"), topk(0.3, values="int4"), selection="exact")',
    "ef(randk(0.1))",
    'ef(cast("bf16"), exchange="allgather")',
    "powersgd(rank=1)",
    "dgc(topk(0.1), momentum=0.0)",
)
"""Methods that conserve the sum of all gradients, up to the rounding of float64."""

SMALL_BUCKETS = 0.002
"""bucket_cap_mb at which each layer of :func:`mlp` fills a bucket, so that DDP rebuilds several."""

Gradients = dict[str, Tensor]
Batch = tuple[Any, ...]


def seeded(module: nn.Module, seed: int = 0) -> nn.Module:
    """Initialize the parameters of `module` with random numbers, and return it."""
    # A local generator, because the threads of a test share torch's global one.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(values.mul_(0.3))
    return module


def mlp(dtype: torch.dtype = torch.float64, width: int = 16) -> nn.Module:
    hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.Tanh())]
    return seeded(nn.Sequential(*hidden, nn.Linear(width, 4)).to(dtype))


def rows(step: int, dtype: torch.dtype = torch.float64, width: int = 16) -> Tensor:
    """A random mini-batch, different for each step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(4, width, generator=generator, dtype=torch.float64).to(dtype)


def images(step: int) -> Tensor:
    return rows(step, width=2 * 6 * 6).view(4, 2, 6, 6)


class Branches(nn.Module):
    """A stem and two branches; each forward pass uses only the branches in its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor, branches: Iterable[str]) -> Tensor:
        h = torch.tanh(self.stem(x))
        return sum((getattr(self, name)(h) for name in branches), h[:, :4])


class Checkpointed(nn.Module):
    """Recomputes its blocks in the backward pass."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.stem = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=self.use_reentrant)
        return h


class OddSizes(nn.Module):
    """Parameters with no, one and many elements, and one that is not dense in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.gain = nn.Parameter(torch.ones(()))
        self.one = nn.Parameter(torch.ones(1))
        self.strided = nn.Parameter(torch.ones(16, 8)[:, ::2])
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.linear(x) + self.one * (x @ self.strided) + self.empty.sum()


def convolutions() -> nn.Module:
    """Weights in channels_last order, one of them with a single input channel."""
    layers = nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3, groups=8), nn.Tanh(), nn.Conv2d(8, 3, 2)
    )
    return seeded(layers.double()).to(memory_format=torch.channels_last)


def wrap(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """Wrap `module` in DDP, by default with small buckets."""
    return DistributedDataParallel(module, **{"bucket_cap_mb": SMALL_BUCKETS, **options})


def rebuilt_buckets(model: DistributedDataParallel) -> int:
    """Return the number of DDP's buckets after the rebuild, or 0 before it."""
    model.logger.set_runtime_stats_and_log()
    sizes = model._get_ddp_logging_data().get("rebuilt_bucket_sizes", "")
    return len(sizes.split(",")) if sizes else 0


def loss_of(output: Tensor) -> Tensor:
    return output.square().sum()


def optimizer_step(optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
    """Step the optimizer, through the scaler if there is one."""
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def gradients(model: nn.Module) -> Gradients:
    """Return a copy of the gradients that the optimizer uses, in float64 and on the CPU."""
    named = getattr(model, "module", model).named_parameters()
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}
    return {name: grad.to("cpu", torch.float64, copy=True) for name, grad in found.items()}


def local_gradients(model: nn.Module, batch: Batch) -> Gradients:
    """Return this rank's own gradients, computed with a copy of the module outside DDP."""
    twin = copy.deepcopy(getattr(model, "module", model))
    twin.zero_grad()
    loss_of(twin(*batch)).backward()
    return gradients(twin)


def weights(module: nn.Module) -> Tensor:
    return flat(module.parameters())


@dataclass
class Account:
    """Sums of one rank's gradients before and after the exchange, to test conservation."""

    dense: Gradients = field(default_factory=dict)
    applied: Gradients = field(default_factory=dict)
    residual: Gradients = field(default_factory=dict)

    def step(
        self, model: Any, *batches: Batch, optimizer: Any = None, set_to_none: bool = True
    ) -> None:
        """Train for one step. All batches but the last are accumulated under ``no_sync``."""
        model.zero_grad(set_to_none=set_to_none)
        with model.no_sync():
            for batch in batches[:-1]:
                loss_of(model(*batch)).backward()
        loss_of(model(*batches[-1])).backward()
        self.note(model, *batches)
        if optimizer is not None:
            optimizer.step()

    def note(self, model: nn.Module, *batches: Batch) -> None:
        """Add the gradients of a step, after its backward pass and before its optimizer step."""
        for batch in batches:
            _add(self.dense, local_gradients(model, batch))
        _add(self.applied, gradients(model))

    def close(self, handle: torchcomp.Handle) -> "Account":
        """Store the residuals of `handle`, and return this account."""
        state = handle.state_dict()
        self.residual = unsent_gradients(handle.averager.parameters, state)
        return self


def kept(state: dict[str, Any], slot: str = "error") -> dict[str, Tensor]:
    """Return the tensors of a slot in a state dict, by parameter; {} if it has no such slot."""
    return state["slots"].get(slot, {"tensors": {}})["tensors"]


def residual_norm(handle: Any, slot: str = "error") -> float:
    """Return the Euclidean norm of a rank's whole residual."""
    return math.hypot(*handle.residual_norms(slot).values())


def unsent_gradients(parameters: Mapping[str, Tensor], state: dict[str, Any]) -> Gradients:
    """Return a rank's unsent gradients by parameter, from the state dict of its averager."""
    # The server residual is part of the mean, so it is multiplied by the number of ranks.
    found = {name: part.double().cpu() for name, part in kept(state).items()}
    rank, world_size, server = state["rank"], state["world_size"], kept(state, "server_error")
    for names in state["buckets"]:
        shard = BucketShape.of(names, parameters).shards(world_size)[rank]
        for name, at, size in zip(shard.names, shard.offsets, shard.sizes, strict=True):
            if name in server:
                whole = torch.zeros(parameters[name].numel(), dtype=torch.float64)
                whole[at : at + size] = server[name].double() * world_size
                _add(found, {name: memory_order(parameters[name], whole).clone()})
    # Residuals follow the loss scale.
    return {name: part / state["scale"] for name, part in found.items()}


def _add(total: Gradients, more: Gradients) -> None:
    for name, value in more.items():
        total[name] = total[name] + value if name in total else value


def assert_conserved(accounts: list[Account], tolerance: float = 1e-12) -> None:
    """Require that applied means + mean residual = dense means, for each parameter."""
    for name in accounts[0].dense:
        applied = accounts[0].applied[name]
        for rank, account in enumerate(accounts):
            assert torch.equal(account.applied[name], applied), f"'{name}' differs on rank {rank}"
        dense = torch.stack([account.dense[name] for account in accounts]).mean(0)
        zero = torch.zeros_like(dense)
        residual = torch.stack([account.residual.get(name, zero) for account in accounts]).mean(0)
        scale = max(1.0, float(dense.abs().max())) if dense.numel() else 1.0
        text = partial("'{}' is not conserved: {}".format, name)
        close = {"rtol": 0, "atol": tolerance * scale, "msg": text}
        torch.testing.assert_close(applied + residual, dense, **close)


def assert_residual(accounts: list[Account]) -> None:
    """Require a residual that is not negligible. Without one, conservation would be trivial."""
    assert sum(float(e.abs().sum()) for a in accounts for e in a.residual.values()) > 0.1
