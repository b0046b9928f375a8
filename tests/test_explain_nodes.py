"""explain with nodes: bytes through a network card, against those that a run counts."""

import re
from fractions import Fraction
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchcomp
from tests.support.cases import only, thorough
from tests.support.models import METHODS, SMALL_BUCKETS, loss_of, mlp, rows, wrap
from tests.support.ranks import on_threads
from torchcomp import explain, run_in_process
from torchcomp.exchange import InProcessExchange
from torchcomp.exchange.traffic import COPIED

RESNET50 = 25_557_032


def estimated(spec):
    """Whether the sizes of messages depend on the values, so that the plan is an estimate."""
    method = torchcomp.parse(spec)
    return 'exchange="sharded"' in spec or getattr(method, "selection", "shard") == "exact"


SPECS = [spec for spec in METHODS if "warmup" not in spec]
NOW = ("mean", "ef(topk(0.1))", 'ef(quantize("int8"))', 'ef(topk(0.1), exchange="sharded")')
NOW += ("powersgd(rank=1)", "bidirectional(topk(0.1), topk(0.1))")
NOW += ('bidirectional(topk(0.1), topk(0.1), selection="exact")',)


def trained(spec, ranks, nodes, width):
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


@pytest.mark.parametrize("spec", only(SPECS, now=NOW))
@pytest.mark.parametrize("nodes", [2, *thorough([3])])
def test_counted_bytes_of_two_levels_equal_the_plan(spec, nodes):
    ranks, rough = 2 * nodes, estimated(spec)
    found = on_threads(ranks, trained, spec, ranks, nodes, 64 if rough else 16)
    for plan, stats, kept in found:
        assert rough or stats.bytes_sent == plan.bytes_sent
        assert stats.inside_bytes_sent == plan.inside_bytes_sent
        assert stats.dense_bytes_sent == plan.dense_card_bytes // nodes
        assert rough or kept == plan.memory_bytes
    sent = [sum(stats.bytes_sent for _, stats, _ in found[i : i + nodes]) for i in (0, nodes)]
    planned = [found[i][0].card_bytes for i in (0, nodes)]
    assert sum(sent) == pytest.approx(sum(planned), rel=0.15) if rough else sent == planned


class Recorder(InProcessExchange):
    """Records the bytes of messages by receiver, as gloo sends them."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.to = [Fraction(0)] * self.world_size

    def level_max(self, numbers):
        messages = list(self.to)
        combined = super().level_max(numbers)
        self.to = messages  # without the checks
        return combined

    def _all_reduce(self, values):
        self._around(Fraction(2 * (self.world_size - 1) * values.nbytes, self.world_size))
        super()._all_reduce(values)

    def _all_gather(self, mine):
        if mine.nbytes > COPIED:
            self._around((self.world_size - 1) * mine.nbytes)
        else:
            self.to = [nbytes + mine.nbytes for nbytes in self.to]
        return super()._all_gather(mine)

    def _all_to_all(self, outgoing, sizes, arriving):
        parts = zip(self.to, sizes, strict=True)
        self.to = [nbytes + size * outgoing.element_size() for nbytes, size in parts]
        return super()._all_to_all(outgoing, sizes, arriving)

    def _around(self, nbytes):
        self.to[(self.rank + 1) % self.world_size] += nbytes


def recorded(spec, model, ranks, nodes):
    """The bytes of the second step through the card of each node, by what the ranks sent."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def body(exchange):
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
    cards = [0.0] * (ranks // nodes)
    for rank, to in product(range(ranks), repeat=2):
        if rank // nodes != to // nodes:
            cards[rank // nodes] += float(sent[rank][to])
    return cards


@pytest.mark.parametrize("spec", only(SPECS, now=NOW))
@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (6, 3), (6, 2), (3, 1), (3, 3)])
def test_card_bytes_of_the_flat_method_are_those_that_leave_a_node(spec, ranks, nodes):
    # 1,017 elements: no number of ranks divides them.
    model = nn.Sequential(nn.Linear(31, 30), nn.Linear(30, 1, bias=False), nn.Linear(1, 27, False))
    cards = recorded(spec, model, ranks, nodes)
    options = {"model": model, "world_size": ranks, "nodes": nodes}
    planned = [explain(spec, rank=at, **options).nodes for at in range(0, ranks, nodes)]
    for counted, plan in zip(cards, planned, strict=True):
        rough = {"rel": 0.2} if estimated(spec) else {"abs": 1}  # an all-reduce is rounded down
        assert counted == pytest.approx(plan.flat_card_bytes, **rough)
    assert planned[0].dense_card_bytes == (
        0 if nodes == ranks else explain(spec, **options).dense_bytes_sent
    )


def test_a_long_message_of_an_all_gather_goes_around_a_ring():
    plan = explain("quantize(int8)", numel=1_200_000, world_size=4, nodes=2)
    assert plan.message_bytes > COPIED
    cards = recorded("quantize(int8)", nn.Linear(600_000, 2, bias=False), 4, 2)
    assert cards == [plan.nodes.flat_card_bytes] * 2


def test_the_plan_of_resnet50_on_two_nodes_of_four_ranks():
    plan = explain("bidirectional(topk(0.01), topk(0.01))", numel=RESNET50, world_size=8, nodes=4)
    # One message of the whole model up and down, of which the other node owns a half.
    assert plan.nodes.card_bytes == pytest.approx(plan.message_bytes, rel=0.001)
    assert plan.nodes.inside_bytes_sent == 2 * 3 * 4 * RESNET50 // 4
    # Two copies of the residuals, of which each rank has a fourth.
    assert plan.nodes.memory_bytes == 2 * 4 * (RESNET50 // 4 + RESNET50 // 8)
    assert "better nodes=4 sends 4x less" in re.sub(r"\s+", " ", str(plan))


def test_flat_is_better_where_pieces_are_padded():
    # One row: every piece has the length of the whole row.
    plan = explain("mean", model=nn.Linear(1000, 1, bias=False), world_size=8, nodes=4)
    assert (plan.nodes.flat_card_bytes, plan.nodes.card_bytes) == (7_000, 16_000)
    assert "the flat method sends 2.29x less" in str(plan)
