"""Every combination of DDP's settings: the weights are those of plain DDP, and replicas are equal.

With ``mean`` they are so bit for bit. With ``ef(topk(1.0))``, which sends everything as sparse
messages, they are so to the rounding of float64.
"""

from contextlib import nullcontext
from dataclasses import dataclass, fields
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.support.cases import soak
from tests.support.models import images, seeded, weights
from tests.support.outcomes import assert_replicas_equal
from tests.support.ranks import on_processes, on_threads

# What torch says of static_graph together with find_unused_parameters.
pytestmark = pytest.mark.filterwarnings("ignore:You passed find_unused_parameters")
STEPS = 3
PLAIN = ""


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


def trained(settings: Settings, spec: str, compiled: bool = False) -> Tensor:
    module = Small(settings)
    if compiled:
        module.compile(backend="aot_eager")
    model = DistributedDataParallel(
        module,
        # torch.compile does not take a bucket that is smaller than the first one of DDP.
        bucket_cap_mb=25 if compiled else 0.002,
        static_graph=settings.static_graph,
        find_unused_parameters=settings.find_unused,
        gradient_as_bucket_view=settings.bucket_view,
    )
    handle = torchcomp.register(model, spec) if spec else None
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(wanted, lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        # With static_graph, plain DDP fails if no_sync is used in the first step.
        micro = 2 if settings.accumulated and step else 1
        for part in range(micro):
            last = part == micro - 1
            with nullcontext() if last else model.no_sync():
                batch = images(10 * step + part)
                with torch.autocast("cpu", torch.bfloat16, enabled=settings.autocast):
                    loss = model(batch, step).pow(2).sum()
                loss.backward()
        optimizer.step()
    if handle is not None:
        handle.close()
    return weights(module)


def check(settings: Settings, world_size: int, run=on_threads, compiled: bool = False) -> None:
    plain, mean, sparse = (
        run(world_size, trained, settings, spec, compiled)
        for spec in (PLAIN, "mean", "ef(topk(1.0))")
    )
    assert torch.equal(mean[0], plain[0])
    torch.testing.assert_close(sparse[0], plain[0], rtol=0, atol=1e-12)
    assert_replicas_equal(mean)
    assert_replicas_equal(sparse)


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
def test_weights_are_those_of_plain_ddp(settings: Settings) -> None:
    check(settings, 3)


@pytest.mark.parametrize("world_size", soak([1, 2, 4, 5]))
def test_weights_on_other_numbers_of_ranks_are_those_of_plain_ddp(world_size: int) -> None:
    for settings in NOW:
        check(settings, world_size)


@pytest.mark.soak
def test_weights_with_all_combinations_are_those_of_plain_ddp() -> None:
    for settings in ALL:
        check(settings, 3)


@pytest.mark.parametrize("settings", soak(NOW), ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_weights_over_gloo_are_those_of_plain_ddp(settings: Settings, compiled: bool) -> None:
    check(settings, 3, on_processes, compiled)
