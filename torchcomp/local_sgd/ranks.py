"""Ranks: those that average with each other, and those that step together between averages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from torchcomp.errors import SpecError
from torchcomp.exchange import Exchange

Built = TypeVar("Built")
Across = dist.ProcessGroup | DeviceMesh

GIVEN = "one of its own"
"""What ranks compare of a process group that they were given."""


@dataclass
class Ranks:
    """The process groups of local steps.

    Attributes:
        between: the ranks that average with each other.
        inside: the ranks whose gradients DDP reduces at every step, if it does.
    """

    between: Exchange
    inside: Exchange | None = None

    @classmethod
    def of(cls, model: DistributedDataParallel, group: "Across | None") -> "Ranks":
        """The ranks of a model, or, if there is a `group`, its nodes and the ranks between them.

        Raises:
            SpecError: if `group` does not take one rank of each node.
        """
        # Not of a parameter that will be refused, on all ranks, for having no values.
        devices = (p.device for p in model.module.parameters() if not p.is_meta)
        device = next(devices, torch.device("cpu"))
        node = Exchange(model.process_group, device)
        if group is None:
            return cls(node)
        between = node.agree(
            "torchcomp.LocalSGD",
            {"process_group": GIVEN},
            lambda: (Exchange(_across(group, model.process_group), device), {}),
        )
        return cls(between, node)

    def agree(
        self,
        what: str,
        given: dict[str, Any],
        build: Callable[[], tuple[Built, dict[str, Any]]],
        advice: str = "",
    ) -> Built:
        """See :meth:`Exchange.agree`; among all ranks of both groups."""
        if self.inside is None:
            return self.between.agree(what, given, build, advice)
        inside = self.inside

        def build_inside() -> tuple[Built, dict[str, Any]]:
            facts: dict[str, Any] = {}

            def keep_facts() -> tuple[Built, dict[str, Any]]:
                built, found = build()
                facts.update(found)
                return built, found

            return inside.agree(what, given, keep_facts, advice), facts

        return self.between.agree(what, given, build_inside, advice)

    def attempt(self, what: str, action: Callable[[], None]) -> None:
        """Do what fails on all ranks of `between` or on none; then the ranks inside fail with them.

        Raises:
            RankMismatchError: if it failed for other ranks of this node.
            Exception: what `action` raised.
        """
        if self.inside is None:
            action()
            return

        def build() -> tuple[None, dict[str, Any]]:
            action()
            return None, {}

        self.inside.agree(what, {}, build)


def _across(given: object, node: dist.ProcessGroup) -> dist.ProcessGroup:
    one_way = isinstance(given, DeviceMesh) and given.ndim == 1
    group = given.get_group() if one_way else given  # type: ignore[attr-defined]
    if not isinstance(group, dist.ProcessGroup):
        raise SpecError(
            "process_group must be a torch.distributed.ProcessGroup or a DeviceMesh of one "
            f"dimension that holds this rank, not {type(group).__name__}"
        )
    mine, across = dist.get_process_group_ranks(node), dist.get_process_group_ranks(group)
    shared = sorted(set(mine) & set(across))
    if shared != [dist.get_rank()]:
        raise SpecError(
            "process_group averages between groups of ranks that DDP keeps together, so it takes "
            f"one rank of each; DDP's group of this rank is {mine}, and process_group {across} "
            f"shares {shared} with it. For local steps of every rank, leave process_group out"
        )
    return group
