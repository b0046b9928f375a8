"""Times of collectives by formula: against hand calculations, and in what they grow."""

import pytest

from torchcomp.advisor import Link
from torchcomp.advisor.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, KINDS
from torchcomp.specs.errors import SpecError

# 1 GB/s between nodes and 10 GB/s inside, without overhead.
PLAIN = {"gbit": 8.0, "inside_gbit": 80.0, "efficiency": 1.0, "overhead_us": 0.0}
PLAIN |= {"latency_us": 100.0, "inside_latency_us": 10.0}
MB = 10**6


def link(**options):
    return Link(**{**PLAIN, **options})


LEVELS = link(ranks_per_node=4)


@pytest.mark.parametrize(
    ("times", "kind", "seconds"),
    [
        # Four nodes of one rank. 2 * 3/4 of a megabyte; the tree has 2 hops each way.
        (link().among(4), ALL_REDUCE, 1.5e-3 + 2 * 2 * 100e-6),
        (link().among(4), ALL_GATHER, 3e-3 + 3 * 100e-6),
        (link().among(4), ALL_TO_ALL, 1e-3 + 100e-6),
        # Two nodes of four: a ring crosses each card once, whatever the ranks of a node.
        (LEVELS.among(8), ALL_REDUCE, 2 * 7 / 8 * 1e-3 + 2 * (100e-6 + 2 * 10e-6)),
        (LEVELS.among(8), ALL_GATHER, 7e-3 + 100e-6 + 6 * 10e-6),
        # The 4 ranks of a node send 4/7 of their megabytes through the card.
        (LEVELS.among(8), ALL_TO_ALL, 4 * 4 / 7 * 1e-3 + 100e-6),
        # One node: all ranks are inside.
        (LEVELS.among(4), ALL_GATHER, 0.3e-3 + 3 * 10e-6),
        # Efficiency and overhead.
        (link(efficiency=0.5, overhead_us=7.0).among(4), ALL_TO_ALL, 2e-3 + 107e-6),
        (link(overhead_us=7.0).among(1), ALL_REDUCE, 7e-6),
    ],
)
def test_a_megabyte_by_hand(times, kind, seconds):
    assert times.seconds(kind, MB) == pytest.approx(seconds)


def test_gloo_copies_small_all_gathers_and_takes_several_trips():
    nccl, gloo = link().among(4), link(backend="gloo").among(4)
    trips = gloo.seconds(ALL_TO_ALL, 0) / 100e-6
    assert trips > 1
    assert gloo.seconds(ALL_GATHER, 1000) == pytest.approx(gloo.seconds(ALL_TO_ALL, 3000))
    assert gloo.seconds(ALL_GATHER, 4 * MB) == pytest.approx(12e-3 + trips * 300e-6)
    # A ring, not a tree.
    assert gloo.seconds(ALL_REDUCE, MB) == pytest.approx(1.5e-3 + trips * 600e-6)
    assert nccl.cpu(ALL_REDUCE, MB) == 0
    assert 0 < gloo.cpu(ALL_REDUCE, MB) < gloo.seconds(ALL_REDUCE, MB)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_times_fall_with_bandwidth_and_grow_with_latency_size_and_ranks(kind, backend):
    def seconds(ranks=8, nbytes=MB, **options):
        network = Link(**{"gbit": 1.0, "backend": backend, **options})
        return network.among(ranks).seconds(kind, nbytes)

    def ascending(values):
        return values == sorted(values) and values[0] < values[-1]

    assert ascending([seconds(gbit=gbit) for gbit in (100.0, 10.0, 1.0, 0.1)])
    assert ascending([seconds(latency_us=us) for us in (0.0, 1.0, 100.0)])
    # Up to the largest message that gloo copies, and from there on.
    for sizes in ((0, 1, 1000, MB), (2 * MB, 10 * MB, 10**9)):
        assert ascending([seconds(nbytes=size) for size in sizes])
    if kind != ALL_TO_ALL:
        assert ascending([seconds(ranks=ranks) for ranks in (1, 2, 4, 64)])


BAD = {"gbit": 0, "latency_us": -1, "ranks_per_node": 0, "inside_gbit": 0, "inside_latency_us": -1}
BAD |= {"efficiency": 1.5, "overhead_us": -1, "backend": "mpi"}


@pytest.mark.parametrize(
    "bad", [{name: value} for name, value in BAD.items()] + [{"ranks_per_node": 8}]
)
def test_bad_links_are_refused(bad):
    with pytest.raises(SpecError):
        link(**bad).among(12)
