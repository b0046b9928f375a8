"""register_fsdp: install compressed gradient exchange between the replicas of an FSDP2 model."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from torchcomp.aggregators import Aggregator, planned_traffic
from torchcomp.aggregators.rehearsal import rehearse_all
from torchcomp.checkpoints.checkpoint import digest_of
from torchcomp.checkpoints.redistribution import Place
from torchcomp.ddp.buckets import Buckets
from torchcomp.ddp.loop import OptimizerLRs
from torchcomp.ddp.register import Options, log_method
from torchcomp.exchange import Exchange, PrivateExchange, ProcessGroupExchange, new_name
from torchcomp.fsdp.handle import FSDPHandle
from torchcomp.fsdp.units import Unit, all_parameters, units_of
from torchcomp.routes import wire
from torchcomp.specs.auto import Auto
from torchcomp.specs.component import Component
from torchcomp.specs.errors import SpecError, UnsupportedModelError
from torchcomp.specs.spec import parse_registered

_SAME_START = "All replicas must start with the same parameters: use one seed or checkpoint."


def register_fsdp(
    model: FSDPModule, spec: str | Component, replicate: DeviceMesh, options: Options
) -> FSDPHandle:
    """Install compressed exchange between the replicas; see :func:`torchcomp.register`."""
    module: Any = model
    units, shards, replicas = _levels(module, replicate)
    aggregator, lrs = replicas.build(
        "torchcomp.register",
        options.compared(spec),
        lambda: _check(units, spec, options, shards, replicas),
    )
    parameters = all_parameters(units)
    # DDP broadcasts the parameters of rank 0; FSDP2 does not know of replicas.
    local = {name: each.to_local() for name, each in parameters.items()}
    replicas.verify("torchcomp.register", {}, _SAME_START, {"parameters": digest_of(local)})
    everyone = _everyone(replicas)
    pieces = {name: p for unit in units for name, p in unit.like_pieces(shards.world_size).items()}
    make = options.averager_of(aggregator, replicas.device)
    averager = make(replicas, pieces, [unit.names for unit in units], merged=False)
    if options.guard:
        from torchcomp.guard import Replicas, watch

        watch(averager, options.guard, Replicas(local, shards.rank))
    place = Place(everyone.rank, replicas.rank, shards.rank, shards.world_size)
    # Of whole parameters: without memory.
    whole = {name: torch.empty(each.shape, device="meta") for name, each in parameters.items()}
    buckets = Buckets(averager, everyone, place, whole)
    handle = FSDPHandle(module, units, buckets, options.scaler, lrs)
    # On one rank only: the messages would be the same on all ranks.
    if everyone.rank == 0:
        shapes = [averager.shape_of(names) for names in averager.buckets]
        planned = planned_traffic(aggregator, shapes, replicas.world_size)
        log_method(buckets, planned, f"{replicas.world_size} replicas")
    return handle


def _everyone(replicas: ProcessGroupExchange) -> Exchange:
    # Among all ranks of both levels, in the order of their numbers.
    ranks = sorted(replicas.gather_all(dist.get_rank()))
    world = ProcessGroupExchange(None, replicas.device)
    if ranks == list(world.global_ranks):
        return world
    return PrivateExchange(new_name(replicas), ranks, replicas)


def _levels(
    model: nn.Module, replicate: object
) -> tuple[list[Unit], ProcessGroupExchange, ProcessGroupExchange]:
    """Return the units, and the exchanges among a replica's shards and a shard's replicas."""
    # Without both meshes, there are no ranks to verify anything with.
    if not isinstance(replicate, DeviceMesh) or replicate.ndim != 1:
        raise SpecError(
            f"replicate must be a DeviceMesh with one dimension, not {replicate!r}", "replicate"
        )
    if not hasattr(FSDPModule, "set_all_reduce_hook"):
        raise UnsupportedModelError(
            f"FSDP2 of torch {torch.__version__} has no all-reduce hook: use torch 2.7 or newer"
        )
    units = units_of(model)
    mesh = next(iter(units[0].parameters.values())).device_mesh
    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    shards = ProcessGroupExchange(mesh.get_group(), device)
    replicas = ProcessGroupExchange(replicate.get_group(), device)
    replicas.members = tuple(replicas.gather_objects(shards.global_ranks))
    Exchange.split(inside=shards, between=replicas)
    return units, shards, replicas


def _check(
    units: list[Unit], spec: str | Component, options: Options, shards: Exchange, replicas: Exchange
) -> tuple[tuple[Aggregator, OptimizerLRs | None], dict[str, Any]]:
    """Return what the arguments stand for, and what must match on all ranks."""
    if options.nodes is not None:
        raise SpecError("nodes is for DDP: in FSDP2, the shards of a replica are a node", "nodes")
    if options.inside is not None:
        raise SpecError("inside is for DDP: for FSDP2, pass reduce_dtype to fully_shard", "inside")
    shared = sorted(set(shards.global_ranks) & set(replicas.global_ranks))
    if shared != [dist.get_rank()]:
        problem = f"replicate shares {len(shared)} ranks with the shards of this replica, not one"
        raise SpecError(f"{problem}: pass the other dimension of the mesh", "replicate")
    options.require_valid()
    aggregator = parse_registered(spec)
    if isinstance(aggregator, Auto):
        raise SpecError("auto is for DDP: `torchcomp doctor` predicts which method is fast")
    FSDPHandle._check_method(aggregator)
    _check_free(units)
    trained = all_parameters(units)
    rehearse_all(aggregator, [each.to_local() for each in trained.values()])
    values = {
        "spec": aggregator,
        "parameters": [(unit.dtype, unit.names) for unit in units],
        "shapes": [(name, tuple(parameter.shape)) for name, parameter in trained.items()],
        "wire version": wire.VERSION,
    }
    return (aggregator, options.lrs(trained)), values


def _check_free(units: Iterable[Unit]) -> None:
    for unit in units:
        hook = unit.group._all_reduce_hook
        handle = getattr(getattr(hook, "func", None), "__self__", None)
        if isinstance(handle, FSDPHandle):
            if not handle.closed:
                problem = f"torchcomp.register('{handle.method}') is installed on this model"
                raise UnsupportedModelError(f"{problem}: change it with handle.swap(spec)")
        elif hook is not None:
            raise UnsupportedModelError("a module has another hook of set_all_reduce_hook")
        if any(parameter.offload_to_cpu for parameter in unit.group.fsdp_params):
            raise UnsupportedModelError("CPUOffloadPolicy is not supported: leave it out")
