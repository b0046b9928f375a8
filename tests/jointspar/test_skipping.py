"""Dropped layers run no kernels in the backward pass and send no bytes."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.jointspar.script import backward, keep
from tests.support.models import Checkpointed, loss_of, mlp, rows, seeded, wrap
from tests.support.patience import PATIENCE
from tests.support.ranks import on_threads, with_fake_ranks
from torchcomp.jointspar import JointSpar
from torchcomp.traffic import sum_bytes

LAYERS = ("0", "2", "4", "6")


def multiplications(model, batch):
    """Count the matrix products of one backward pass."""
    loss = loss_of(model(batch))
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        loss.backward()
    counts = Counter(event.name for event in profiler.events())
    return counts["aten::mm"] + counts["aten::addmm"]


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        # One product for each weight, and one for the input of each layer except the first.
        (LAYERS, 4 + 3),
        (("6",), 1),
        (("4", "6"), 2 + 1),
        (("2", "6"), 2 + 2),
        (("2",), 1 + 2),
        (("0",), 1 + 3),
        (("0", "2", "4"), 3 + 3),
        ((), 0),
    ],
)
def test_a_dropped_layer_runs_no_weight_gradient_and_a_dropped_prefix_nothing(kept, expected):
    def body():
        model = wrap(mlp(torch.float32))
        jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
        keep(jointspar, *kept)
        return multiplications(model, rows(0, torch.float32))

    assert on_threads(1, body) == [expected]


def test_plain_ddp_runs_all_products():
    assert on_threads(
        1, lambda: multiplications(wrap(mlp(torch.float32)), rows(0, torch.float32))
    ) == [7]


def test_checkpointed_blocks_skip_dropped_layers():
    def body():
        counts = []
        for kept in (("stem", "blocks.0.0", "blocks.1.0", "blocks.2.0"), ("blocks.2.0",), ()):
            model = wrap(seeded(Checkpointed(use_reentrant=False)))
            jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
            keep(jointspar, *kept)
            counts.append(multiplications(model, rows(0, torch.float32)))
        return counts

    # All: four weights, three inputs, three recomputed blocks. Then one weight and its block. None.
    assert on_threads(1, body) == [[4 + 3 + 3, 1 + 1, 0]]


def convolutions_of_one_backward(kept):
    model = wrap(seeded(nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 2))))
    jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
    keep(jointspar, *kept)
    loss = loss_of(model(rows(0, torch.float32, width=72).view(4, 2, 6, 6)))
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        loss.backward()
    return sum(event.name == "aten::convolution_backward" for event in profiler.events())


def test_dropped_convolutions_at_the_front_do_not_run():
    for kept, expected in ((("0", "1", "2"), 3), (("1", "2"), 2), (("2",), 1), ((), 0)):
        assert on_threads(1, convolutions_of_one_backward, kept) == [expected]


def test_a_recurrent_layer_is_skipped():
    def body():
        model = wrap(
            seeded(nn.Sequential(nn.Linear(16, 8), nn.LSTM(8, 4), First(), nn.Linear(4, 4)))
        )
        jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
        keep(jointspar, "3")
        return multiplications(model, rows(0, torch.float32))

    assert on_threads(1, body) == [1]


class First(nn.Module):
    def forward(self, pair):
        return pair[0]


# --- Bytes ----------------------------------------------------------------------------------------


def counted(steps, compress="mean", selection="shared", bucket_cap_mb=0.002):
    """Each step's bytes: counted, and planned from what was kept."""
    model = wrap(mlp(torch.float32), bucket_cap_mb=bucket_cap_mb)
    jointspar = JointSpar(model, budget=0.5, compress=compress, selection=selection, warmup_steps=0)
    world_size = jointspar._exchange.world_size
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


@pytest.mark.parametrize("bucket_cap_mb", [0.002, None])
def test_counted_bytes_are_those_of_the_kept_layers(bucket_cap_mb):
    for world_size in (1, 2, 3):
        for seen in on_threads(world_size, lambda: counted(8, bucket_cap_mb=bucket_cap_mb)):
            assert len({kept for _, _, kept in seen}) > 3
            for sent, planned, _ in seen:
                assert sent == planned


def test_a_cast_halves_the_bytes_of_the_kept_layers():
    for seen in on_threads(2, counted, 8, 'cast("bf16")'):
        for sent, planned, _ in seen:
            assert sent == planned // 2


def test_per_rank_sets_send_their_union():
    outcomes = on_threads(3, counted, 8, "mean", "per-rank")
    sizes = {"0": 4 * 272, "2": 4 * 272, "4": 4 * 272, "6": 4 * 68}
    for step in range(8):
        union = set().union(*(seen[step][2] for seen in outcomes))
        assert len({seen[step][2] for seen in outcomes}) > 1 or step
        for seen in outcomes:
            assert seen[step][0] == sum_bytes(sum(sizes[layer] for layer in union), 3)


def test_64_ranks():
    for sent, planned, _ in with_fake_ranks(64, counted, 8):
        assert sent == planned


def socket_bytes():
    """Return, for three steps, the bytes on the sockets by the kernel's count and by ours."""
    model = wrap(nn.Sequential(*[nn.Linear(300, 300) for _ in range(6)]), bucket_cap_mb=None)
    jointspar = JointSpar(model, budget=0.5, warmup_steps=0)
    seen = []
    for kept in (("1",), ("1",), tuple("012345")):
        keep(jointspar, *kept)
        dist.barrier()
        before = received()
        loss_of(model(torch.ones(2, 300))).backward()
        dist.barrier()
        seen.append((received() - before, jointspar.stats.bytes_sent))
    jointspar.close()
    return seen


def received():
    """Return the bytes received over loopback since this machine or network namespace started."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.strip().startswith("lo:")))


def can_create_a_network_namespace():
    command = ["unshare", "--net", "ip", "link", "set", "lo", "up"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(
    not can_create_a_network_namespace(),
    reason="needs root, unshare and ip, because other processes also use loopback",
)
@pytest.mark.thorough
def test_sockets_carry_what_is_counted():
    code = (
        "import json\nfrom tests.jointspar.test_skipping import socket_bytes\n"
        "from tests.support.ranks import on_processes\n"
        "if __name__ == '__main__': print(json.dumps(on_processes(2, socket_bytes)))\n"
    )
    inside = ["sh", "-c", 'ip link set lo up && exec "$0" -c "$1"', sys.executable, code]
    output = subprocess.check_output(["unshare", "--net", *inside], text=True, timeout=PATIENCE)
    for seen in json.loads(output.splitlines()[-1]):
        # Both ranks send over the same loopback. The first step also sets up its collectives.
        for carried, sent in seen[1:]:
            assert carried == pytest.approx(2 * sent, rel=0.03, abs=8000)
        assert seen[1][1] < 0.2 * seen[2][1]
