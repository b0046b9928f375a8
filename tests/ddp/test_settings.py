"""Settings of DDP and of models: as plain DDP where all is sent, and nothing is lost elsewhere."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from inspect import signature
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.ddp.runs import TOPK
from tests.support.cases import soak, thorough
from tests.support.models import (
    CONSERVING,
    Account,
    Batch,
    Branches,
    Checkpointed,
    OddSizes,
    assert_conserved,
    assert_residual,
    gradients,
    images,
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

# What torch says of static_graph together with find_unused_parameters.
pytestmark = pytest.mark.filterwarnings("ignore:You passed find_unused_parameters")
OPTIONS = signature(DistributedDataParallel).parameters
PLAIN = ""

# --- Every two settings together ------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    static_graph: bool = False
    find_unused: bool = False
    bucket_view: bool = False
    accumulated: bool = False
    channels_last: bool = False
    tied: bool = False
    frozen: bool = False
    autocast: bool = False

    def __str__(self) -> str:
        return "-".join(each.name for each in fields(self) if getattr(self, each.name)) or "plain"

    def wrap(self) -> DistributedDataParallel:
        return wrap(
            Small(self),
            static_graph=self.static_graph,
            find_unused_parameters=self.find_unused,
            gradient_as_bucket_view=self.bucket_view,
        )

    def batches(self, step: int) -> list[Batch]:
        # With static_graph, plain DDP fails if no_sync is used in the first step.
        micro = 2 if self.accumulated and step else 1
        return [(images(10 * step + part), step) for part in range(micro)]


class Small(nn.Module):
    """A convolution, two linear layers that can share their weight, and one that can be unused."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 3)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.mixed, self.last, self.rare = nn.Linear(48, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        seeded(self.double())
        if settings.tied:
            self.second.weight = self.first.weight
        if settings.frozen:
            self.mixed.requires_grad_(False)
        if settings.channels_last:
            self.to(memory_format=torch.channels_last)
        self.may_be_unused = settings.find_unused and not settings.static_graph

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = torch.tanh(self.mixed(self.convolution(x).flatten(1)))
        x = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
        unused = self.may_be_unused and step % 2
        return x if unused else x + self.rare(torch.zeros(16, dtype=x.dtype) + 0.1)


def trained(settings: Settings, spec: str, nodes: int | None) -> Tensor:
    model = settings.wrap()
    handle = torchcomp.register(model, spec, nodes=nodes) if spec else None
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(wanted, lr=0.05, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        batches = settings.batches(step)
        for part, batch in enumerate(batches):
            with nullcontext() if part == len(batches) - 1 else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=settings.autocast):
                    loss = loss_of(model(*batch))
                loss.backward()
        optimizer.step()
    if handle is not None:
        handle.close()
    return weights(model.module)


def check(settings: Settings, ranks: int, run: Any = on_threads, nodes: Any = None) -> None:
    plain, mean, sparse = (
        run(ranks, trained, settings, spec, nodes) for spec in (PLAIN, "mean", "ef(topk(1.0))")
    )
    assert nodes or torch.equal(mean[0], plain[0])
    for found in (mean, sparse):
        # Up to two summands have one order of addition, so even the bits are equal.
        assert torch.equal(found[0], plain[0]) or ranks > 2
        torch.testing.assert_close(found[0], plain[0], rtol=0, atol=1e-12)
        assert_replicas_equal(found)


ALL = [Settings(*flags) for flags in product((False, True), repeat=len(fields(Settings)))]


