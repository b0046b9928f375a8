"""Dropped layers run no kernels and send no bytes; a step waits twice, and LARS for nothing."""

from collections import Counter

import pytest
import torch
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


def float_mlp():
    return mlp(torch.float32)


def checkpointed():
    return seeded(Checkpointed(use_reentrant=False))


def convolutions():
    layers = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 2)
    return seeded(nn.Sequential(nn.Unflatten(1, (2, 6, 6)), *layers))


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
]


@pytest.mark.parametrize(("build", "kept", "expected"), EXPECTED)
def test_a_dropped_layer_runs_no_weight_gradient_and_a_dropped_prefix_nothing(
    build, kept, expected
):
    batch = (lambda: rows(0, torch.float32, width=72)) if build is convolutions else None
    arguments = (build, kept, batch) if batch else (build, kept)
    assert on_threads(1, kernels, *arguments) == [expected]


def bytes_of_steps(compress, selection, bucket_cap_mb):
    """What each of eight steps sends and keeps on this rank."""
    model = wrap(float_mlp(), bucket_cap_mb=bucket_cap_mb)
    jointspar = JointSpar(model, budget=0.5, compress=compress, selection=selection)
    seen = []
    for step in range(8):
        kept = jointspar.kept
        backward(model, (rows(step, torch.float32),))
        assert jointspar.stats.dense_bytes_sent == sum_bytes(sum(SIZES.values()), 3)
        seen.append((jointspar.stats.bytes_sent, kept))
    return seen


SIZES = {"0": 4 * 272, "2": 4 * 272, "4": 4 * 272, "6": 4 * 68}


@pytest.mark.parametrize(
    ("compress", "selection", "bucket_cap_mb", "fewer"),
    [
        ("mean", "shared", 0.002, 1),
        ("mean", "shared", None, 1),
        ('cast("bf16")', "shared", 0.002, 2),
        ("mean", "per-rank", 0.002, 1),
    ],
)
def test_counted_bytes_are_those_of_the_layers_that_any_rank_keeps(
    compress, selection, bucket_cap_mb, fewer
):
    outcomes = on_threads(3, bytes_of_steps, compress, selection, bucket_cap_mb)
    assert len({kept for _, kept in outcomes[0]}) > 3
    for step, found in enumerate(zip(*outcomes, strict=True)):
        assert (len({kept for _, kept in found}) > 1) == (selection == "per-rank" and step > 0)
        union = set().union(*(kept for _, kept in found))
        planned = sum_bytes(sum(SIZES[layer] for layer in union), 3) // fewer
        assert [sent for sent, _ in found] == [planned] * 3


def backward_pass(selection):
    """What the last of some backward passes launches and waits for."""
    model = wrap(float_mlp(), bucket_cap_mb=25)
    with JointSpar(model, budget=1.0, selection=selection):
        for step in range(4):
            model.zero_grad()
            loss = loss_of(model(rows(step, torch.float32)))
            with counted() as counts:
                loss.backward()
    return counts


@pytest.mark.parametrize("selection", ["shared", "per-rank"])
def test_a_step_waits_for_the_decision_and_for_all_norms_together(selection):
    waits = with_fake_ranks(2, backward_pass, selection).waits
    # With per-rank selection, the host also reads which layers the other ranks keep, by two calls.
    assert waits.total() <= (4 if selection == "per-rank" else 2)


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
        params = [nn.Parameter(torch.ones(shape)) for shape in [(16, 16)] * 2 + [(16,)] * tensors]
        options = {"weight_decay": 0.1, "exclude_vectors": exclude, "sampled": sampled}
        optimizer = LARS(params, 0.1, **options)
        for _ in range(2):
            for parameter in params:
                parameter.grad = torch.ones_like(parameter)
            with counted() as counts:
                optimizer.step()
        assert not counts.waits
        found.append(counts.launches.total())
    assert found[1] <= found[0]
