"""Nodes: which ranks share a machine and its network card."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from torchcomp.specs.checks import is_whole
from torchcomp.specs.errors import SpecError

_LOCAL = "LOCAL_WORLD_SIZE"  # how many processes a node has, as torchrun tells them


@dataclass(frozen=True)
class Nodes:
    """The global ranks of every node. The place of a rank is its position within its node."""

    ranks: tuple[tuple[int, ...], ...]  # of each node

    @property
    def size(self) -> int:
        """Ranks of a node, L, the same for all."""
        return len(self.ranks[0])

    def inside(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the node of `rank`, by place."""
        return next(node for node in self.ranks if rank in node)

    def between(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that have the place of `rank` in their nodes, by node."""
        place = self.inside(rank).index(rank)
        return tuple(node[place] for node in self.ranks)

    @classmethod
    def of(cls, nodes: object, ranks: Sequence[int]) -> "Nodes":
        """Divide global ranks, in the order of their group: `nodes` as of `register`."""
        if isinstance(nodes, DeviceMesh):
            return cls(_of_mesh(nodes, ranks))
        automatic = isinstance(nodes, str) and nodes == "auto"
        size: Any = nodes
        if automatic and os.environ.get(_LOCAL, "").isdecimal():
            size = int(os.environ[_LOCAL])
        if not is_whole(size) or size < 1:
            raise SpecError(
                "nodes must be the number of ranks of a node, a DeviceMesh with a dimension for "
                'nodes and one for their ranks, or "auto" in a script that torchrun has started, '
                f"which sets {_LOCAL}; not {nodes!r}",
                "nodes",
            )
        # torchrun numbers all ranks of the job node by node, also those that are not in the group.
        numbers = ranks if automatic else range(len(ranks))
        found: dict[int, list[int]] = {}
        for number, rank in zip(numbers, ranks, strict=True):
            found.setdefault(number // size, []).append(rank)
        if not automatic:
            check_divides(size, len(ranks))
        elif len({len(node) for node in found.values()}) > 1:
            raise _uneven(size, len(ranks))
        return cls(tuple(map(tuple, found.values())))


def check_divides(node: int, world_size: int) -> None:
    """Require that ranks can be divided into nodes of `node` ranks."""
    if world_size % node:
        raise _uneven(node, world_size)


def _uneven(node: int, world_size: int) -> SpecError:
    problem = f"{world_size} ranks cannot be divided into nodes of {node}"
    return SpecError(f"{problem}: all nodes must have the same number of ranks", "nodes")


def _of_mesh(mesh: DeviceMesh, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    found = mesh.mesh.tolist()
    if mesh.ndim != 2 or sorted(rank for node in found for rank in node) != sorted(ranks):
        raise SpecError(
            "nodes must be a DeviceMesh with two dimensions, nodes and the ranks of a node, such "
            'as init_device_mesh("cuda", (2, 4), mesh_dim_names=("node", "local")), with each of '
            f"the ranks {list(ranks)} once, not {found}",
            "nodes",
        )
    return tuple(map(tuple, found))
