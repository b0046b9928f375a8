"""Parameters of every kind are averaged element by element."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.support.outcomes import assert_close, equal_on_all
from tests.support.ranks import on_processes, on_threads

TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8}


class Odd(nn.Module):
    """Empty, scalar, one-element, tied, unused and transposed parameters of four dtypes."""

    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0))
        self.empty_rows = nn.Parameter(torch.zeros(3, 0, dtype=torch.float16))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.one = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.coarse = nn.Parameter(torch.zeros(5, 3, dtype=torch.bfloat16))
        self.fine = nn.Parameter(torch.zeros(7, dtype=torch.float64))
        self.transposed = nn.Parameter(torch.zeros(4, 6).t())
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens):
        hidden = self.head(self.embedding(tokens)).sum() + self.scalar + self.transposed.sum()
        parts = (self.one, self.fine, self.coarse, self.empty, self.empty_rows)
        return hidden + sum(part.double().sum() for part in parts)


def scattered(**options):
    """Weights that differ between ranks, before and after a synchronisation, and the bytes sent."""
    model = DistributedDataParallel(Odd(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    sync = torchcomp.LocalSGD(model, optimizer, "every(1)", total_steps=1)
    model(torch.arange(5)).backward()
    optimizer.zero_grad()
    scatter(model.module, torch.distributed.get_rank())
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    optimizer.step()
    after = {name: p.detach() for name, p in model.module.named_parameters()}
    assert model.module.head.weight is model.module.embedding.weight
    return before, after, sync.stats.bytes_sent


@torch.no_grad()
def scatter(module, rank):
    generator = torch.Generator().manual_seed(rank)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("launch", [on_threads, on_processes])
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.00002}])
def test_every_parameter_becomes_the_mean_of_the_ranks(launch, options):
    befores, afters, sent = zip(*launch(3, partial(scattered, **options)), strict=True)
    # Tied weights are sent once.
    plan = torchcomp.explain("every(1)", model=Odd(), world_size=3, total_steps=1)
    assert sent == (plan.bytes_sent,) * 3
    assert "empty_rows" in afters[0]
    for name, after in afters[0].items():
        assert equal_on_all(weights[name] for weights in afters)
        exact = torch.stack([weights[name].double() for weights in befores]).mean(0)
        assert_close(after.double(), exact, TOLERANCE.get(after.dtype, 1e-3))
        assert after.stride() == befores[0][name].stride()


def test_a_checkpoint_of_every_kind_of_parameter_is_recognised():
    def body():
        model = DistributedDataParallel(Odd())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        sync = torchcomp.LocalSGD(model, optimizer, "every(2)", total_steps=4)
        scatter(model.module, torch.distributed.get_rank())
        state = sync.state_dict()
        sync.load_state_dict(state)
        optimizer.step()
        with torch.no_grad():
            model.module.scalar.add_(1)
        sync.load_state_dict(state)
        with pytest.raises(torchcomp.CheckpointError, match="DistributedDataParallel"):
            optimizer.step()

    on_threads(2, body)


def test_parameters_that_ddp_ignores_stay_local():
    def body():
        module = nn.ModuleDict({"shared": nn.Linear(2, 2), "own": nn.Linear(2, 2)})
        ignored = ["own.weight", "own.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
        model = DistributedDataParallel(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        torchcomp.LocalSGD(model, optimizer, "every(1)", total_steps=1)
        scatter(module, torch.distributed.get_rank())
        optimizer.step()
        return module["shared"].weight.detach(), module["own"].weight.detach()

    shared, own = zip(*on_threads(2, body), strict=True)
    assert equal_on_all(shared)
    assert not equal_on_all(own)
