"""Times of collectives by formula: against hand calculations, and in what they grow."""

import math

import pytest

from torchcomp.errors import SpecError
from torchcomp.step_model import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    KINDS,
    Link,
    LinkTimes,
    Prediction,
    Run,
    values_of,
)

# 1 GB/s between nodes and 10 GB/s inside, without overhead.
PLAIN = {"gbit": 8.0, "inside_gbit": 80.0, "efficiency": 1.0, "overhead_us": 0.0}
PLAIN |= {"latency_us": 100.0, "inside_latency_us": 10.0}
MB = 10**6


def link(**options):
    return Link(**{**PLAIN, **options})


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        # 2 * 3/4 of a megabyte. The tree has 2 hops each way; a ring would have 3.
        (ALL_REDUCE, 1.5e-3 + 2 * 2 * 100e-6),
        (ALL_GATHER, 3e-3 + 3 * 100e-6),
        (ALL_TO_ALL, 1e-3 + 100e-6),
    ],
)
def test_four_nodes_of_one_rank(kind, seconds):
    assert link().flat(4).seconds(kind, MB) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        # A ring crosses each card once, whatever the ranks of a node.
        (ALL_REDUCE, 2 * 7 / 8 * 1e-3 + 2 * (100e-6 + 2 * 10e-6)),
        (ALL_GATHER, 7e-3 + 100e-6 + 6 * 10e-6),
        # The 4 ranks of a node send 4/7 of their megabytes through the card.
        (ALL_TO_ALL, 4 * 4 / 7 * 1e-3 + 100e-6),
    ],
)
def test_two_nodes_of_four_ranks(kind, seconds):
    assert link(ranks_per_node=4).flat(8).seconds(kind, MB) == pytest.approx(seconds)


def test_two_levels():
    whole = link(ranks_per_node=4)
    # All four groups share the card.
    between = whole.between(8)
    assert between.world_size == 2
    assert between.seconds(ALL_REDUCE, MB) == pytest.approx(4e-3 + 2 * 100e-6)
    inside = whole.inside(8)
    assert inside.world_size == 4
    assert inside.seconds(ALL_TO_ALL, MB) == pytest.approx(0.1e-3 + 10e-6)
    # On one node, all ranks are inside.
    assert whole.flat(4).seconds(ALL_GATHER, MB) == pytest.approx(0.3e-3 + 3 * 10e-6)


def test_gloo_copies_small_all_gathers_and_takes_several_trips():
    nccl, gloo = link().flat(4), link(backend="gloo").flat(4)
    trips = (gloo.seconds(ALL_TO_ALL, 0) - 0) / 100e-6
    assert trips > 1
    assert gloo.seconds(ALL_GATHER, 1000) == pytest.approx(gloo.seconds(ALL_TO_ALL, 3000))
    assert gloo.seconds(ALL_GATHER, 4 * MB) == pytest.approx(12e-3 + trips * 300e-6)
    # A ring, not a tree.
    assert gloo.seconds(ALL_REDUCE, MB) == pytest.approx(1.5e-3 + trips * 600e-6)
    assert nccl.cpu(ALL_REDUCE, MB) == 0
    assert 0 < gloo.cpu(ALL_REDUCE, MB) < gloo.seconds(ALL_REDUCE, MB)


def test_efficiency_and_overhead():
    slower = link(efficiency=0.5, overhead_us=7.0)
    assert slower.flat(4).seconds(ALL_TO_ALL, MB) == pytest.approx(2e-3 + 107e-6)
    assert slower.flat(1).seconds(ALL_REDUCE, MB) == pytest.approx(7e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_times_fall_with_bandwidth_and_grow_with_latency_size_and_ranks(kind, backend):
    def seconds(ranks=8, nbytes=MB, **options):
        return (
            Link(**{"gbit": 1.0, "backend": backend, **options}).flat(ranks).seconds(kind, nbytes)
        )

    def ascending(values):
        return values == sorted(values) and values[0] < values[-1]

    assert ascending([seconds(gbit=gbit) for gbit in (100.0, 10.0, 1.0, 0.1)])
    assert ascending([seconds(latency_us=us) for us in (0.0, 1.0, 100.0)])
    # Up to the largest message that gloo copies, and from there on.
    for sizes in ((0, 1, 1000, MB), (2 * MB, 10 * MB, 10**9)):
        assert ascending([seconds(nbytes=size) for size in sizes])
    if kind != ALL_TO_ALL:
        assert ascending([seconds(ranks=ranks) for ranks in (1, 2, 4, 64)])


# --- The published hours of QSR -------------------------------------------------------------------
#
# ViT-B with AdamW on 2 machines of 8 GPUs: parallel 26.7 h and QSR 20.2 h; see test_time_model.py.
# The step and the bandwidth are those that were fitted there to these two runs. Here the bandwidth
# is that of a card whose ring has 2 (M - 1)/M instead of 2 (N - 1)/N of the bytes.


def cosine(step):
    if step < 10_000:
        return 1e-6 + (0.008 - 1e-6) * step / 10_000
    return 1e-6 + (0.008 - 1e-6) * 0.5 * (1 + math.cos(math.pi * (step - 10_000) / 83_600))


def test_the_published_hours_of_qsr_are_reproduced():
    run = Run(16, 93_600, 0.748, warmup_steps=10_000, lr=cosine, speedup=1e6)
    cluster = Link(9.91 * (15 / 8), ranks_per_node=8, efficiency=1.0)
    values = values_of(
        numel=86_381_800 // 50
    )  # a fiftieth of the model over a fiftieth of the link
    slow = Link(cluster.gbit / 50, ranks_per_node=8, efficiency=1.0)
    hours = {
        spec: Prediction(spec, values, run).on(slow).hours
        for spec in ("every(1)", "qsr(alpha=0.0175, h_base=4)")
    }
    # Parallel training that overlaps nothing is an average after every step.
    assert hours["every(1)"] == pytest.approx(26.7, rel=0.1)
    assert hours["qsr(alpha=0.0175, h_base=4)"] == pytest.approx(20.2, rel=0.1)


@pytest.mark.parametrize(
    "bad",
    [
        {"gbit": 0},
        {"gbit": "25"},
        {"latency_us": -1},
        {"ranks_per_node": 0},
        {"inside_gbit": 0},
        {"efficiency": 1.5},
        {"overhead_us": -1},
        {"backend": "mpi"},
    ],
)
def test_bad_links_are_refused(bad):
    with pytest.raises(SpecError):
        link(**bad)


def test_bad_requests_are_refused():
    with pytest.raises(SpecError):
        link(ranks_per_node=8).flat(12)
    with pytest.raises(SpecError):
        link().flat(2).seconds("broadcast", 1)
    with pytest.raises(SpecError):
        link().flat(2).seconds(ALL_REDUCE, -1)


def test_times_say_how_many_ranks_they_are_of():
    assert isinstance(link().flat(4), LinkTimes)
    assert link().flat(4).world_size == 4
