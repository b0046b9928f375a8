"""explain with nodes: bytes through a network card, against those that a run counts."""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchcomp
from tests.support.models import METHODS, SMALL_BUCKETS, loss_of, mlp, rows, wrap
from tests.support.ranks import on_threads
from torchcomp import SpecError, explain, run_in_process
from torchcomp.exchange import InProcessExchange
from torchcomp.traffic import COPIED

RESNET50 = 25_557_032


def estimated(spec: str) -> bool:
    """Whether the sizes of messages depend on the values, so that the plan is an estimate."""
    method = torchcomp.parse(spec)
    return 'exchange="sharded"' in spec or getattr(method, "selection", "shard") == "exact"


SPECS = [spec for spec in METHODS if "warmup" not in spec]


# --- Two levels -----------------------------------------------------------------------------------


def trained(spec: str, ranks: int, nodes: int, width: int) -> Any:
    model = wrap(mlp(torch.float32, width=width), bucket_cap_mb=SMALL_BUCKETS)
    options = {"world_size": ranks, "rank": dist.get_rank(), "nodes": nodes}
    plan = explain(spec, model=model, **options)
    handle = torchcomp.register(model, spec, nodes=nodes)
    for step in range(2):
        loss_of(model(rows(step, torch.float32, width=width))).backward()
    slots = handle.state_dict()["slots"]
    stored = [t for slot in slots.values() for t in slot["tensors"].values()]
    kept = 2 * sum(t.numel() * t.element_size() for t in stored)
    return plan.nodes, handle.stats, kept


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not estimated(spec)])
@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (6, 3)])
def test_counted_bytes_of_two_levels_equal_the_plan(spec: str, ranks: int, nodes: int) -> None:
    found = on_threads(ranks, trained, spec, ranks, nodes, 16)
    for plan, stats, kept in found:
        assert stats.bytes_sent == plan.bytes_sent
        assert stats.inside_bytes_sent == plan.inside_bytes_sent
        assert stats.dense_bytes_sent == plan.dense_card_bytes // nodes
        assert kept == plan.memory_bytes
    for first in range(0, ranks, nodes):
        node = found[first : first + nodes]
        assert sum(stats.bytes_sent for _, stats, _ in node) == node[0][0].card_bytes


@pytest.mark.parametrize("spec", [spec for spec in SPECS if estimated(spec)])
def test_bytes_of_exact_selections_are_near_the_plan_of_two_levels(spec: str) -> None:
    found = on_threads(4, trained, spec, 4, 2, 64)
    counted = sum(stats.bytes_sent for _, stats, _ in found)
    assert counted == pytest.approx(found[0][0].card_bytes + found[2][0].card_bytes, rel=0.15)


# --- The flat method ------------------------------------------------------------------------------


class Recorder(InProcessExchange):
    """Records the bytes of messages by receiver, as gloo sends them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.to = [Fraction(0)] * self.world_size

    def any_of(self, flags: Tensor) -> Tensor:
        messages = list(self.to)
        combined = super().any_of(flags)
        self.to = messages  # without the checks
        return combined

    def _all_reduce(self, values: Tensor) -> None:
        self._around(Fraction(2 * (self.world_size - 1) * values.nbytes, self.world_size))
        super()._all_reduce(values)

    def _all_gather(self, mine: Tensor) -> Tensor:
        if mine.nbytes > COPIED:
            self._around((self.world_size - 1) * mine.nbytes)
        else:
            self.to = [nbytes + mine.nbytes for nbytes in self.to]
        return super()._all_gather(mine)

    def _all_to_all(
        self, outgoing: Tensor, sizes: Sequence[int], arriving: Sequence[int]
    ) -> Tensor:
        parts = zip(self.to, sizes, strict=True)
        self.to = [nbytes + size * outgoing.element_size() for nbytes, size in parts]
        return super()._all_to_all(outgoing, sizes, arriving)

    def _around(self, nbytes: Fraction | int) -> None:
        self.to[(self.rank + 1) % self.world_size] += nbytes


def recorded(spec: str, model: nn.Module, ranks: int, nodes: int) -> list[float]:
    """The bytes of the second step through the card of each node, by what the ranks sent."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def body(exchange: Recorder) -> list[Fraction]:
        averager = torchcomp.Averager(spec, exchange, parameters)
        generator = torch.Generator().manual_seed(exchange.rank)
        for _ in range(2):
            # The first step of an exact downlink has no threshold to start from.
            exchange.to = [Fraction(0)] * ranks
            averager.average_all(
                {name: torch.randn(p.shape, generator=generator) for name, p in parameters.items()}
            )
        return exchange.to

    sent = run_in_process(ranks, body, Recorder.ranks(ranks))
    return [
        float(sum(sent[r][to] for r in range(ranks) for to in range(ranks) if inside(r) and not inside(to)))
        for inside in [range(at, at + nodes).__contains__ for at in range(0, ranks, nodes)]
    ]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (6, 3), (6, 2), (3, 1), (3, 3)])
def test_card_bytes_of_the_flat_method_are_those_that_leave_a_node(
    spec: str, ranks: int, nodes: int
) -> None:
    # 1,017 elements: no number of ranks divides them.
    model = nn.Sequential(nn.Linear(31, 30), nn.Linear(30, 1, bias=False), nn.Linear(1, 27, False))
    cards = recorded(spec, model, ranks, nodes)
    options: dict[str, Any] = {"model": model, "world_size": ranks, "nodes": nodes}
    planned = [explain(spec, rank=at, **options).nodes for at in range(0, ranks, nodes)]
    for counted, plan in zip(cards, planned, strict=True):
        assert plan is not None
        rough = {"rel": 0.2} if estimated(spec) else {"abs": 1}  # an all-reduce is rounded down
        assert counted == pytest.approx(plan.flat_card_bytes, **rough)
    assert planned[0] is not None
    assert planned[0].dense_card_bytes == (
        0 if nodes == ranks else explain(spec, **options).dense_bytes_sent
    )
