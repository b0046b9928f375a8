"""register: install compressed gradient exchange on a model."""

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from torchcomp.ddp.handle import Handle
from torchcomp.ddp.loop import Optimizers
from torchcomp.ddp.register import Options, register_ddp
from torchcomp.fsdp.register import register_fsdp
from torchcomp.specs.component import Component

if TYPE_CHECKING:
    from torchcomp.guard import Guard


def register(
    model: DistributedDataParallel | FSDPModule,
    spec: str | Component,
    *,
    seed: int = 0,
    scaler: "torch.amp.GradScaler | None" = None,
    check: str = "auto",
    lr_inside: Optimizers | None = None,
    nodes: str | int | DeviceMesh | None = None,
    inside: str | None = None,
    replicate: DeviceMesh | None = None,
    manager: Any = None,
    guard: "Guard | bool" = False,
    checksum: bool = False,
) -> Handle:
    """Replace the gradient all-reduce of a DDP model with a compressed exchange.

    Call this on every rank with the same arguments, after ``DistributedDataParallel(...)`` and
    before the first backward pass. The training loop does not change, and ``no_sync`` works
    unchanged. For a model of ``fully_shard``, this compresses the exchange between replicas.

    Args:
        model: a DDP model on CPU (gloo) or CUDA (NCCL) with floating-point parameters, or the root
            module of FSDP2, sharded by ``fully_shard(module, mesh=mesh["shard"])``.
        spec: the method, such as ``"ef(topk(0.01))"``; see :func:`torchcomp.parse`. ``"auto"``, or
            a :class:`torchcomp.Auto`, times several in the first steps (DDP only).
        seed: seed of all random choices of the method, an integer of at least 0.
        scaler: the ``GradScaler`` of the training loop, if it has one. The residual then follows
            the loss scale, and does not change in steps that the scaler skips. Without a scaler, a
            NaN or infinity in a gradient raises an error.
        check: when a step with a NaN, an infinity or a damaged message raises. "now": at the end
            of its backward pass, and nothing has changed. "late": in the next backward pass, swap,
            ``state_dict()`` or ``close()``, so that the host does not wait for the device. The
            device then replaces the gradients of such a step: by zeros, or with a scaler by
            infinity, so that the scaler skips it. "auto": "late" on an accelerator, "now" on the
            CPU, with a manager and with ``find_unused_parameters=True``.
        lr_inside: the optimizer of the training loop, or a list of all that train the model. The
            residual is then in the unit of the update, the learning rate times the gradient: what
            is sent late is applied at the learning rate of the step that it comes from. By default,
            it is applied at that of the step that sends it. Meant for SGD without momentum.
            docs/usage.md has the details.
        nodes: which ranks share a network card, to exchange in two levels. The ranks of a node
            average their gradients uncompressed; the method then runs between the nodes, and each
            rank keeps the residual of its share of the model. Pass how many ranks a node has,
            "auto" to read that from torchrun, or a DeviceMesh with two dimensions, nodes and their
            ranks. By default, all ranks exchange with all others.
        inside: "bf16" halves the bytes inside a node: gradients and means are then rounded to
            bfloat16 there.
        replicate: for FSDP2, the mesh dimension of the replicas, such as ``mesh["replicate"]`` of
            ``mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))``.
            The method then runs between replicas, and each rank keeps the residual of its shard.
        manager: the ``torchft.Manager`` of the training loop, to go on without a restart when a
            rank dies, joins or leaves. The exchange is then among the ranks of its quorum, and the
            model is ``DistributedDataParallel(net, process_group=ProcessGroupDummy(0, 1))``
            of torch.nn.parallel. docs/elastic.md has the details.
        guard: True, or a :class:`torchcomp.Guard`, compares the applied mean with the dense mean
            and the replicas with each other every 50 steps, and logs a warning if something is
            wrong. docs/guard.md has the details.
        checksum: whether every compressed message carries a checksum of its bytes. By default, a
            message is checked for its version, length and layout, and its bytes only by the
            transport. docs/wire.md says what each finds.

    Returns:
        A handle for statistics, checkpoints and changes of the method.

    Raises:
        SpecError: on every rank, if an argument is invalid, or if a parameter of the model is in no
            optimizer of `lr_inside` or in several.
        UnsupportedModelError: if the model is neither DDP nor FSDP2, has a hook, uses an option of
            DDP that bypasses hooks, has complex parameters, sparse gradients or parameters on
            several devices, or has trained already; or if FSDP2 shards only a part of it.
        RankMismatchError: if specs, seeds or models differ between ranks, or only some ranks fail.
    """
    options = Options(
        seed, scaler, check, lr_inside, nodes, inside, replicate, manager, guard, checksum
    )
    # What does not fit together is refused there, on all ranks together.
    if isinstance(model, FSDPModule) and replicate is not None:
        return register_fsdp(model, spec, replicate, options)
    ddp: Any = model
    return register_ddp(ddp, spec, options)
