"""Conservation: sum of applied means + mean residual = sum of the dense means."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.support.cases import some, thorough
from tests.support.models import (
    CONSERVING,
    Account,
    Batch,
    Branches,
    Checkpointed,
    OddSizes,
    Tied,
    assert_conserved,
    assert_residual,
    convolutions,
    gradients,
    images,
    kept,
    loss_of,
    mlp,
    residual_norm,
    rows,
    seeded,
    wrap,
)
from tests.support.ranks import on_processes, on_threads

TOPK = "ef(topk(0.1))"
Build = Callable[[], DistributedDataParallel]
Batches = Callable[[int], list[Batch]]


def one_batch(step: int) -> list[Batch]:
    return [(rows(step),)]


def train(build: Build, batches: Batches, spec: str, steps: int = 6, lr: float = 0.05) -> Account:
    """Train for some steps, and return this rank's account."""
    model = build()
    handle = torchcomp.register(model, spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    account = Account()
    for step in range(steps):
        account.step(model, *batches(step), optimizer=optimizer)
    handle.close()
    return account.close(handle)


def check(build: Build, batches: Batches = one_batch, *specs: str, world_size: int = 4) -> None:
    for spec in specs or (TOPK,):
        accounts = on_threads(world_size, train, build, batches, spec)
        assert_conserved(accounts)
        if "cast" not in spec:
            assert_residual(accounts)


@pytest.mark.parametrize("spec", CONSERVING)
@pytest.mark.parametrize("world_size", [4, *thorough([1, 3])])
def test_conserves_through_the_bucket_rebuild(spec: str, world_size: int) -> None:
    check(lambda: wrap(mlp()), one_batch, spec, world_size=world_size)


def test_conserves_over_gloo() -> None:
    for accounts in zip(*on_processes(3, _trained_over_gloo), strict=True):
        assert_conserved(list(accounts))


def _trained_over_gloo() -> list[Account]:
    accounts = [train(lambda: wrap(mlp()), one_batch, spec) for spec in CONSERVING]
    return [*accounts, train(branching, changing_branches, TOPK)]


def branching(**options: Any) -> DistributedDataParallel:
    return wrap(seeded(Branches().double()), find_unused_parameters=True, **options)


def test_conserves_under_no_sync_accumulation() -> None:
    check(lambda: wrap(mlp()), lambda step: [(rows(3 * step + i),) for i in range(1 + step % 3)])


NEWER = [
    option
    for option in (
        {"bucket_cap_mb_list": [0.0005, 0.001, 0.002]},
        {"batched_grad_copy": True},
        {"lazy_bucket_allocation": True},
    )
    if option.keys() <= signature(DistributedDataParallel).parameters.keys()
]
"""Options that DDP has in newer versions of torch only."""


@pytest.mark.parametrize(
    "options",
    [
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": None},
        {"find_unused_parameters": True},
        *NEWER,
    ],
    ids=lambda options: ",".join(options),
)
@pytest.mark.parametrize("spec", [*CONSERVING[:1], *thorough(CONSERVING[1:5])])
def test_conserves_under_ddp_option(spec: str, options: dict[str, object]) -> None:
    def accumulate(step: int) -> list[Batch]:
        # DDP refuses to begin a static graph under no_sync.
        return [(rows(step + i),) for i in range(2 if step else 1)]

    check(lambda: wrap(used_everywhere(options), **options), accumulate, spec)


def used_everywhere(options: dict[str, object]) -> nn.Module:
    """An mlp, with an unused parameter if DDP searches for one: it warns if it finds none."""
    if "find_unused_parameters" not in options:
        return mlp()
    module = mlp()
    module.register_parameter("unused", nn.Parameter(torch.ones(5, dtype=torch.float64)))
    return module


def changing_branches(step: int) -> list[Batch]:
    """A batch with branches that no rank, one rank or all ranks use, changing between steps."""
    rank = dist.get_rank()
    branches = [("left", "right"), ("left",), (), ("right",), (), ("left",)][step % 6]
    if step in (1, 7) and rank == 0:
        branches = ("left", "right")
    return [(rows(step), branches)]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
@pytest.mark.parametrize("spec", some(CONSERVING, of=4))
def test_conserves_where_parameters_are_unused(
    spec: str, gradient_as_bucket_view: bool, set_to_none: bool
) -> None:
    def body() -> Account:
        model = branching(gradient_as_bucket_view=gradient_as_bucket_view)
        handle = torchcomp.register(model, spec)
        account = Account()
        for step in range(12):
            account.step(model, *changing_branches(step), set_to_none=set_to_none)
        return account.close(handle)

    assert_conserved(on_threads(3, body))


def test_conserves_where_unused_parameters_are_accumulated_under_no_sync() -> None:
    def batches(step: int) -> list[Batch]:
        return [(rows(2 * step), ("left",)), (rows(2 * step + 1), ("right",) if step % 2 else ())]

    check(branching, batches)


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
def test_unused_parameter_keeps_a_gradient_that_was_not_cleared(
    gradient_as_bucket_view: bool,
) -> None:
    """Without zero_grad, DDP does not change the gradient of a parameter that no rank uses."""

    def body() -> None:
        model = branching(gradient_as_bucket_view=gradient_as_bucket_view)
        handle = torchcomp.register(model, TOPK)
        Account().step(model, (rows(0), ("left", "right")))
        grad, before = gradients(model), kept(handle.state_dict())
        loss_of(model(rows(1), ("right",))).backward()
        after = kept(handle.state_dict())
        torch.testing.assert_close(gradients(model)["left.weight"], grad["left.weight"])
        torch.testing.assert_close(after["left.weight"], before["left.weight"])

    on_threads(3, body)


def test_conserves_shared_parameters() -> None:
    check(lambda: wrap(seeded(Tied().double())), one_batch, *CONSERVING[:5])


def test_conserves_channels_last_weights() -> None:
    check(lambda: wrap(convolutions()), lambda step: [(images(step),)], *CONSERVING[:5])


def test_conserves_parameters_of_no_and_of_one_element() -> None:
    check(lambda: wrap(seeded(OddSizes().double())), one_batch, *CONSERVING[:5])


@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=["default", "static_graph"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_conserves_under_activation_checkpointing(
    use_reentrant: bool, options: dict[str, bool]
) -> None:
    check(lambda: wrap(seeded(Checkpointed(use_reentrant).double()), **options))


def test_conserves_frozen_and_ignored_parameters() -> None:
    def build() -> DistributedDataParallel:
        module = mlp()
        module[2].weight.requires_grad_(False)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["4.bias"])
        return wrap(module)

    def body() -> Account:
        account = train(build, one_batch, TOPK, lr=0.0)
        # DDP does not average the ignored parameter.
        for sums in (account.dense, account.applied):
            del sums["4.bias"]
        return account

    assert_conserved(on_threads(3, body))


@pytest.mark.parametrize(
    ("dtype", "specs"), [(torch.float32, CONSERVING), (torch.bfloat16, CONSERVING[:1])]
)
def test_conserves_to_the_rounding_of_a_float32_residual(
    dtype: torch.dtype, specs: tuple[str, ...]
) -> None:
    for spec in specs:
        accounts = on_threads(
            3, train, lambda: wrap(mlp(dtype)), lambda step: [(rows(step, dtype),)], spec
        )
        assert_conserved(accounts, tolerance=2e-6)


def test_swap_flushes_the_residual_of_unused_parameters_when_they_are_used() -> None:
    def body() -> Account:
        model = branching()
        handle = torchcomp.register(model, TOPK)
        account = Account()
        for branches in (("left", "right"), ("left",), ("right",)):
            account.step(model, (rows(1), branches))
        handle.swap("mean")
        account.step(model, (rows(2), ("left",)))
        norms = handle.residual_norms()
        assert norms["left.weight"] == norms["stem.weight"] == 0 < norms["right.weight"]
        account.step(model, (rows(3), ("right",)))
        assert residual_norm(handle) == 0
        return account.close(handle)

    assert_conserved(on_threads(3, body))
