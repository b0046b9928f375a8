"""Unit: the parameters that one call of fully_shard manages, and that FSDP2 reduces together.

Every private name of FSDP2 is used in this file.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from torchcomp.checkpoints.pieces import Pieces
from torchcomp.ddp.checks import check_real, trained
from torchcomp.engine.bucket import BucketShape
from torchcomp.specs.errors import UnsupportedModelError

_HOW = 'fully_shard(module, mesh=mesh["shard"]); register(..., replicate=mesh["replicate"])'


@dataclass(frozen=True)
class Unit:
    """The trained parameters of one FSDP2 module, without those of FSDP2 modules inside it."""

    module: FSDPModule
    group: Any  # FSDP2's own object
    parameters: dict[str, DTensor]  # in the order in which FSDP2 reduces them
    dtype: torch.dtype  # in which FSDP2 reduces the gradients

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.parameters)

    def like_pieces(self, ranks: int) -> dict[str, Tensor]:
        """Return tensors with the shape, dtype and device of this rank's shards."""
        shapes = tuple(tuple(parameter.shape) for parameter in self.parameters.values())
        found = {}
        # FSDP2 pads the shards to equal sizes.
        for chunk in Pieces(BucketShape(self.names, shapes, self.dtype), ranks).chunks:
            local = self.parameters[chunk.name].to_local().detach()
            memory = local.untyped_storage()
            if prod(chunk.shape) * self.dtype.itemsize > memory.nbytes():
                like = local.new_empty(chunk.shape, dtype=self.dtype)
            else:
                # In the memory of the parameter: the values have no meaning.
                like = local.new_empty(0, dtype=self.dtype)
                like.set_(memory, 0, chunk.shape, chunk.stride)
            found[chunk.name] = like
        return found

    @property
    def awaits_end(self) -> bool:
        """Whether FSDP2 awaits the end of a backward pass: for ever, after one that raised."""
        state: Any = self.module._get_fsdp_state()
        return bool(state._state_ctx.post_backward_final_callback_queued)

    def divisor(self, ranks: int) -> float:
        """Return by what FSDP2 divides a gradient after the hook."""
        factor = float(self.group.gradient_divide_factor or ranks)
        # Of 16-bit and 64-bit gradients, in two parts, one of them after the hook.
        if self.dtype not in (torch.float32, torch.bfloat16):
            before = 1.0
            while factor % before == 0 and factor / before > before:
                before *= 2
            return factor / before
        # An option of newer versions: all of the division after the hook.
        return factor if getattr(self.group, "force_sum_reduction_for_comms", False) else 1.0


def all_parameters(units: Iterable[Unit]) -> dict[str, DTensor]:
    """Return the parameters of all units, by name."""
    return {name: each for unit in units for name, each in unit.parameters.items()}


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of a model, in the order of its modules, or raise UnsupportedModelError."""
    names = {id(parameter): name for name, parameter in trained(model)}
    units, seen = [], set()
    modules: Iterable[Any] = (each for each in model.modules() if isinstance(each, FSDPModule))
    for module in modules:
        group = module._get_fsdp_state()._fsdp_param_group
        # fully_shard([a, b]) makes one group of two modules.
        if group is None or id(group) in seen:
            continue
        seen.add(id(group))
        own = {name: each for each in group.fsdp_params if (name := _name(each, names))}
        if own:
            parameters = {name: each.sharded_param for name, each in own.items()}
            units.append(Unit(module, group, parameters, _reduce_dtype(group, own.values())))
    _check(model, all_parameters(units))
    return units


def _reduce_dtype(group: Any, trained: Iterable[Any]) -> torch.dtype:
    dtypes = [each.sharded_param.dtype for each in trained]
    one_policy: MixedPrecisionPolicy | None = getattr(group, "mp_policy", None)
    if one_policy is not None:
        return one_policy.reduce_dtype or one_policy.param_dtype or dtypes[0]
    # Since torch 2.15, each parameter has its own policy, and param_dtype does not decide.
    policies: list[MixedPrecisionPolicy] = [each.mp_policy for each in trained]
    found = [policy.reduce_dtype or dtype for policy, dtype in zip(policies, dtypes, strict=True)]
    return functools.reduce(torch.promote_types, found)


def _name(parameter: Any, names: dict[int, str]) -> str | None:
    # While a unit is gathered (the root also after an evaluation), its modules have others.
    gathered = getattr(parameter, "unsharded_param", None)
    return names.get(id(parameter.sharded_param)) or names.get(id(gathered))


def _check(model: nn.Module, managed: dict[str, DTensor]) -> None:
    for name, _ in trained(model):
        parameter = managed.get(name)
        if parameter is None:
            problem = "is not sharded: call fully_shard on the root module as well"
        elif parameter.device_mesh.ndim > 1:
            problem = f"is on a mesh of several dimensions. Shard over one: {_HOW}"
        elif parameter.placements != (Shard(0),):
            problem = "is not sharded along its first dimension: leave out shard_placement_fn"
        elif parameter.is_meta:
            problem = "is on the meta device: call model.to_empty(device=...) and initialise it"
        else:
            check_real(name, parameter)
            continue
        raise UnsupportedModelError(f"parameter '{name}' {problem}, before torchcomp.register")
    meshes = {parameter.device_mesh for parameter in managed.values()}
    if len(meshes) != 1:
        raise UnsupportedModelError(f"the parameters are on {len(meshes)} meshes, not one. {_HOW}")
