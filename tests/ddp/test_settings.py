"""Realistic settings: subgroups, several models, several dtypes, compiled modules."""

import shutil
import warnings
from inspect import signature

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.support.models import (
    CONSERVING,
    Account,
    assert_conserved,
    assert_residual,
    kept,
    loss_of,
    mlp,
    rows,
    seeded,
    weights,
    wrap,
)
from tests.support.outcomes import assert_replicas_equal
from tests.support.ranks import on_processes, on_threads

TOPK = "ef(topk(0.1))"


def on_subgroups() -> tuple[Account, Tensor]:
    """Ranks 0 and 2 train one model, ranks 1 and 3 another."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = wrap(mlp(), process_group=halves[dist.get_rank() % 2])
    handle = torchcomp.register(model, TOPK)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    account = Account()
    # The groups train for different numbers of steps.
    for step in range(4 + dist.get_rank() % 2):
        account.step(model, (rows(step),), optimizer=optimizer)
    state = handle.state_dict()
    assert (state["rank"], state["world_size"]) == (dist.get_rank() // 2, 2)
    handle.close()
    return account.close(handle), weights(model.module)


@pytest.mark.parametrize("run", [on_threads, on_processes])
def test_ddp_over_subgroups_conserves_in_each(run) -> None:
    outcomes = run(4, on_subgroups)
    for half in (outcomes[::2], outcomes[1::2]):
        accounts, trained = zip(*half, strict=True)
        assert_conserved(list(accounts))
        assert_residual(list(accounts))
        assert_replicas_equal(list(trained))
    assert not torch.equal(outcomes[0][1], outcomes[1][1])


@pytest.mark.skipif(
    "bucket_cap_mb_list" not in signature(DistributedDataParallel).parameters,
    reason="this torch has no such option",
)
def test_groups_have_the_sizes_of_bucket_cap_mb_list() -> None:
    def body() -> tuple[int, ...]:
        model = wrap(mlp(), bucket_cap_mb_list=[500 / 2**20, 2000 / 2**20])
        parameters = dict(model.module.named_parameters())
        groups = torchcomp.register(model, TOPK).averager.groups
        return tuple(sum(parameters[name].nbytes for name in group) for group in groups)

    # Layers of 544, 2176, 2176 and 2176 bytes, of which each fills a group.
    assert on_threads(2, body) == [(544, 2176, 2176, 2176)] * 2


def two_models() -> list[Account]:
    """Train two models, each with its own handle, with one backward pass through both."""
    models = [wrap(mlp()), wrap(seeded(mlp(), seed=1))]
    handles = [
        torchcomp.register(model, spec) for model, spec in zip(models, CONSERVING[:2], strict=True)
    ]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.02)
    accounts = [Account(), Account()]
    for step in range(5):
        optimizer.zero_grad()
        (loss_of(models[0](rows(step))) + loss_of(models[1](rows(step)))).backward()
        for account, model in zip(accounts, models, strict=True):
            account.note(model, (rows(step),))
        optimizer.step()
    for handle in handles:
        handle.close()
    return [account.close(handle) for account, handle in zip(accounts, handles, strict=True)]


@pytest.mark.parametrize("run", [on_threads, on_processes])
def test_two_models_in_one_backward_pass_conserve_each(run) -> None:
    for accounts in zip(*run(3, two_models), strict=True):
        assert_conserved(list(accounts))
        assert_residual(list(accounts))


class Mixed(nn.Module):
    """Layers in float64, float32 and bfloat16, interleaved."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = [torch.float64, torch.float32, torch.bfloat16] * 2
        self.layers = nn.ModuleList(nn.Linear(16, 16).to(dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.double()


@pytest.mark.parametrize("spec", CONSERVING)
def test_model_of_several_dtypes_conserves_to_the_rounding_of_float32(spec: str) -> None:
    # An all-reduce in bfloat16 rounds, and no residual records that error.
    gathered = spec.replace("randk(0.1)", 'randk(0.1), exchange="gather"')

    def body() -> Account:
        model = wrap(seeded(Mixed()))
        handle = torchcomp.register(model, gathered)
        account = Account()
        for step in range(4):
            account.step(model, (rows(step),))
        dtypes = {name: error.dtype for name, error in kept(handle.state_dict()).items()}
        assert dtypes["layers.0.weight"] == torch.float64
        assert dtypes["layers.1.weight"] == dtypes["layers.2.weight"] == torch.float32
        plan = torchcomp.explain(gathered, model=model, world_size=3, rank=dist.get_rank())
        # For an exact selection, the plan assumes an even spread over the shards.
        exact = getattr(handle.method, "selection", "shard") == "exact"
        assert handle.stats.bytes_sent == pytest.approx(plan.bytes_sent, rel=0.2 if exact else 0)
        return account.close(handle)

    assert_conserved(on_threads(3, body), tolerance=2e-6)


def compiled(backend: str) -> tuple[Account, list[str]]:
    module = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile's own
        # The compiler splits the graph at buckets, and asserts that they are at least 1 MiB.
        model = wrap(torch.compile(module, backend=backend), bucket_cap_mb=None)
        handle = torchcomp.register(model, TOPK)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        account = Account()
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model(rows(step))).backward()
            account.note(module, (rows(step),))
            optimizer.step()
    names = list(kept(handle.state_dict()))
    handle.close()
    return account.close(handle), names


needs_cpp = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[needs_cpp, pytest.mark.thorough])]
)
def test_compiled_module_conserves_under_its_own_names(backend: str) -> None:
    accounts, names = zip(*on_processes(2, compiled, backend), strict=True)
    assert set(names[0]) == {name for name, _ in mlp().named_parameters()}
    assert_conserved(list(accounts), tolerance=1e-10)
    assert_residual(list(accounts))


def averaged() -> Tensor:
    model = wrap(mlp())
    handle = torchcomp.register(model, TOPK)
    average = torch.optim.swa_utils.AveragedModel(model)
    for step in range(3):
        loss_of(model(rows(step))).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.01 * parameter.grad)
        model.zero_grad()
        average.update_parameters(model)
    assert handle.stats.steps == 3
    with torch.no_grad():
        return average(rows(0))


def test_weights_of_a_registered_model_can_be_averaged_in_a_copy() -> None:
    first, second = on_processes(2, averaged)
    assert first.shape == second.shape == (4, 4)
