"""Runs of one small model: FSDP2 with replicas, and DDP with two levels, over the same ranks."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import torchcomp
from tests.support.models import loss_of, mlp, rows, wrap

NAMES = ("replicate", "shard")
NEEDS_HOOK = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_all_reduce_hook"),
    reason="FSDP2 has an all-reduce hook since torch 2.7",
)


def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=NAMES)


class WithScale(nn.Module):
    """A model with a parameter of one element, on the first shard only, that is sent last."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.layers, self.scale = mlp(dtype), nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + 1e-6 * self.scale


def shard(module: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    """Shard every layer with parameters, and the root."""
    for layer in module.children():
        if list(layer.parameters()) and not isinstance(layer, FSDPModule):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


@dataclass
class Run:
    """A model of fully_shard that trains with two replicas or more.

    Attributes:
        shape: replicas and shards.
        spec: the method.
        dtype: of the parameters.
        options: of register.
        sharding: options of fully_shard.
    """

    shape: tuple[int, int]
    spec: str
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)
    sharding: dict[str, Any] = field(default_factory=dict)
    build: Callable[[torch.dtype], nn.Module] = mlp

    def __post_init__(self) -> None:
        self.mesh = mesh_of(*self.shape)
        self.model = shard(self.build(self.dtype), self.mesh["shard"], **self.sharding)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.handle = torchcomp.register(
            self.model, self.spec, replicate=self.mesh["replicate"], **self.options
        )

    def backward(self, step: int) -> None:
        loss_of(self.model(rows(step, self.dtype))).backward()

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.backward(step)
        self.optimizer.step()

    def train(self, steps: Sequence[int]) -> Tensor:
        for step in steps:
            self.step(step)
        return weights(self.model)


def weights(model: nn.Module) -> Tensor:
    """All parameters as one vector; of shards, the whole parameters."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([parameter.detach().flatten() for parameter in whole])


def gradients(model: nn.Module) -> Tensor:
    """All gradients as one vector; of shards, the whole gradients."""
    found: list[Any] = [parameter.grad for parameter in model.parameters()]
    return torch.cat([gradient.full_tensor().flatten() for gradient in found])


def two_level_ddp(
    shards: int, spec: str, dtype: torch.dtype, groups: Any, steps: Sequence[int], **options: Any
) -> Tensor:
    """The weights after the same steps with DDP, and the groups of FSDP2's units."""
    model = wrap(mlp(dtype))
    handle = torchcomp.register(model, spec, nodes=shards, **options)
    handle.averager.regroup(groups)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model(rows(step, dtype))).backward()
        optimizer.step()
    return weights(copy.deepcopy(model.module))
