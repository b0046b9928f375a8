"""Several ranks: on one device over gloo, and each on a GPU of its own over NCCL.

NCCL refuses two ranks on one GPU. gloo runs every method and route there, with real messages of
several ranks.
"""

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
from tests.gpu.place import DEVICE, GPUS, KIND, NCCL, REHEARSAL, delayed, gpu, on_ranks
from tests.gpu.training import PLAIN, WIDTH, Run, model_of, trained
from tests.support.models import CONSERVING, METHODS, THROUGH_DDP, assert_conserved, loss_of, seeded
from tests.support.outcomes import assert_replicas_equal, caught, flat

ALL = THROUGH_DDP if REHEARSAL else METHODS
LIMIT = 20
"""Seconds after which a collective without one of its ranks ends with an error."""
several_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


def here() -> torch.device:
    """The device of this rank over NCCL: the last GPU for rank 0.

    The current device, which nothing sets, is then not the one of the model.
    """
    return gpu(dist.get_world_size() - 1 - dist.get_rank())


def every_method(specs: tuple[str, ...], shared: bool) -> dict[str, Any]:
    """Train with every method: while one stream lags behind, or the other, or none."""
    found = {}
    for spec in specs:
        place = DEVICE if shared else here()
        options = {"place": place, "dtype": torch.float64 if spec in CONSERVING else torch.float32}
        runs = [Run(spec, **options) for _ in range(3)]
        for run, stream in zip(runs, ("backward", "exchange", "none"), strict=True):
            with delayed(stream, run.model):
                for step in range(4):
                    run.account.step(run.model, (run.rows(step),), optimizer=run.optimizer)
            run.close()
        same = all(torch.equal(run.weights(), late.weights()) for late in runs[:2])
        found[spec] = run.weights(), same, run.account.close(run.handle)
    return found


@pytest.mark.parametrize(
    ("world_size", "backend", "shared"),
    [(2, "gloo", True), (4, "gloo", True), pytest.param(GPUS, NCCL, False, marks=several_gpus)],
)
def test_replicas_are_bit_equal_and_nothing_is_lost(
    world_size: int, backend: str, shared: bool
) -> None:
    specs = tuple(dict.fromkeys((*ALL, *CONSERVING)))
    outcomes = on_ranks(world_size, every_method, specs, shared, backend=backend)
    for spec in specs:
        weights, same, accounts = zip(*(outcome[spec] for outcome in outcomes), strict=True)
        assert_replicas_equal(list(weights))
        assert all(same), spec
        if spec in CONSERVING:
            assert_conserved(list(accounts))


# --- On one device --------------------------------------------------------------------------------


def on_nodes(specs: tuple[str, ...]) -> list[tuple[Tensor, Tensor]]:
    """The weights of nodes of two ranks, and those of a run whose exchange lags behind."""
    found = []
    for spec in specs:
        run, late = Run(spec, nodes=2).train(0, 3), Run(spec, nodes=2)
        with delayed("exchange", late.model):
            late.train(0, 3)
        found.append((run.weights(), late.weights()))
        run.close()
        late.close()
    return found


def test_replicas_of_nodes_are_bit_equal() -> None:
    for runs in zip(*on_ranks(4, on_nodes, ALL), strict=True):
        assert_replicas_equal([weights for pair in runs for weights in pair])


def nan_on_one_rank(specs: tuple[str, ...]) -> list[tuple[str, bool, Tensor]]:
    """Train through a step with a NaN on rank 1; return its error and what is left."""
    found = []
    for spec in specs:
        run = Run(spec).train(0, 2)
        state = run.residual()
        first = next(run.model.module.parameters())
        spoil = dist.get_rank() == 1
        hook = first.register_hook(lambda g, spoil=spoil: g.fill_(torch.nan) if spoil else g)
        error = caught(lambda run=run: run.backward(2))
        hook.remove()
        unchanged = torch.equal(run.residual(), state)
        run.train(3, 5).close()
        found.append((type(error).__name__, unchanged, run.weights()))
    return found


def test_a_nan_on_one_rank_raises_on_all() -> None:
    for outcomes in zip(*on_ranks(2, nan_on_one_rank, THROUGH_DDP[1:]), strict=True):
        errors, unchanged, weights = zip(*outcomes, strict=True)
        assert errors == (torchcomp.NonFiniteError.__name__,) * 2
        assert all(unchanged)
        assert weights[0].isfinite().all()
        assert_replicas_equal(list(weights))


def local_steps(stream: str, **options: Any) -> Tensor:
    """Return the weights after each round of three local steps."""
    run, found = Run(PLAIN), []
    sync = torchcomp.LocalSGD(run.model, run.optimizer, "every(3)", total_steps=9, **options)
    with delayed(stream, run.model):
        for step in range(9):
            run.train(step, step + 1)
            if step % 3 == 2:
                sync.wait()
                found.append(run.weights())
    sync.close()
    return torch.stack(found)


def local_steps_in_all_ways() -> list[Tensor]:
    plain = local_steps("none")
    overlapped = [local_steps(s, overlap=True) for s in ("none", "backward", "exchange")]
    compressed = local_steps("none", compress="ef(topk(0.1))")
    return [plain, *overlapped, compressed]


def test_local_steps_overlap_bit_for_bit() -> None:
    outcomes = on_ranks(2, local_steps_in_all_ways)
    for weights in zip(*outcomes, strict=True):
        assert_replicas_equal(list(weights))
    plain, *overlapped, compressed = outcomes[0]
    for found in overlapped:
        assert torch.equal(found, plain)
    assert not torch.equal(compressed, plain)


def jointspar() -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights of plain DDP, of budget 1 and of budget 0.5."""
    found = [trained(PLAIN)]
    for budget in (1.0, 0.5):
        run = Run(PLAIN)
        sampled = torchcomp.JointSpar(run.model, budget=budget)
        run.train(0, 6)
        sampled.close()
        found.append(run.weights())
    return found[0], found[1], found[2]


def test_jointspar_with_budget_one_is_plain_ddp() -> None:
    for weights in zip(*(outcomes := on_ranks(2, jointspar)), strict=True):
        assert_replicas_equal(list(weights))
    plain, whole, half = outcomes[0]
    assert torch.equal(whole, plain)
    assert not torch.equal(half, plain)


# --- On several GPUs ------------------------------------------------------------------------------


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


@several_gpus
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


@several_gpus
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


@several_gpus
def test_sync_batchnorm() -> None:
    """Its collectives run in the backward pass, while buckets are exchanged."""
    outcomes = on_ranks(GPUS, with_batchnorm, backend=NCCL)
    for spec in (PLAIN, "mean", "ef(topk(0.1))"):
        assert_replicas_equal([outcome[spec] for outcome in outcomes])
    torch.testing.assert_close(outcomes[0]["mean"], outcomes[0][PLAIN], rtol=1e-4, atol=1e-5)
