"""explain: its numbers against hand calculations, and the table that it prints."""

import re

import numpy as np
import pytest
import torch
from torch import nn

import torchcomp
from tests.local_sgd.script import Script
from tests.support.ranks import on_threads
from torchcomp import ScheduleError, SpecError, UnsupportedModelError, explain

RESNET50 = 25_557_032
TOPK_MESSAGE = 255_571 * 4 + 191_679 + 81_863
"""Bytes of ceil(1 % of ResNet-50) entries: 4-byte values, 6-bit low parts, and the high part."""
TOPK_FRAME = 16 + TOPK_MESSAGE + 6
"""The message with its header, padded to a multiple of 8 bytes."""

LONG = "bidirectional(topk(0.01, values=int8), topk(0.01, values=int8), selection=exact)"


def topk(world_size, spec="ef(topk(0.01))", numel=RESNET50):
    return explain(spec, numel=numel, world_size=world_size)


def rows(plan):
    """The title of the table, and its rows as name -> value."""
    # A row that is wrapped goes on below its value.
    title, *lines = re.sub(r"\n {20}", " ", str(plan)).split("\n")
    return title, {line[2:19].strip(): line[20:] for line in lines}


def linears(*sizes):
    return nn.Sequential(*(nn.Linear(*size) for size in sizes))


def frozen():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[0].weight.requires_grad_(False)
    return model


def shared():
    model = linears((4, 4), (4, 4))
    model[1].weight = model[0].weight
    return model


# In reverse order, as in DDP: 1001 * 1001 + 1001 elements exceed the first bucket's megabyte and
# are one group; the rest is another.
TWO_GROUPS = linears((1000, 1001), (1001, 1001))
LINEAR, LINEAR_16 = nn.Linear(4, 4), nn.Linear(4, 4).half()
# Elias-Fano of 100 of 1000 elements: low parts of 3 bits each, and a high part of 100 + 124 bits.
CODES = 38 + 28
QSR = {"spec": "qsr(alpha=1.0, h_base=2)", "lr": lambda step: 1.0 if step < 20 else 0.1}
DENSE = 2 * 7 * 4000 // 8  # bytes of 1000 elements in a ring of 8
TOPK = {
    "numel": RESNET50,
    "world_size": 8,
    "message_bytes": TOPK_MESSAGE,
    "bytes_sent": 7 * TOPK_FRAME,
    "bytes_received": 7 * TOPK_FRAME,
    "dense_bytes_sent": 2 * 7 * 4 * RESNET50 // 8,
    # Two float32 copies of the residual.
    "memory_bytes": 8 * RESNET50,
    "collective": "allgather",
    "syncs": None,
    "total_steps": None,
}


