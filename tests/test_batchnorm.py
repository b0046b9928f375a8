"""reestimate_batchnorm: statistics of averaged weights, compared with a float64 reference."""

import copy
import math
import re
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import seeded
from tests.support.outcomes import assert_close, assert_replicas_equal
from tests.support.ranks import on_processes, on_threads
from torchcomp import LocalSGD, NonFiniteError, RankMismatchError, SpecError, UnsupportedModelError
from torchcomp.local_sgd.batchnorm import reestimate_batchnorm

WIDTH = 5


def network(dtype=torch.float64):
    """Two BatchNorm layers, so that the second one's statistics depend on the first."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()]
    layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=0.3, eps=1e-3)]
    model = seeded(nn.Sequential(*layers, nn.Linear(WIDTH, 2))).to(dtype)
    model[1].running_mean.fill_(1e6)
    model[4].running_var.fill_(math.nan)
    return model


def shard(rank=0, batches=8, size=6):
    """A rank's batches of images and labels. Each rank and batch has its own mean and spread."""
    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(batches, size, WIDTH, generator=generator, dtype=torch.float64)
    images = images * (1 + rank) + torch.arange(batches).view(-1, 1, 1)
    return [(batch, torch.zeros(size)) for batch in images]


def statistics(model):
    layers = (model[1], model[4])
    return torch.cat([each for layer in layers for each in (layer.running_mean, layer.running_var)])


def reference(model, batches):
    """The mean of the statistics that each batch gives without the others."""
    found = []
    for images, _ in batches:
        alone = copy.deepcopy(model).train()
        for layer in (alone[1], alone[4]):
            layer.reset_running_stats()
            layer.momentum = 1.0
        alone(images)
        found.append(statistics(alone))
    return torch.stack(found).mean(0)


def counting(batches, read):
    """A loader that appends each batch that is read to `read`."""
    for batch in batches:
        read.append(batch)
        yield batch


def test_passes_are_in_training_mode_and_build_no_graph():
    seen = []
    model = network().eval()
    model.append(nn.Dropout(0.5))
    model[2].train()
    model[1].momentum = None
    modes = [module.training for module in model.modules()]
    model[-1].register_forward_hook(
        lambda module, *_: seen.append((module.training, torch.is_grad_enabled()))
    )
    reestimate_batchnorm(model, shard(), images=6)
    assert seen == [(True, False)]
    assert [module.training for module in model.modules()] == modes
    assert (model[1].momentum, model[4].momentum) == (None, 0.3)


@pytest.mark.parametrize(("images", "read"), [(1, 1), (6, 1), (7, 2), (48, 8)])
def test_whole_batches_are_read_until_there_are_enough_images(images, read):
    model, seen = network(), []
    forms = [lambda x, y: x, lambda x, y: [x, y], lambda x, y: (x,)]
    batches = [forms[i % 3](*batch) for i, batch in enumerate(shard())]
    reestimate_batchnorm(model, counting(batches, seen), images=images)
    assert len(seen) == read
    assert_close(statistics(model), reference(model, shard()[:read]))