def covering(cases: list[Settings]) -> list[Settings]:
    """Return a few of the cases that have every two settings in all four combinations."""

    def pairs(case: Settings) -> set[tuple[int, int, bool, bool]]:
        flags = [getattr(case, each.name) for each in fields(case)]
        return {(i, j, flags[i], flags[j]) for j in range(len(flags)) for i in range(j)}

    missing, chosen = set().union(*map(pairs, cases)), []
    while missing:
        chosen.append(max(cases, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


NOW = covering(ALL)


@pytest.mark.parametrize("settings", NOW, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, *soak([1, 4, 5])])
def test_weights_are_those_of_plain_ddp(settings: Settings, ranks: int) -> None:
    check(settings, ranks)


@pytest.mark.parametrize("settings", [each for each in NOW if not each.autocast], ids=str)
def test_weights_with_nodes_are_those_of_plain_ddp(settings: Settings) -> None:
    check(settings, 4, nodes=2)


@pytest.mark.parametrize("settings", [NOW[0], *soak(NOW[1:])], ids=str)
def test_weights_over_gloo_are_those_of_plain_ddp(settings: Settings) -> None:
    check(settings, 3, on_processes)


# --- Conservation ---------------------------------------------------------------------------------

Build = Callable[[], DistributedDataParallel]
Batches = Callable[[int], list[Batch]]


def one_batch(step: int) -> list[Batch]:
    return [(rows(step),)]


class Case(NamedTuple):
    """What is trained: a model, its batches, methods, and the tolerance of conservation."""

    build: Build
    batches: Batches = one_batch
    specs: Sequence[str] = (TOPK,)
    tolerance: float = 1e-12
    set_to_none: bool = True


def train(case: Case, spec: str = TOPK, steps: int = 6) -> Account:
    """Train for some steps, and return this rank's account of what DDP averages."""
    model, account = case.build(), Account()
    handle = torchcomp.register(model, spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        batches = case.batches(step)
        account.step(model, *batches, optimizer=optimizer, set_to_none=case.set_to_none)
    for sums in (account.dense, account.applied):
        for name in sums.keys() - handle.averager.parameters.keys():
            del sums[name]
    handle.close()
    return account.close(handle)


def conserves(case: Case, ranks: int = 4) -> None:
    for spec in case.specs:
        accounts = on_threads(ranks, train, case, spec)
        assert_conserved(accounts, case.tolerance)
        if "cast" not in spec:
            assert_residual(accounts)


@pytest.mark.parametrize("settings", [s for s in NOW if not s.autocast], ids=str)
@pytest.mark.parametrize("spec", [*CONSERVING[:1], *thorough(CONSERVING[1:5])])
def test_conserves_in_every_setting(spec: str, settings: Settings) -> None:
    conserves(Case(settings.wrap, settings.batches, [spec]), ranks=3)


def branching(**options: Any) -> DistributedDataParallel:
    return wrap(seeded(Branches().double()), find_unused_parameters=True, **options)


def changing_branches(step: int) -> list[Batch]:
    """A batch with branches that no rank, one rank or all ranks use, changing between steps."""
    branches = [("left", "right"), ("left",), (), ("right",), (), ("left",)][step % 6]
    if step in (1, 7) and dist.get_rank() == 0:
        branches = ("left", "right")
    return [(rows(step), branches)]


def in_one_no_sync(step: int) -> list[Batch]:
    return [(rows(2 * step), ("left",)), (rows(2 * step + 1), ("right",) if step % 2 else ())]


def ignoring() -> DistributedDataParallel:
    module = mlp()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["4.bias"])
    return wrap(module)


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


def checkpointed(reentrant: bool, **options: Any) -> DistributedDataParallel:
    return wrap(seeded(Checkpointed(reentrant).double()), **options)


def of(dtype: torch.dtype, *specs: str) -> Case:
    # A 16-bit gradient has a float32 residual.
    return Case(lambda: wrap(mlp(dtype)), lambda step: [(rows(step, dtype),)], specs, 2e-6)


NEWER = {"bucket_cap_mb_list": [0.0005, 0.001, 0.002]}
NEWER |= {"batched_grad_copy": True, "lazy_bucket_allocation": True}
# An all-reduce in bfloat16 rounds, and no residual records that error.
GATHERED = [spec.replace("randk(0.1)", 'randk(0.1), exchange="gather"') for spec in CONSERVING]
SOME, VIEW = CONSERVING[::4], {"gradient_as_bucket_view": True}
MODELS: dict[str, Case] = {
    "several micro-batches": Case(
        lambda: wrap(mlp()), lambda step: [(rows(3 * step + i),) for i in range(1 + step % 3)]
    ),
    "unused": Case(branching, changing_branches, SOME),
    "unused views": Case(partial(branching, **VIEW), changing_branches, SOME),
    "unused zeros": Case(branching, changing_branches, SOME, set_to_none=False),
    "unused views of zeros": Case(
        partial(branching, **VIEW), changing_branches, SOME, set_to_none=False
    ),
    "unused and accumulated": Case(branching, in_one_no_sync),
    "one bucket": Case(lambda: wrap(mlp(), bucket_cap_mb=None)),
    "odd sizes": Case(lambda: wrap(seeded(OddSizes().double()))),
    "checkpointed": Case(partial(checkpointed, False)),
    "checkpointed, reentrant": Case(partial(checkpointed, True)),
    "checkpointed, static": Case(partial(checkpointed, False, static_graph=True)),
    "checkpointed, reentrant, static": Case(partial(checkpointed, True, static_graph=True)),
    "ignored": Case(ignoring),
    "float32": of(torch.float32, *CONSERVING),
    "bfloat16": of(torch.bfloat16, TOPK),
    "several dtypes": Case(lambda: wrap(seeded(Mixed())), specs=GATHERED, tolerance=2e-6),
    # Options that DDP has in newer versions of torch only.
    **{
        option: Case(lambda options={option: value}: wrap(mlp(), **options))
        for option, value in NEWER.items()
        if option in OPTIONS
    },
}


@pytest.mark.parametrize("case", MODELS)
def test_conserves(case: str) -> None:
    conserves(MODELS[case])


def test_conserves_over_gloo() -> None:
    assert_conserved(on_processes(3, train, Case(branching, changing_branches)))


@pytest.mark.parametrize("view", [False, True])
def test_unused_parameter_keeps_a_gradient_that_was_not_cleared(view: bool) -> None:
    """Without zero_grad, DDP does not change the gradient of a parameter that no rank uses."""

    def body() -> None:
        model = branching(gradient_as_bucket_view=view)
        handle = torchcomp.register(model, TOPK)
        Account().step(model, (rows(0), ("left", "right")))
        grad, before = gradients(model), kept(handle.state_dict())
        loss_of(model(rows(1), ("right",))).backward()
        after = kept(handle.state_dict())
        torch.testing.assert_close(gradients(model)["left.weight"], grad["left.weight"])
        torch.testing.assert_close(after["left.weight"], before["left.weight"])

    on_threads(3, body)


# --- Several groups and models, compiled modules, copies ------------------------------------------


def on_subgroups() -> tuple[Account, Tensor]:
    """Ranks 0 and 2 train one model, ranks 1 and 3 another, for different numbers of steps."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = wrap(mlp(), process_group=halves[dist.get_rank() % 2])
    account = train(Case(lambda: model), steps=4 + dist.get_rank() % 2)
    return account, weights(model.module)


@pytest.mark.parametrize("run", [on_threads, on_processes])
def test_ddp_over_subgroups_conserves_in_each(run) -> None:
    outcomes = run(4, on_subgroups)
    for half in (outcomes[::2], outcomes[1::2]):
        accounts, trained = zip(*half, strict=True)
        assert_conserved(list(accounts))
        assert_residual(list(accounts))
        assert_replicas_equal(list(trained))
    assert not torch.equal(outcomes[0][1], outcomes[1][1])


def two_models() -> list[Account]:
    """Train two models, each with its own handle, with one backward pass through both."""
    models = [wrap(mlp()), wrap(seeded(mlp(), seed=1))]
    handles = list(map(torchcomp.register, models, CONSERVING[:2]))
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


def compiled() -> tuple[Account, list[str]]:
    module = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile's own
        # The compiler splits the graph at buckets, and asserts that they are at least 1 MiB.
        model = wrap(torch.compile(module, backend="aot_eager"), bucket_cap_mb=None)
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


def test_compiled_module_conserves_under_its_own_names() -> None:
    accounts, names = zip(*on_processes(2, compiled), strict=True)
    assert set(names[0]) == {name for name, _ in mlp().named_parameters()}
    assert_conserved(list(accounts), tolerance=1e-10)
    assert_residual(list(accounts))


def averaged() -> int:
    """Average the weights of a registered model in a copy, also with a scaler's hook."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    model = wrap(mlp())
    handle = torchcomp.register(model, TOPK, scaler=scaler)
    average = torch.optim.swa_utils.AveragedModel(model)
    for step in range(3):
        scaler.scale(loss_of(model(rows(step)))).backward()
        average.update_parameters(model)
    with torch.no_grad():
        assert average(rows(0)).shape == (4, 4)
    return handle.stats.steps


def test_weights_of_a_registered_model_can_be_averaged_in_a_copy() -> None:
    assert on_processes(2, averaged) == [3, 3]
