"""Nodes: which ranks share a machine."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.support.outcomes import raised_by
from tests.support.ranks import with_fake_ranks
from torchcomp import SpecError
from torchcomp.exchange.nodes import Nodes


def test_ranks_of_equal_place_are_in_the_order_of_their_nodes() -> None:
    nodes = Nodes.of(np.int64(2), [4, 5, 0, 1, 2, 3])
    assert (nodes.size, nodes.ranks) == (2, ((4, 5), (0, 1), (2, 3)))
    assert [nodes.between(rank) for rank in (5, 1, 3)] == [(5, 1, 3)] * 3
    assert [nodes.inside(rank) for rank in (4, 5)] == [(4, 5)] * 2


@pytest.mark.parametrize(
    ("size", "ranks", "expected"),
    [
        ("4", range(8), ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("4", [0, 1, 4, 5], ((0, 1), (4, 5))),
        ("4", [5, 1, 4, 0], ((5, 4), (1, 0))),
        ("8", range(3), ((0, 1, 2),)),
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


@pytest.mark.parametrize(
    ("nodes", "group"),
    [
        ([[0, 1, 2, 3], [4, 5, 6, 7]], range(8)),
        ([[0, 2], [6, 4], [1, 3], [5, 7]], range(8)),
        ([[7, 6, 5, 4, 3, 2, 1, 0]], range(8)),
        ([[0, 5], [2, 7]], [0, 2, 5, 7]),  # a part of the job
        # No plane, or of other ranks.
        (list(range(8)), None),
        ([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], None),
        ([[0, 1], [2, 3]], None),
    ],
)
def test_a_mesh_lists_the_ranks_of_each_node(nodes: Any, group: Any) -> None:
    def body() -> None:
        mesh = DeviceMesh("cpu", torch.tensor(nodes))
        if group is None:
            refused(mesh, range(8))
        else:
            assert Nodes.of(mesh, list(group)).ranks == tuple(map(tuple, nodes))

    with_fake_ranks(8, body)
