"""Dropped layers run no kernels and send no bytes; a step waits twice, and LARS for nothing."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.jointspar.script import backward, keep
from tests.support.counting import counted
from tests.support.models import Checkpointed, loss_of, mlp, rows, seeded, wrap
from tests.support.ranks import on_threads, with_fake_ranks
from torchcomp.exchange.traffic import sum_bytes
from torchcomp.jointspar import LARS, JointSpar


def kernels(build, kept, batch=lambda: rows(0, torch.float32)):
    """Count the matrix products and convolutions of one backward pass."""
    model = wrap(build())
    if kept is not None:
        jointspar = JointSpar(model, budget=0.5)
        keep(jointspar, *kept)
    loss = loss_of(model(batch()))
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        loss.backward()
    counts = Counter(event.name for event in profiler.events())
    return sum(counts[f"aten::{name}"] for name in ("mm", "addmm", "convolution_backward"))


class First(nn.Module):
    def forward(self, pair):
        return pair[0]


def float_mlp():
    return mlp(torch.float32)


def checkpointed():
    return seeded(Checkpointed(use_reentrant=False))


def convolutions():
    layers = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 2)
    return seeded(nn.Sequential(nn.Unflatten(1, (2, 6, 6)), *layers))


def recurrent():
    return seeded(nn.Sequential(nn.Linear(16, 8), nn.LSTM(8, 4), First(), nn.Linear(4, 4)))


EXPECTED = [
    # One product for each weight, and one for the input of each layer except the first.
    (float_mlp, None, 4 + 3),
    (float_mlp, ("6",), 1),
    (float_mlp, ("2", "6"), 2 + 2),
    (float_mlp, ("0",), 1 + 3),
    (float_mlp, (), 0),
    # Four weights, three inputs, three recomputed blocks. Then one weight and its block.
    (checkpointed, ("stem", "blocks.0.0", "blocks.1.0", "blocks.2.0"), 4 + 3 + 3),
    (checkpointed, ("blocks.2.0",), 1 + 1),
    (checkpointed, (), 0),
    (convolutions, ("3",), 1),
    (recurrent, ("3",), 1),
]


@pytest.mark.parametrize(("build", "kept", "expected"), EXPECTED)
def test_a_dropped_layer_runs_no_weight_gradient_and_a_dropped_prefix_nothing(
    build, kept, expected
):
    batch = (lambda: rows(0, torch.float32, width=72)) if build is convolutions else None
    arguments = (build, kept, batch) if batch else (build, kept)
    assert on_threads(1, kernels, *arguments) == [expected]


def bytes_of_steps(steps, compress="mean", selection="shared", bucket_cap_mb=0.002):
    """Each step's bytes: bytes_of_steps, and planned from what was kept."""
    model = wrap(mlp(torch.float32), bucket_cap_mb=bucket_cap_mb)
    jointspar = JointSpar(model, budget=0.5, compress=compress, selection=selection)
    world_size = dist.get_world_size()
    sizes = {name: p.nbytes for name, p in model.module.named_parameters()}
    seen = []
    for step in range(steps):
        kept = jointspar.kept
        backward(model, (rows(step, torch.float32),))
        sent = sum(sizes[name] for layer in kept for name in jointspar.layers[layer])
        stats = jointspar.stats
        assert stats.dense_bytes_sent == sum_bytes(sum(sizes.values()), world_size)
        seen.append((stats.bytes_sent, sum_bytes(sent, world_size), kept))
    jointspar.close()
    return seen


@pytest.mark.parametrize(
    ("compress", "bucket_cap_mb", "fewer"),
    [("mean", 0.002, 1), ("mean", None, 1), ('cast("bf16")', 0.002, 2)],
)
def test_counted_bytes_are_those_of_the_kept_layers(compress, bucket_cap_mb, fewer):
    for seen in on_threads(3, bytes_of_steps, 8, compress, "shared", bucket_cap_mb):
        assert len({kept for _, _, kept in seen}) > 3
        assert [sent for sent, _, _ in seen] == [planned // fewer for _, planned, _ in seen]


def test_per_rank_sets_send_their_union():
    outcomes = on_threads(3, bytes_of_steps, 8, "mean", "per-rank")
    sizes = {"0": 4 * 272, "2": 4 * 272, "4": 4 * 272, "6": 4 * 68}
    for step in range(8):
        union = set().union(*(seen[step][2] for seen in outcomes))
        assert len({seen[step][2] for seen in outcomes}) > 1 or not step
        for seen in outcomes:
            assert seen[step][0] == sum_bytes(sum(sizes[layer] for layer in union), 3)


OPTIONS = {"shared": {}, "per-rank": {"selection": "per-rank"}}


def deep(tensors):
    """Two layers that have a bias and some further vectors each."""
    return seeded(nn.Sequential(*[Layer(tensors) for _ in range(2)]))


class Layer(nn.Module):
    def __init__(self, tensors):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))
        self.more = nn.ParameterList(nn.Parameter(torch.ones(16)) for _ in range(tensors))

    def forward(self, x):
        return x @ self.weight + torch.stack(list(self.more)).sum(0)


def backward_pass(options, tensors=3):
    """What the last of some backward passes launches and waits for."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model = wrap(deep(tensors), bucket_cap_mb=25)
    with JointSpar(model, budget=1.0, scaler=scaler, **options):
        for step in range(4):
            model.zero_grad()
            loss = scaler.scale(loss_of(model(rows(step, torch.float32))))
            with counted() as counts:
                loss.backward()
    return counts


@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_waits_for_the_decision_and_for_all_norms_together(name):
    waits = with_fake_ranks(2, backward_pass, OPTIONS[name]).waits
    # The scaler's flag is one more. With per-rank selection, the host also reads which layers the
    # other ranks keep, by two calls.
    assert waits.total() <= (5 if name == "per-rank" else 3)


class Half:
    """Samples every parameter with probability 1/2."""

    def probability(self, parameter):
        return 0.5

    def norm(self, parameter):
        return 2.0


@pytest.mark.parametrize(("sampled", "exclude"), [(None, True), (Half(), False)])
def test_lars_waits_for_nothing_and_launches_equally_much_for_any_number_of_tensors(
    sampled, exclude
):
    found = []
    for tensors in (2, 9):
        module = deep(tensors)
        optimizer = LARS(
            module.parameters(), 0.1, weight_decay=0.1, exclude_vectors=exclude, sampled=sampled
        )
        for _ in range(2):
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
            with counted() as counts:
                optimizer.step()
        assert not counts.waits
        found.append(counts.launches.total())
    assert found[1] <= found[0]
