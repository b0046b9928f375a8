"""Runs of one small model: FSDP2 with replicas, and DDP with two levels, over the same ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import torchcomp
from tests.ddp.runs import Run as DDPRun
from tests.support.models import loss_of, mlp, rows

NAMES = ("replicate", "shard")
NEEDS_HOOK = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_all_reduce_hook"),
    reason="FSDP2 has an all-reduce hook since torch 2.7",
)


def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=NAMES)


def shard(module: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    """Shard every layer with parameters, and the root."""
    for layer in module.children():
        if list(layer.parameters()) and not isinstance(layer, FSDPModule):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


class Run:
    """A model of fully_shard; `shape` is the number of replicas and of shards.

    `options` are those of register, `sharding` those of fully_shard.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        spec: str,
        dtype: torch.dtype = torch.float64,
        *,
        options: dict[str, Any] | None = None,
        sharding: dict[str, Any] | None = None,
        build: Callable[[torch.dtype], nn.Module] = mlp,
    ) -> None:
        self.dtype, self.mesh = dtype, mesh_of(*shape)
        self.model = shard(build(dtype), self.mesh["shard"], **(sharding or {}))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        replicate = self.mesh["replicate"]
        self.handle = torchcomp.register(self.model, spec, replicate=replicate, **(options or {}))

    def backward(self, step: int, times: float = 1.0) -> None:
        loss_of(self.model(rows(step, self.dtype) * times)).backward()

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
    shards: int, spec: str, dtype: torch.dtype, groups: Any, steps: Sequence[int]
) -> Tensor:
    """The weights after the same steps with DDP, and the groups of FSDP2's units."""
    run = DDPRun(spec, dtype=dtype, nodes=shards)
    run.handle.averager.regroup(groups)
    return weights(run.train(*steps).model.module)