def summed(message):
    """What a method sends by a ring all-reduce among 8 ranks."""
    sent = 2 * 7 * message // 8
    expected = {"message_bytes": message, "bytes_sent": sent, "bytes_received": sent}
    return expected | {"collective": "allreduce", "break_even_world_size": None}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"spec": "ef(topk(0.01))", "numel": RESNET50}, TOPK),
        ({"spec": "mean"}, summed(4000) | {"memory_bytes": 0}),
        ({"spec": "cast('bf16')"}, summed(2000)),
        ({"spec": "ef(randk(0.1))"}, summed(400)),
        ({"spec": "mean(randk(k=10, unbiased=True))"}, summed(40)),
        # The state.
        ({"spec": "topk(0.1)"}, {"memory_bytes": 0}),
        ({"spec": "ef(topk(0.1), memory_dtype='bf16')"}, {"memory_bytes": 2 * 2 * 1000}),
        # The dtype of the gradient.
        *(
            (
                {"spec": "ef(topk(0.1))", "world_size": 2, "dtype": dtype},
                {
                    "message_bytes": 100 * dtype.itemsize + CODES,
                    "memory_bytes": max(8, 2 * dtype.itemsize) * 1000,
                    "dense_bytes_sent": 1000 * dtype.itemsize,
                },
            )
            for dtype in (torch.float16, torch.float32, torch.float64)
        ),
        ({"spec": "ef(topk(0.01))", "world_size": 1}, {"bytes_sent": 0, "dense_bytes_sent": 0}),
        ({"spec": "ef(topk(0.01))", "numel": 0}, {"message_bytes": 0, "bytes_sent": 0}),
        # Models.
        (
            {"spec": "ef(topk(0.01))", "model": TWO_GROUPS},
            {"numel": 2_005_003, "memory_bytes": 8 * 2_005_003}
            | {"message_bytes": (10_021 + 10_031) * 4 + (7516 + 3210) + (7524 + 3213)},
        ),
        # Bitmaps of 15 and 5 bits.
        (
            {"spec": "topk(0.5, scope='tensor')", "model": nn.Linear(3, 5)},
            {"message_bytes": (8 + 3) * 4 + 2 + 1},
        ),
        ({"spec": "mean", "model": frozen()}, {"numel": 4 + 4 + 4}),
        ({"spec": "mean", "model": shared()}, {"numel": 16 + 4 + 4}),
        ({"spec": "mean", "model": nn.Sequential(LINEAR, LINEAR_16)}, {"message_bytes": 20 * 6}),
        # Schedules. The last round counts in full.
        (
            {"spec": "every(4)", "total_steps": 100},
            {"syncs": 25, "total_steps": 100, "bytes_sent": DENSE // 4, "memory_bytes": 0}
            | {"bytes_received": DENSE // 4, "dense_bytes_sent": DENSE, "collective": "allreduce"},
        ),
        ({"spec": "every(4)", "world_size": 2, "total_steps": 10}, {"bytes_sent": 1200}),
        # 10 rounds of 2 steps, then 2 rounds of 100. During warm-up every round has 2 steps.
        ({**QSR, "total_steps": 220}, {"syncs": 10 + 2}),
        ({**QSR, "total_steps": 220, "warmup_steps": 40}, {"syncs": 10 + 10 + 2}),
        # Parameters are averaged in float32 or wider.
        (
            {"spec": "every(1)", "world_size": 2, "total_steps": 9, "dtype": torch.bfloat16},
            {"bytes_sent": 4000, "dense_bytes_sent": 2000},
        ),
        # Two copies of the residual, and the parameters of the last synchronisation.
        (
            {"spec": "every(4)", "numel": RESNET50, "total_steps": 100}
            | {"compress": "ef(topk(0.01))"},
            {"bytes_sent": round(7 * TOPK_FRAME / 4), "message_bytes": TOPK_MESSAGE}
            | {"memory_bytes": (8 + 4) * RESNET50, "collective": "allgather"}
            | {"break_even_world_size": None},
        ),
        # The parameters of the last synchronisation, and the outer momentum.
        (
            {"spec": "every(4)", "total_steps": 100, "outer": "nesterov(lr=0.5)"}
            | {"compress": 'cast("bf16")'},
            {"spec": 'every(4) with compress=mean(cast("bf16")), outer=nesterov(lr=0.5)'}
            | {"memory_bytes": 2 * 4 * 1000, "bytes_sent": DENSE // 8},
        ),
    ],
)
def test_a_plan_by_hand(options, expected):
    size = {} if "model" in options else {"numel": 1000}
    plan = explain(**{"world_size": 8, **size, **options})
    assert {name: getattr(plan, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("world_size", "times"), [(2, 78.89), (8, 19.72), (64, 2.465), (200, 0.7889)]
)
def test_gathering_saves_less_as_ranks_grow_and_loses_in_the_end(world_size, times):
    gathered, chosen = topk(world_size, 'ef(topk(0.01), exchange="allgather")'), topk(world_size)
    assert gathered.dense_bytes_sent / gathered.bytes_sent == pytest.approx(times, rel=1e-3)
    # It does not depend on the number of ranks.
    assert gathered.break_even_world_size == 158
    assert re.search(r"\b158\b", rows(gathered)[1]["break-even"])
    # From about 80 ranks on, "auto" is sharded, which stays below plain DDP.
    sharded = topk(world_size, 'ef(topk(0.01), exchange="sharded")')
    assert chosen.bytes_sent == min(gathered.bytes_sent, sharded.bytes_sent)
    assert chosen.collective == ("allgather" if world_size < 80 else "sharded")
    assert chosen.break_even_world_size is None
    assert chosen.bytes_sent < chosen.dense_bytes_sent


@pytest.mark.parametrize(
    ("spec", "numel"),
    [
        ("ef(topk(0.01), exchange='allgather')", RESNET50),
        ("mean(topk(0.25), exchange='allgather')", 10_001),
        ("mean(cast('bf16'), exchange='allgather')", 1000),
        # A frame has 16 bytes, which is more than the four values of a shard.
        ("ef(topk(0.5), exchange='sharded')", 1000),
    ],
)
def test_break_even_is_the_first_world_size_without_a_saving(spec, numel):
    even = topk(2, spec, numel).break_even_world_size
    at, below = (explain(spec, numel=numel, world_size=n, rank=n - 1) for n in (even, even - 1))
    assert at.bytes_sent >= at.dense_bytes_sent
    assert below.bytes_sent < below.dense_bytes_sent or even == 2


@pytest.mark.parametrize(
    "method", ["ef(warmup(topk(0.2), steps=2))", "bidirectional(topk(0.2), topk(0.2))"]
)
def test_compressed_averages_are_counted_as_a_run_counts_them(method):
    def run():
        script = Script("every(3)", total_steps=9, local={"compress": method}, bucket_cap_mb=0.0002)
        script.train(0, 9)
        options = {"world_size": 3, "total_steps": 9, "rank": torch.distributed.get_rank()}
        planned = explain("every(3)", model=script.model, compress=method, **options)
        return script.sync.stats.total_bytes_sent, planned

    for counted, plan in on_threads(3, run):
        assert plan.syncs == 3
        assert counted / 9 == pytest.approx(plan.bytes_sent, abs=0.5)
        assert plan.spec == f"every(3) with compress={torchcomp.parse(method)}"


def test_break_even_of_averages_counts_the_steps_between_them():
    options = {"numel": RESNET50, "total_steps": 100}
    options["compress"] = 'ef(topk(0.01), exchange="allgather")'
    plan = explain("every(4)", world_size=8, **options)
    # One all-gather per 4 steps of plain DDP.
    assert plan.break_even_world_size == -(-4 * 2 * 4 * RESNET50 // TOPK_FRAME)


@pytest.mark.parametrize(
    ("spec", "world_size", "numel"),
    [("mean", 1, 0), (LONG, 1000, RESNET50), ("every(7)", 10**6, 10**12)],
)
def test_a_table_fits_80_columns_and_writes_large_numbers_out(spec, world_size, numel):
    run = {"total_steps": 99_999} if spec.startswith("every") else {}
    text = str(explain(spec, numel=numel, world_size=world_size, **run))
    assert max(map(len, text.split("\n"))) <= 80
    assert not re.search(r"\de[+-]\d", text)
    # One rank sends nothing, and DDP neither: there is no ratio.
    assert world_size > 1 or not re.search(r"\d", rows(text)[1]["traffic"])
    assert spec != "every(7)" or "14,286 of 99,999 steps (14.3%)" in text


def test_integers_of_numpy_are_those_of_python():
    method, small = "bidirectional(topk(0.1), topk(0.1))", np.uint8(200)
    found = explain(method, numel=np.int32(2**31 - 1), world_size=small, nodes=np.int64(8))
    assert found == explain(method, numel=2**31 - 1, world_size=200, nodes=8)


QSR_OF_9 = {"spec": "qsr(alpha=0.1, h_base=2)", "total_steps": 9}


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"numel": None}, SpecError, "neither"),
        ({"model": nn.Linear(1, 1)}, SpecError, "both"),
        *(({"numel": bad}, SpecError, "numel") for bad in (-1, 2.5, True)),
        *(({"world_size": bad}, SpecError, "world_size") for bad in (0, 2.0, 10**20)),
        ({"rank": 2}, SpecError, "rank"),
        ({"dtype": torch.int8}, SpecError, "dtype"),
        ({"spec": "meen"}, SpecError, "'mean'"),
        *(({"nodes": bad}, SpecError, "nodes") for bad in (0, 3, 4, 2.0, "auto")),
        # A method takes no arguments of schedules, and a schedule no nodes.
        ({"compress": "ef(topk(0.01))"}, SpecError, "compress"),
        ({"outer": "slowmo"}, SpecError, "outer"),
        ({"lr": float}, SpecError, "lr"),
        ({"total_steps": 9}, SpecError, "total_steps"),
        ({"warmup_steps": 2}, SpecError, "warmup_steps"),
        ({"spec": "every(4)", "total_steps": 9, "nodes": 2}, SpecError, "nodes"),
        ({"spec": "every(4)"}, SpecError, "total_steps"),
        ({"spec": "every(4)", "total_steps": 0}, SpecError, "total_steps"),
        ({"spec": "every(4)", "total_steps": 5, "warmup_steps": 6}, SpecError, "warmup_steps"),
        (QSR_OF_9, SpecError, "lr"),
        ({**QSR_OF_9, "lr": 0.1}, SpecError, "lr"),
        ({**QSR_OF_9, "lr": lambda step: 0.0}, ScheduleError, "step 0"),
        ({"numel": None, "model": nn.Linear}, UnsupportedModelError, "type"),
    ],
)
def test_a_bad_argument_is_refused(options, error, word):
    with pytest.raises(error, match=rf"\b{word}\b" if word.isidentifier() else word):
        explain(**{"spec": "mean", "numel": 5, "world_size": 2, **options})
