"""Several GPUs over NCCL: every method, a killed rank, and SyncBatchNorm."""

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import torchcomp
from tests.gpu.place import GPUS, KIND, NCCL, REHEARSAL, delayed, gpu, on_ranks
from tests.gpu.training import PLAIN, WIDTH, Run, model_of
from tests.support.models import CONSERVING, METHODS, THROUGH_DDP, assert_conserved, loss_of, seeded
from tests.support.outcomes import assert_replicas_equal, flat

pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")

ALL = THROUGH_DDP if REHEARSAL else METHODS
LIMIT = 20
"""Seconds after which a collective without one of its ranks ends with an error."""


def here() -> torch.device:
    """The device of this rank: the last GPU for rank 0.

    The current device, which nothing sets, is then not the one of the model.
    """
    return gpu(dist.get_world_size() - 1 - dist.get_rank())


def every_method(specs: tuple[str, ...]) -> dict[str, Any]:
    """Train with every method, twice: the second time, the exchange lags behind."""
    found = {}
    for spec in specs:
        options = {
            "place": here(),
            "dtype": torch.float64 if spec in CONSERVING else torch.float32,
        }
        run, late = Run(spec, **options), Run(spec, **options)
        for step in range(4):
            run.account.step(run.model, (run.rows(step),), optimizer=run.optimizer)
        with delayed("exchange", late.model):
            for step in range(4):
                late.account.step(late.model, (late.rows(step),), optimizer=late.optimizer)
        run.close()
        late.close()
        same = torch.equal(run.weights(), late.weights())
        found[spec] = run.weights(), same, run.account.close(run.handle)
    return found


def test_replicas_are_bit_equal_and_nothing_is_lost() -> None:
    specs = tuple(dict.fromkeys((*ALL, *CONSERVING)))
    outcomes = on_ranks(GPUS, every_method, specs, backend=NCCL)
    for spec in specs:
        weights, same, accounts = zip(*(outcome[spec] for outcome in outcomes), strict=True)
        assert_replicas_equal(list(weights))
        assert all(same), spec
        if spec in CONSERVING:
            assert_conserved(list(accounts))


def on_two_levels(spec: str) -> tuple[Tensor, Tensor]:
    """The weights of nodes over DDP, and of the same ranks over FSDP2: its shards are a node."""
    node = GPUS // 2 if GPUS % 2 == 0 else 1
    # A mesh takes the current device.
    place = gpu(dist.get_rank())
    if not REHEARSAL:
        torch.cuda.set_device(place)
    run, model = Run(spec, place=place, nodes=node), model_of().to(place)
    # Groups differ, so the model is one group.
    run.handle.averager.regroup([tuple(name for name, _ in model.named_parameters())])
    mesh = init_device_mesh(KIND, (GPUS // node, node), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    torchcomp.register(model, spec, replicate=mesh["replicate"], seed=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        (loss_of(model(run.rows(step))) / WIDTH).backward()
        optimizer.step()
    whole = [parameter.full_tensor() for parameter in model.parameters()]
    return run.train(0, 4).weights(), flat(whole).cpu()


@pytest.mark.skipif(not hasattr(FSDPModule, "set_all_reduce_hook"), reason="needs torch 2.7")
@pytest.mark.parametrize("spec", ["mean", "ef(topk(0.1))", "bidirectional(topk(0.1), topk(0.1))"])
def test_fsdp2_equals_two_levels_of_ddp(spec: str) -> None:
    outcomes = on_ranks(GPUS, on_two_levels, spec, backend=NCCL)
    for ddp, sharded in outcomes:
        # The devices may add in another order.
        torch.testing.assert_close(sharded, ddp, rtol=1e-4, atol=1e-6)
    assert_replicas_equal([ddp for ddp, _ in outcomes])
    assert_replicas_equal([sharded for _, sharded in outcomes])


def rank_one_dies() -> None:
    """Train until rank 1 is killed. The others end with exit code 3, or NCCL ends them."""
    group = dist.new_group(timeout=timedelta(seconds=LIMIT))
    run = Run("ef(topk(0.1))", place=here(), process_group=group).train(0, 2)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        run.train(2, 10).weights()
    except Exception:
        # Not through the end of the process: its barrier would wait for the dead rank.
        os._exit(3)


def test_the_others_of_a_killed_rank_end(monkeypatch: pytest.MonkeyPatch) -> None:
    # After a timeout, NCCL's watchdog sleeps four times as long before it ends the process: a
    # minute by default. The ranks inherit this.
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "500")
    outcomes = on_ranks(GPUS, rank_one_dies, backend=NCCL, catch=True)
    assert all(isinstance(outcome, RuntimeError) for outcome in outcomes), outcomes


def normalised() -> nn.Module:
    """A network whose statistics come from the batches of all ranks."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4))
    # SyncBatchNorm refuses tensors of the CPU.
    return seeded(layers if REHEARSAL else nn.SyncBatchNorm.convert_sync_batchnorm(layers))


def with_batchnorm() -> dict[str, Tensor]:
    found = {}
    for spec in (PLAIN, "mean", "ef(topk(0.1))"):
        run = Run(spec, place=here(), module=normalised())
        with delayed("exchange", run.model):
            run.train(0, 6)
        run.close()
        found[spec] = run.weights()
    return found


def test_sync_batchnorm() -> None:
    """Its collectives run in the backward pass, while buckets are exchanged."""
    outcomes = on_ranks(GPUS, with_batchnorm, backend=NCCL)
    for spec in (PLAIN, "mean", "ef(topk(0.1))"):
        assert_replicas_equal([outcome[spec] for outcome in outcomes])
    torch.testing.assert_close(outcomes[0]["mean"], outcomes[0][PLAIN], rtol=1e-4, atol=1e-5)
