"""Dropped layers run no kernels in the backward pass and send no bytes."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.jointspar.script import backward, keep
from tests.support.models import Checkpointed, loss_of, mlp, rows, seeded, wrap
from tests.support.ranks import on_threads, with_fake_ranks
from torchcomp.exchange.traffic import sum_bytes
from torchcomp.jointspar import JointSpar


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
    (float_mlp, ("0", "2", "4", "6"), 4 + 3),
    (float_mlp, ("6",), 1),
    (float_mlp, ("2", "6"), 2 + 2),
    (float_mlp, ("0",), 1 + 3),
    (float_mlp, (), 0),
    # Four weights, three inputs, three recomputed blocks. Then one weight and its block.
    (checkpointed, ("stem", "blocks.0.0", "blocks.1.0", "blocks.2.0"), 4 + 3 + 3),
    (checkpointed, ("blocks.2.0",), 1 + 1),
    (checkpointed, (), 0),
    (convolutions, ("1", "2", "3"), 3),
    (convolutions, ("3",), 1),
    (convolutions, (), 0),
    (recurrent, ("3",), 1),
]


@pytest.mark.parametrize(("build", "kept", "expected"), EXPECTED)
def test_a_dropped_layer_runs_no_weight_gradient_and_a_dropped_prefix_nothing(
    build, kept, expected
):
    batch = (lambda: rows(0, torch.float32, width=72)) if build is convolutions else None
    arguments = (build, kept, batch) if batch else (build, kept)
    assert on_threads(1, kernels, *arguments) == [expected]


# --- Bytes ----------------------------------------------------------------------------------------


def counted(steps, compress="mean", selection="shared", bucket_cap_mb=0.002):
    """Each step's bytes: counted, and planned from what was kept."""
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
    for seen in on_threads(3, counted, 8, compress, "shared", bucket_cap_mb):
        assert len({kept for _, _, kept in seen}) > 3
        assert [sent for sent, _, _ in seen] == [planned // fewer for _, planned, _ in seen]


def test_per_rank_sets_send_their_union():
    outcomes = on_threads(3, counted, 8, "mean", "per-rank")
    sizes = {"0": 4 * 272, "2": 4 * 272, "4": 4 * 272, "6": 4 * 68}
    for step in range(8):
        union = set().union(*(seen[step][2] for seen in outcomes))
        assert len({seen[step][2] for seen in outcomes}) > 1 or not step
        for seen in outcomes:
            assert seen[step][0] == sum_bytes(sum(sizes[layer] for layer in union), 3)


def test_64_ranks():
    for sent, planned, _ in with_fake_ranks(64, counted, 8):
        assert sent == planned
