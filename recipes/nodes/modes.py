"""Three ways to train one model on nodes with several ranks each, with the bytes that they send."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from recipes.small_gpt.model import SmallGPT

MODES = ("ddp", "two-level", "hsdp")
_DIMENSIONS = ("replicate", "shard")


@dataclass(frozen=True)
class Replica:
    """This rank's part of a model in training."""

    model: nn.Module  # what the training loop calls
    handle: torchcomp.Handle  # of the exchange
    node_size: int  # ranks per node
    flat_card_bytes: int | None = None
    sharding_bytes: int = 0  # bytes per step that this rank sends for FSDP2 itself

    @property
    def between(self) -> int:
        """Bytes that the ranks of a node sent to other nodes in the last step."""
        if self.flat_card_bytes is not None:
            return self.flat_card_bytes
        return self.node_size * self.handle.stats.bytes_sent

    @property
    def inside(self) -> int:
        """Bytes that the ranks of a node sent to each other in the last step."""
        sent = self.handle.stats
        if self.flat_card_bytes is not None:
            return self.node_size * sent.bytes_sent - self.flat_card_bytes
        return self.node_size * (sent.inside_bytes_sent + self.sharding_bytes)

    @property
    def residual(self) -> int:
        slots = self.handle.state_dict()["slots"].values()
        residuals = [slot["tensors"].values() for slot in slots if slot["kind"] == "debt"]
        return sum(tensor.nbytes for tensors in residuals for tensor in tensors)


def replicate(
    model: SmallGPT, mode: str, spec: str, node_size: int, device: torch.device
) -> Replica:
    """Replicate a model, or shard it inside the nodes, with a compressed exchange between them."""
    nodes = dist.get_world_size() // node_size
    if mode == "hsdp":
        mesh = init_device_mesh(device.type, (nodes, node_size), mesh_dim_names=_DIMENSIONS)
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"], reshard_after_forward=True)
        fully_shard(model, mesh=mesh["shard"], reshard_after_forward=False)
        handle = torchcomp.register(model, spec, replicate=mesh["replicate"])
        return Replica(model, handle, node_size, sharding_bytes=_sharding_bytes(model, node_size))
    ddp = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    if mode == "two-level":
        return Replica(ddp, torchcomp.register(ddp, spec, nodes=node_size), node_size)
    plan = torchcomp.explain(spec, model=ddp, world_size=dist.get_world_size(), nodes=node_size)
    card = 0 if plan.nodes is None else plan.nodes.flat_card_bytes
    return Replica(ddp, torchcomp.register(ddp, spec), node_size, flat_card_bytes=card)


def _sharding_bytes(model: SmallGPT, ranks: int) -> int:
    # Parameters are all-gathered for the forward pass, those of the blocks once more for the
    # backward pass. Gradients are reduce-scattered.
    blocks = sum(_padded_bytes(model.blocks.parameters(), ranks))
    everything = sum(_padded_bytes(model.parameters(), ranks))
    return (2 * everything + blocks) * (ranks - 1) // ranks


def _padded_bytes(parameters: Iterator[nn.Parameter], ranks: int) -> Iterator[int]:
    # FSDP2 cuts a parameter along its first dimension, into shards of equal size.
    for each in parameters:
        rows = -(-each.shape[0] // ranks) * ranks
        yield rows * each.shape[1:].numel() * each.element_size()