def test_layers_that_are_frozen_or_that_no_batch_reaches_keep_their_statistics():
    class Frozen(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[1].eval()
            return self

        def forward(self, x):
            return nn.Sequential(*list(self)[:-1])(x)

    model = Frozen(*network(), nn.BatchNorm1d(WIDTH))
    for layer in (model[1], model[-1]):
        layer.running_mean.fill_(7.0)
        layer.num_batches_tracked.fill_(9)
    reestimate_batchnorm(model, shard(), images=6)
    for layer in (model[1], model[-1]):
        assert layer.running_mean.tolist() == [7.0] * WIDTH
        assert (layer.num_batches_tracked, layer.momentum) == (9, 0.1)
    assert model[4].num_batches_tracked == 1
    # Without layers to estimate, nothing is read.
    model[1] = model[4] = model[-1] = nn.Identity()
    reestimate_batchnorm(model, iter(()))


def wrapped(kind):
    model = network()
    outer = model if kind == "module" else DistributedDataParallel(model)
    return (torch.compile(outer, backend="eager") if kind == "compiled" else outer), model


def on_a_rank(kind, images):
    (model, module), seen = wrapped(kind), []
    reestimate_batchnorm(model, counting(shard(dist.get_rank()), seen), images=images)
    return statistics(module), len(seen)


@pytest.mark.parametrize(
    ("launch", "ranks", "kind", "images", "read"),
    [
        (on_threads, 4, "module", 48, 2),
        (on_threads, 4, "ddp", 49, 3),
        (on_processes, 2, "compiled", 48, 4),  # torch.compile needs the main thread
    ],
)
def test_statistics_are_averaged_over_the_ranks(launch, ranks, kind, images, read):
    found, batches = zip(*launch(ranks, on_a_rank, kind, images), strict=True)
    assert batches == (read,) * ranks
    assert_replicas_equal(list(found))
    own = [reference(network(), shard(rank)[:read]) for rank in range(ranks)]
    assert_close(found[0], torch.stack(own).mean(0))


def after_local_steps(local_steps):
    rank = dist.get_rank()
    model = DistributedDataParallel(network())
    model.module[4].running_var.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(steps):
        for step in steps:
            optimizer.zero_grad()
            model(shard(rank)[step][0]).square().sum().backward()
            optimizer.step()

    with LocalSGD(model, optimizer, "every(2)", total_steps=4) as sync:
        train(range(local_steps))
        before = statistics(model.module)
        averaged = copy.deepcopy(model.module)
        reestimate_batchnorm(model, shard(rank), images=24)
        after = statistics(model.module)
        train(range(local_steps, 4))
    return before, after, averaged, sync.stats.syncs


def test_statistics_of_local_steps_become_those_of_the_averaged_weights():
    befores, afters, models, syncs = zip(*on_threads(2, after_local_steps, 2), strict=True)
    # Local steps average the statistics, which does not fit them to the averaged weights.
    assert_replicas_equal(list(befores))
    assert not torch.allclose(befores[0], afters[0], rtol=0.01)
    assert_replicas_equal(list(afters))
    wanted = torch.stack([reference(models[0], shard(rank)[:2]) for rank in range(2)]).mean(0)
    assert_close(afters[0], wanted)
    # The forward passes of the estimate do not count as steps of the schedule.
    assert syncs == (2, 2)


def test_inside_a_round_it_raises_on_every_rank():
    for error in on_threads(2, after_local_steps, 1, catch=True):
        assert isinstance(error, RankMismatchError)
        assert "parameters: " in str(error)
        assert "next_sync is None" in str(error)


@contextmanager
def unchanged(model):
    """Require that the model's state, modes and momenta are the same at the end."""
    state = copy.deepcopy(model.state_dict())
    yield
    for name, values in model.state_dict().items():
        torch.testing.assert_close(values, state[name], rtol=0, atol=0, equal_nan=True)
    assert all(module.training for module in model.modules())
    assert (model[1].momentum, model[4].momentum) == (0.1, 0.3)


def nan_images():
    return [(x * math.nan, y) for x, y in shard()]


REFUSED = [
    (shard, 49, SpecError, r"loader .* 48 .* 49 .*images=49\b.*\b1\b"),
    (lambda: None, 6, SpecError, r"^loader .* NoneType$"),
    (lambda: [("a.jpeg", 1)], 6, SpecError, r"batch .* str$"),
    (nan_images, 6, NonFiniteError, r"BatchNorm.*'1.running_mean', .*'4.running_"),
]


@pytest.mark.parametrize(("loader", "images", "error", "problem"), REFUSED)
def test_bad_input_is_refused_and_changes_nothing(loader, images, error, problem):
    model = network()
    with unchanged(model), pytest.raises(error, match=problem):
        reestimate_batchnorm(model, loader(), images=images)
    with pytest.raises(UnsupportedModelError, match=r"torch\.nn\.Module.*\bstr$"):
        reestimate_batchnorm("resnet", shard())


def one_short_shard(kind):
    wrapper, module = wrapped(kind)
    with unchanged(module), pytest.raises(RankMismatchError) as raised:
        reestimate_batchnorm(wrapper, shard(batches=1 + dist.get_rank()), images=24)
    return str(raised.value)


@pytest.mark.parametrize("kind", ["module", "ddp"])
def test_too_few_images_on_one_rank_raise_on_every_rank(kind):
    for message in on_threads(2, one_short_shard, kind):
        assert re.search(r"loader .* 6 .* 12 .* on rank 0.*none on rank 1", message)
