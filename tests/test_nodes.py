"""Nodes: which ranks share a machine."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from tests.support.outcomes import raised_by
from tests.support.ranks import with_fake_ranks
from torchcomp import SpecError
from torchcomp.exchange.nodes import Nodes


@given(st.integers(1, 5), st.integers(1, 5), st.randoms(use_true_random=False))
def test_every_rank_is_on_one_node_and_meets_each_node_once(
    size: int, nodes: int, random: Any
) -> None:
    ranks = list(range(3, 3 + size * nodes))
    random.shuffle(ranks)
    found = Nodes.of(size, ranks)
    assert found.size == size
    assert [rank for node in found.ranks for rank in node] == ranks
    for rank in ranks:
        inside, between = found.inside(rank), found.between(rank)
        assert (len(inside), len(between)) == (size, nodes)
        assert set(inside) & set(between) == {rank}
        assert found.inside(rank).index(rank) == ranks.index(rank) % size
        for other in between:
            assert found.between(other) == between
        for other in inside:
            assert found.inside(other) == inside


def test_ranks_of_equal_place_are_in_the_order_of_their_nodes() -> None:
    nodes = Nodes.of(np.int64(2), [4, 5, 0, 1, 2, 3])
    assert nodes.ranks == ((4, 5), (0, 1), (2, 3))
    assert nodes.between(1) == (5, 1, 3)


@pytest.mark.parametrize(
    ("size", "ranks", "expected"),
    [
        ("4", range(8), ((0, 1, 2, 3), (4, 5, 6, 7))),
        # Groups that leave out ranks: only their numbers tell which node they are on.
        ("4", [0, 1, 4, 5], ((0, 1), (4, 5))),
        ("4", [5, 1, 4, 0], ((5, 4), (1, 0))),
        ("2", [3, 5, 6], ((3,), (5,), (6,))),
        ("8", range(3), ((0, 1, 2),)),
        # Nodes of several sizes, and what torchrun does not set.
        *(("4", ranks, None) for ranks in (range(6), [0, 1, 4])),
        *((size, range(4), None) for size in (None, "", "two", "0", "-1", "1.5", "\u00b2")),
    ],
)
def test_auto_divides_ranks_by_their_number_in_the_job(
    size: str | None, ranks: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", size)
    if expected is not None:
        assert Nodes.of("auto", list(ranks)).ranks == expected
    else:
        assert ("LOCAL_WORLD_SIZE" in refused("auto", ranks)) == (size != "4")


def refused(nodes: Any, ranks: Any) -> str:
    error = raised_by(lambda: Nodes.of(nodes, list(ranks)))
    assert type(error) is SpecError
    assert error.field == "nodes"
    return str(error)


@pytest.mark.parametrize(
    "nodes",
    [
        *(0, -1, True, 2.0, "2", "AUTO", "", None, [2], (2, 2), {"nodes": 2}),
        *(np.array([[0, 1], [2, 3]]), torch.tensor([2, 3]), np.array(["auto"])),
        *(3, 5, 8),  # do not divide 4 ranks
    ],
)
def test_anything_else_is_refused(nodes: Any) -> None:
    refused(nodes, range(4))


def of_mesh(ranks: Any, group: Any) -> Any:
    """The nodes of a mesh of these ranks, or the error, in a job of 8 ranks."""

    def body() -> Any:
        mesh = DeviceMesh("cpu", torch.tensor(ranks))
        try:
            return Nodes.of(mesh, group).ranks
        except SpecError as error:
            return error

    return with_fake_ranks(8, body)


@pytest.mark.parametrize(
    "ranks",
    [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 2], [6, 4], [1, 3], [5, 7]],
        [[0], [1], [2], [3], [4], [5], [6], [7]],
        [[7, 6, 5, 4, 3, 2, 1, 0]],
        [[0, 5], [2, 7]],  # a part of the job
    ],
)
def test_a_mesh_lists_the_ranks_of_each_node(ranks: Any) -> None:
    assert of_mesh(ranks, sorted(rank for node in ranks for rank in node)) == tuple(
        map(tuple, ranks)
    )


@pytest.mark.parametrize(
    ("ranks", "group"),
    [
        (list(range(8)), range(8)),
        ([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], range(8)),
        ([[0, 1], [2, 3]], range(8)),
        ([[0, 1], [2, 3]], [0, 1]),
        ([[0, 1], [2, 3]], [0, 1, 2, 4]),
    ],
)
def test_a_mesh_that_is_no_plane_of_the_ranks_is_refused(ranks: Any, group: Any) -> None:
    error = of_mesh(ranks, list(group))
    assert type(error) is SpecError
    assert error.field == "nodes"
