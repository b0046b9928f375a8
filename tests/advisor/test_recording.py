"""Recordings: their bytes are those that are planned, for every method and number of ranks."""

import time

import pytest
import torch
from torch import nn

from torchcomp.advisor import record, record_all_reduce, record_average
from torchcomp.advisor.collectives import ALL_GATHER, ALL_REDUCE, ALL_REDUCE_BF16
from torchcomp.advisor.simulation import Call, Work
from torchcomp.aggregators import AGGREGATORS, planned_traffic
from torchcomp.compressors import COMPRESSORS
from torchcomp.engine.bucket import BucketShape, partition
from torchcomp.exchange.traffic import sum_bytes
from torchcomp.specs.errors import SpecError
from torchcomp.specs.spec import parse_aggregator

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(30, 64), nn.Linear(64, 48), nn.BatchNorm1d(48))
PARAMETERS = dict(MODEL.named_parameters())
GROUPS = partition(PARAMETERS.items(), (4 * 48, 10_000))
# DDP's buckets, in which one group is spread over two.
NAMES = [name for group in GROUPS for name in group]
BUCKETS = [tuple(NAMES[:3]), tuple(NAMES[3:])]
SHAPES = [BucketShape.of(group, PARAMETERS) for group in GROUPS]

SPECS = sorted(cls.example or cls.name for cls in (*AGGREGATORS, *COMPRESSORS))
SPECS += ['ef(topk(0.1), exchange="sharded")', 'bidirectional(quantize("int4"), quantize("int4"))']
SPECS += ['ef(topk(0.1, scope="model"), exchange="allgather")']
SPECS += ["dgc(warmup(topk(0.1), steps=10, start=0.25))"]


def recorded(spec, world_size):
    return record(spec, PARAMETERS, world_size, buckets=BUCKETS, groups=GROUPS, steps=2)


def sent(calls, world_size):
    """Bytes that a rank sends in these collectives."""
    total = 0
    for call in calls:
        if call.kind in (ALL_REDUCE, ALL_REDUCE_BF16):
            total += sum_bytes(call.nbytes, world_size)
        elif call.kind == ALL_GATHER:
            total += call.nbytes * (world_size - 1)
        else:
            total += call.nbytes
    return total


def shapes_of(method):
    if not method.whole_model:
        return SHAPES
    return [BucketShape.of([n for group in GROUPS for n in group], PARAMETERS)]


@pytest.mark.parametrize("world_size", [3, 64])
@pytest.mark.parametrize("spec", SPECS)
def test_a_recording_has_the_planned_bytes(spec, world_size):
    began = time.thread_time()
    recording = recorded(spec, world_size)
    passed = time.thread_time() - began
    method = parse_aggregator(spec)
    assert recording.method == str(method.settled)
    assert [bucket.names for bucket in recording.buckets] == BUCKETS
    calls = recording.calls()
    # The end of a step: two bytes to every other rank, unless nothing is checked.
    control = calls.pop() if calls[-1] == Call(ALL_GATHER, 2) else None
    planned = planned_traffic(method, shapes_of(method), world_size).sent
    costs = [method.settled.cost(shape, world_size) for shape in shapes_of(method)]
    if any(cost.collective == "sharded" for cost in costs) and "bidirectional" not in spec:
        # Selected from the whole bucket: the entries in each shard depend on the values.
        assert sent(calls, world_size) == pytest.approx(planned, rel=0.03)
    else:
        # Each all-reduce is rounded separately.
        assert abs(sent(calls, world_size) - planned) < len(calls)
    assert (control is None) == all(c.kind in (ALL_REDUCE, ALL_REDUCE_BF16) for c in calls)
    # The work of this rank is between the collectives.
    lanes = [bucket.activities for bucket in recording.buckets]
    for kinds in ([type(activity) for activity in lane] for lane in lanes):
        assert kinds == [Work, Call] * (len(kinds) // 2) + [Work]
    works = [each.seconds for lane in lanes for each in lane if isinstance(each, Work)]
    assert 0 <= min(works) <= sum(works) <= passed


def test_an_exact_selection_is_recorded_with_its_search():
    spec = 'bidirectional(topk(0.1), topk(0.1), selection="exact")'
    planned = planned_traffic(parse_aggregator(spec), SHAPES, 4).sent
    # How long the search takes depends on the values.
    assert planned / 2 < sent(recorded(spec, 4).calls(), 4) < 2 * planned


def test_plain_ddp_and_the_bf16_hook():
    dense = record_all_reduce(PARAMETERS, buckets=BUCKETS)
    sizes = [BucketShape.of(names, PARAMETERS).nbytes for names in BUCKETS]
    assert dense.calls() == [Call(ALL_REDUCE, size) for size in sizes]
    half = record_all_reduce(PARAMETERS, buckets=BUCKETS, dtype=torch.bfloat16)
    assert half.calls() == [Call(ALL_REDUCE_BF16, size // 2) for size in sizes]
    assert (dense.method, half.method) == ("ddp", "bfloat16")
    assert [bucket.work for bucket in dense.buckets] == [0.0, 0.0]


def test_a_synchronisation_compares_the_ranks_and_averages_everything():
    before = {name: p.detach().clone() for name, p in PARAMETERS.items()}
    statistics = {"running_mean": MODEL[2].running_mean, "running_var": MODEL[2].running_var}
    recording = record_average(PARAMETERS, 4, groups=GROUPS, statistics=statistics, steps=2)
    nbytes = [shape.nbytes for shape in SHAPES]
    compared = Call(ALL_GATHER, 16)
    averaged = [Call(ALL_REDUCE, size) for size in (2 * 48 * 4, *nbytes)]
    assert recording.calls() == [compared, compared, *averaged]
    assert all(torch.equal(p, before[name]) for name, p in PARAMETERS.items())


SEARCH = "bidirectional(identity, topk(0.1, scope='tensor'), selection='exact')"


@pytest.mark.parametrize(
    ("spec", "world_size"), [("nothing", 4), ("mean", 0), ("mean", 1025), (SEARCH, 4)]
)
def test_bad_input_is_refused(spec, world_size):
    with pytest.raises(SpecError):
        recorded(spec, world_size)
