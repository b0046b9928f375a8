"""explain: its numbers against hand calculations, and the table that it prints."""

import re
import time

import numpy as np
import pytest
import torch
from torch import nn

import torchcomp
from tests.local_sgd.script import Script
from tests.support.cases import thorough
from tests.support.ranks import on_threads
from torchcomp import ScheduleError, SpecError, UnsupportedModelError, explain
from torchcomp.aggregators import EF
from torchcomp.compressors import TopK

RESNET50 = 25_557_032
TOPK_MESSAGE = 255_571 * 4 + 191_679 + 81_863
"""Bytes of ceil(1 % of ResNet-50) entries: 4-byte values, 6-bit low parts, and the high part."""
TOPK_FRAME = 16 + TOPK_MESSAGE + 6
"""The message with its header, padded to a multiple of 8 bytes."""

METHOD_ROWS = [
    "elements",
    "ranks",
    "collective",
    "message",
    "sent per step",
    "received per step",
    "plain DDP sends",
    "traffic",
    "break-even",
    "state per rank",
    "hint",
]


def topk(world_size, spec="ef(topk(0.01))", numel=RESNET50):
    return explain(spec, numel=numel, world_size=world_size)


def rows(plan):
    """The title of the table, and its rows as name -> value."""
    # A row that is wrapped goes on below its value.
    title, *lines = re.sub(r"\n {20}", " ", str(plan)).split("\n")
    return title, {line[2:19].strip(): line[20:] for line in lines}


def numbers(text):
    return re.findall(r"\d[\d,.]*", text)


def saving(plan):
    return plan.dense_bytes_sent / plan.bytes_sent


# --- Methods --------------------------------------------------------------------------------------


def test_one_percent_of_resnet50_at_8_ranks():
    plan = topk(world_size=8)
    assert plan.message_bytes == TOPK_MESSAGE
    assert plan.bytes_sent == plan.bytes_received == 7 * TOPK_FRAME
    assert plan.dense_bytes_sent == 2 * 7 * 4 * RESNET50 // 8
    assert saving(plan) == pytest.approx(19.72, rel=1e-3)
    # Two float32 copies of the residual.
    assert plan.memory_bytes == 8 * RESNET50
    assert (plan.numel, plan.world_size, plan.collective) == (RESNET50, 8, "allgather")
    assert (plan.syncs, plan.total_steps) == (None, None)


@pytest.mark.parametrize(
    ("world_size", "times"), [(2, 78.89), (8, 19.72), (64, 2.465), (200, 0.7889)]
)
def test_gathering_saves_less_as_ranks_grow_and_loses_in_the_end(world_size, times):
    gathered = topk(world_size, 'ef(topk(0.01), exchange="allgather")')
    assert saving(gathered) == pytest.approx(times, rel=1e-3)


def test_exchange_is_chosen_by_bytes():
    small, large = topk(64), topk(128)
    assert (small.collective, large.collective) == ("allgather", "sharded")
    assert saving(large) > saving(topk(128, 'ef(topk(0.01), exchange="allgather")'))
    assert saving(small) > saving(topk(64, 'ef(topk(0.01), exchange="sharded")'))
    assert large.break_even_world_size is None


@pytest.mark.parametrize("selection", ["exact", "shard"])
def test_bidirectional_saves_the_same_on_any_number_of_ranks(selection):
    spec = f'bidirectional(topk(0.01), topk(0.01), selection="{selection}")'
    few, many = topk(4, spec), topk(1000, spec)
    assert saving(few) == pytest.approx(78, rel=0.03)
    assert saving(many) == pytest.approx(saving(few), rel=0.1)
    assert few.break_even_world_size is many.break_even_world_size is None
    # Two copies of the worker's residual, and of the server's.
    assert few.memory_bytes == 8 * RESNET50 + 8 * -(-RESNET50 // 4)


def test_whole_model_is_one_group():
    model = nn.Sequential(nn.Linear(1000, 1001), nn.Linear(1001, 1001))
    plan = explain('ef(topk(k=7, scope="model"))', model=model, world_size=2)
    split = explain("ef(topk(k=7))", model=model, world_size=2)
    assert split.message_bytes == pytest.approx(2 * plan.message_bytes, rel=0.1)


@pytest.mark.parametrize(
    ("spec", "numel"),
    [
        ("ef(topk(0.01), exchange='allgather')", RESNET50),
        ("ef(topk(0.001), exchange='allgather')", RESNET50),
        ("mean(topk(0.25), exchange='allgather')", 10_001),
        ("ef(identity, exchange='allgather')", 1000),
        ("mean(cast('bf16'), exchange='allgather')", 1000),
    ],
)
def test_break_even_is_the_first_world_size_without_a_saving(spec, numel):
    even = topk(2, spec, numel).break_even_world_size
    at, below = topk(even, spec, numel), topk(even - 1, spec, numel)
    assert at.bytes_sent >= at.dense_bytes_sent
    assert below.bytes_sent < below.dense_bytes_sent or even == 2


@pytest.mark.parametrize("world_size", [1, 2, 64, 1000])
def test_break_even_does_not_depend_on_the_number_of_ranks(world_size):
    gathered = topk(world_size, 'ef(topk(0.01), exchange="allgather")')
    assert gathered.break_even_world_size == 158
    assert re.search(r"\b158\b", rows(gathered)[1]["break-even"])


def test_a_method_that_changes_its_exchange_has_no_break_even():
    # From about 80 ranks on, "auto" is sharded, which stays below plain DDP.
    assert topk(2).break_even_world_size is None
    assert saving(topk(158)) > 1


def test_small_shards_have_a_break_even():
    # A frame has 16 bytes, which is more than the four values of a shard.
    options = {"spec": "ef(topk(0.5), exchange='sharded')", "numel": 1000}
    even = explain(world_size=2, **options).break_even_world_size
    below, at = (explain(world_size=n, rank=n - 1, **options) for n in (even - 1, even))
    assert saving(at) <= 1 < saving(below)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mean", 4000),
        ("cast('bf16')", 2000),
        ("ef(randk(0.1))", 400),
        ("randk(k=10)", 40),
        ("mean(randk(k=10, unbiased=True))", 40),
    ],
)
def test_summed_methods_send_what_a_ring_all_reduce_sends(spec, message):
    plan = topk(8, spec, 1000)
    assert (plan.collective, plan.message_bytes) == ("allreduce", message)
    assert plan.bytes_sent == plan.bytes_received == 2 * 7 * message // 8
    assert plan.break_even_world_size is None


@pytest.mark.parametrize(
    ("spec", "memory"),
    [
        ("mean", 0),
        ("topk(0.1)", 0),
        ("ef(topk(0.1))", 2 * 4 * 1000),
        ("ef(topk(0.1), memory_dtype='bf16')", 2 * 2 * 1000),
        ("ef(topk(0.1), memory_dtype='fp64')", 2 * 8 * 1000),
    ],
)
def test_state_is_two_copies_of_the_residual(spec, memory):
    assert topk(8, spec, 1000).memory_bytes == memory


@pytest.mark.parametrize(
    ("dtype", "message", "memory"),
    [
        # Elias-Fano: low parts of 3 bits each, and a high part of 100 + 124 bits.
        (torch.float16, 100 * 2 + 38 + 28, 8 * 1000),
        (torch.float32, 100 * 4 + 38 + 28, 8 * 1000),
        (torch.float64, 100 * 8 + 38 + 28, 16 * 1000),
    ],
)
def test_dtype_is_that_of_the_gradient(dtype, message, memory):
    plan = explain("ef(topk(0.1))", numel=1000, world_size=2, dtype=dtype)
    assert (plan.message_bytes, plan.memory_bytes) == (message, memory)
    assert plan.dense_bytes_sent == 1000 * dtype.itemsize


def test_one_rank_sends_nothing():
    plan = topk(world_size=1)
    assert (plan.bytes_sent, plan.bytes_received, plan.dense_bytes_sent) == (0, 0, 0)
    # There is no ratio of 0 to 0 bytes.
    assert not re.search(r"\d", rows(plan)[1]["traffic"])


def test_no_elements_cost_nothing():
    plan = topk(8, numel=0)
    assert (plan.message_bytes, plan.bytes_sent, plan.memory_bytes) == (0, 0, 0)


def test_component_is_explained_like_its_string():
    assert explain(EF(TopK(0.01)), numel=1000, world_size=8) == topk(8, numel=1000)


# --- Models ---------------------------------------------------------------------------------------


def test_model_is_explained_group_by_group():
    # In reverse order, as in DDP: 1001 * 1001 + 1001 elements exceed the first bucket's megabyte
    # and are one group; the rest is another.
    model = nn.Sequential(nn.Linear(1000, 1001), nn.Linear(1001, 1001))
    plan = explain("ef(topk(0.01))", model=model, world_size=2)
    assert plan.numel == 1_002_001 + 1_003_002
    codes = (7516 + 3210) + (7524 + 3213)
    assert plan.message_bytes == (10_021 + 10_031) * 4 + codes
    assert plan.memory_bytes == 8 * plan.numel


def test_scope_tensor_counts_each_parameter():
    plan = explain("topk(0.5, scope='tensor')", model=nn.Linear(3, 5), world_size=2)
    # Bitmaps of 15 and 5 bits.
    assert plan.message_bytes == (8 + 3) * 4 + 2 + 1


def test_frozen_parameters_and_buffers_are_not_sent():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[0].weight.requires_grad_(False)
    assert explain("mean", model=model, world_size=2).numel == 4 + 4 + 4


def test_shared_parameters_are_sent_once():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    plan = explain("mean", model=nn.Sequential(first, second), world_size=2)
    assert plan.numel == 16 + 4 + 4


def test_parameters_of_two_dtypes_are_sent_each_in_its_own():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False).half())
    plan = explain("mean", model=model, world_size=2)
    assert plan.message_bytes == 16 * 4 + 16 * 2


# --- Schedules ------------------------------------------------------------------------------------


def test_every_divides_the_traffic_by_its_period():
    plan = explain("every(4)", numel=1000, world_size=8, total_steps=100)
    assert (plan.syncs, plan.total_steps) == (25, 100)
    assert plan.bytes_sent == plan.bytes_received == 2 * 7 * 4000 // 8 // 4
    assert plan.dense_bytes_sent == 2 * 7 * 4000 // 8
    assert (plan.memory_bytes, plan.collective) == (0, "allreduce")


def test_last_round_counts_in_full():
    plan = explain("every(4)", numel=1000, world_size=2, total_steps=10)
    assert plan.syncs == 3
    assert plan.bytes_sent == 4000 * 3 // 10


def test_qsr_counts_its_synchronisations():
    def lr(step):
        return 1.0 if step < 20 else 0.1

    options = {"numel": 1000, "world_size": 2, "total_steps": 220, "lr": lr}
    # 10 rounds of 2 steps, then 2 rounds of 100. During warm-up every round has 2 steps.
    assert explain("qsr(alpha=1.0, h_base=2)", **options).syncs == 10 + 2
    assert explain("qsr(alpha=1.0, h_base=2)", warmup_steps=40, **options).syncs == 10 + 10 + 2


def test_parameters_are_averaged_in_float32_or_wider():
    plan = explain("every(1)", numel=1000, world_size=2, total_steps=9, dtype=torch.bfloat16)
    assert (plan.bytes_sent, plan.dense_bytes_sent) == (4000, 2000)


@pytest.mark.parametrize(
    "method",
    [
        "ef(topk(0.2))",
        "ef(warmup(topk(0.2), steps=2))",
        'bidirectional(topk(0.2), topk(0.2), selection="shard")',
    ],
)
def test_compressed_averages_are_counted_as_a_run_counts_them(method):
    def run():
        script = Script("every(3)", total_steps=9, local={"compress": method}, bucket_cap_mb=0.0002)
        script.train(0, 9)
        planned = explain(
            "every(3)",
            model=script.model,
            world_size=3,
            total_steps=9,
            compress=method,
            rank=torch.distributed.get_rank(),
        )
        return script.sync.stats.total_bytes_sent, planned

    for counted, plan in on_threads(3, run):
        assert plan.syncs == 3
        assert counted / 9 == pytest.approx(plan.bytes_sent, abs=0.5)
        assert plan.spec == f"every(3) with compress={torchcomp.parse(method)}"


def test_the_plan_of_compressed_averages():
    plan = explain(
        "every(4)", numel=RESNET50, world_size=8, total_steps=100, compress="ef(topk(0.01))"
    )
    assert plan.bytes_sent == round(7 * TOPK_FRAME / 4)
    assert (plan.collective, plan.message_bytes) == ("allgather", TOPK_MESSAGE)
    # Two copies of the residual, and the parameters of the last synchronisation.
    assert plan.memory_bytes == (8 + 4) * RESNET50
    assert plan.break_even_world_size is None


def test_break_even_of_averages_counts_the_steps_between_them():
    compress = 'ef(topk(0.01), exchange="allgather")'
    options = {"numel": RESNET50, "total_steps": 100, "compress": compress}
    plan = explain("every(4)", world_size=8, **options)
    # One all-gather per 4 steps of plain DDP.
    assert plan.break_even_world_size == -(-4 * 2 * 4 * RESNET50 // TOPK_FRAME)
    (hint,) = plan.hints
    assert hint.startswith("compress=bidirectional(topk(0.01), topk(0.01)) ")


@pytest.mark.parametrize(
    ("method", "start"),
    [("mean", "every(4) with "), ('cast("bf16")', 'every(4) with compress=mean(cast("bf16")), ')],
)
def test_the_plan_of_an_outer_step(method, start):
    options = {"numel": 1000, "world_size": 8, "total_steps": 100, "compress": method}
    plain = explain("every(4)", **options)
    plan = explain("every(4)", outer="nesterov(lr=0.5)", **options)
    assert plan.spec == f"{start}outer=nesterov(lr=0.5)"
    assert plan.bytes_sent == plain.bytes_sent
    # The parameters of the last synchronisation, and the outer momentum.
    assert plan.memory_bytes == 2 * 4 * 1000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("compress", "ef(topk(0.01))"),
        ("outer", "slowmo"),
        ("lr", float),
        ("total_steps", 9),
        ("warmup_steps", 2),
    ],
)
def test_a_method_takes_no_arguments_of_schedules(name, value):
    with pytest.raises(SpecError, match=rf"\b{name}\b.*'mean'"):
        explain("mean", numel=1000, world_size=2, **{name: value})


# --- The table ------------------------------------------------------------------------------------


def test_table_shows_the_whole_plan_of_a_method():
    title, table = rows(topk(world_size=8))
    assert title.startswith("ef(topk(0.01))")
    assert list(table) == METHOD_ROWS
    assert table["collective"] == "all-gather"
    assert {name: numbers(value) for name, value in table.items()} == {
        "elements": ["25,557,032"],
        "ranks": ["8"],
        "collective": [],
        "message": ["1.3", "1,295,826"],
        "sent per step": ["9.07", "9,070,936"],
        "received per step": ["9.07", "9,070,936"],
        "plain DDP sends": ["179", "178,899,224"],
        "traffic": ["19.7"],
        "break-even": [],
        "state per rank": ["204", "204,456,256"],
        "hint": ["0.01", "0.01", "4"],
    }


def test_table_shows_the_whole_plan_of_a_schedule():
    title, table = rows(explain("every(4)", numel=1000, world_size=8, total_steps=10))
    assert title.startswith("every(4)")
    assert list(table) == [*METHOD_ROWS[:4], "synchronisations", *METHOD_ROWS[4:-1]]
    assert numbers(table["synchronisations"]) == ["3", "10", "30.0"]
    assert numbers(table["message"]) == ["4", "4,000"]


@pytest.mark.parametrize("numel", [0, RESNET50, 10**12, *thorough([1])])
@pytest.mark.parametrize("world_size", [1, 2, 1000, *thorough([10_000])])
@pytest.mark.parametrize(
    "spec",
    [
        "mean",
        "ef(topk(0.001))",
        "ef(quantize(int8), memory_dtype=fp32)",
        "bidirectional(topk(0.01, values=int8), topk(0.01, values=int8), selection=exact)",
        "every(7)",
    ],
)
def test_table_fits_80_columns(spec, world_size, numel):
    run = {"total_steps": 99_999} if spec.startswith("every") else {}
    plan = explain(spec, numel=numel, world_size=world_size, **run)
    assert max(map(len, str(plan).split("\n"))) <= 80


@pytest.mark.parametrize(
    ("spec", "numel"), [("ef(topk(0.0001))", RESNET50), ("mean", 249_999), ("mean", 10**12)]
)
def test_table_writes_large_numbers_out(spec, numel):
    assert not re.search(r"\de[+-]\d", str(topk(2, spec, numel)))


# --- Hints ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "world_size", "better"),
    [
        ("mean", 64, []),
        ("ef(topk(0.01))", 1, []),
        ("ef(topk(0.01))", 2, []),
        ("ef(topk(0.01))", 8, ["bidirectional(topk(0.01), topk(0.01))"]),
        (
            "ef(topk(0.01), exchange=allgather, memory_dtype=bf16)",
            64,
            ['bidirectional(topk(0.01), topk(0.01), memory_dtype="bf16")'],
        ),
        (
            "ef(topk(0.01), exchange=allgather)",
            200,
            [
                'ef(topk(0.01), exchange="sharded")',
                "bidirectional(topk(0.01), topk(0.01))",
                'ef(cast("bf16"))',
            ],
        ),
        ("dgc(topk(0.01), exchange=allgather)", 200, ['dgc(topk(0.01), exchange="sharded")']),
        ("quantize(int8)", 7, ['bidirectional(quantize("int8"), quantize("int8"))']),
        (
            "quantize(int8)",
            8,
            ['bidirectional(quantize("int8"), quantize("int8"))', 'mean(cast("bf16"))'],
        ),
        # Not contractive, so it cannot be sent both ways.
        ("randk(0.5, unbiased=True)", 64, []),
    ],
)
def test_hints_name_what_would_send_less(spec, world_size, better):
    plan = topk(world_size, spec)
    assert len(plan.hints) == len(better)
    for hint, method in zip(plan.hints, better, strict=True):
        assert hint.startswith(f"{method} sends ")
        assert "x less" in hint
        times = float(numbers(hint.removeprefix(method))[0].rstrip("."))
        assert times == pytest.approx(
            plan.bytes_sent / topk(world_size, method).bytes_sent, rel=0.01
        )
        assert times >= 1.5


def test_a_hint_names_error_feedback_where_entries_are_dropped():
    (hint,) = topk(2, "topk(0.01)").hints
    assert hint.startswith("ef(topk(0.01)) ")


def test_a_hint_says_that_powersgd_needs_a_model():
    (hint,) = topk(8, "powersgd(2)").hints
    assert "model" in hint
    assert explain("powersgd(2)", model=nn.Linear(64, 64), world_size=8).hints == ()


# --- Many ranks -----------------------------------------------------------------------------------


def test_integers_of_numpy_are_those_of_python():
    method, small = "bidirectional(topk(0.1), topk(0.1))", np.uint8(200)
    found = explain(method, numel=np.int32(2**31 - 1), world_size=small, nodes=np.int64(8))
    assert found == explain(method, numel=2**31 - 1, world_size=200, nodes=8)


@pytest.mark.parametrize("selection", ["exact", "shard"])
def test_a_million_ranks_are_planned_at_once(selection):
    model = nn.Sequential(nn.Linear(2000, 1001, device="meta"), nn.Linear(1001, 7, device="meta"))
    spec = f"bidirectional(topk(0.1, scope=tensor), topk(0.01), selection={selection})"
    start = time.perf_counter()
    plan = explain(spec, model=model, world_size=10**6, rank=10**6 - 1)
    # 200 s if it listed all shards.
    assert time.perf_counter() - start < 20
    assert plan.bytes_sent > 0


# --- Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("mean", {}, r"\bnumel\b.*\bmodel\b.*neither"),
        ("mean", {"numel": 5, "model": nn.Linear(1, 1)}, r"\bnumel\b.*\bmodel\b.*both"),
        ("mean", {"numel": -1}, "numel.*-1$"),
        ("mean", {"numel": 2.5}, r"numel.*2\.5$"),
        ("mean", {"numel": True}, "numel.*True$"),
        ("mean", {"numel": 5, "world_size": 0}, "world_size.* 0$"),
        ("mean", {"numel": 5, "world_size": 2.0}, r"world_size.* 2\.0$"),
        ("mean", {"numel": 5, "world_size": 10**20}, r"world_size.* 1,000,000, .* 10{20}$"),
        ("mean", {"numel": 5, "rank": 2}, "rank.* 0 to 1, .* 2$"),
        ("meen", {"numel": 5}, "'meen'.*'mean'"),
        ("every(4)", {"numel": 5}, r"'every\(4\)'.*total_steps"),
        ("every(4)", {"numel": 5, "total_steps": 0}, "total_steps.* 0$"),
        ("every(4)", {"numel": 5, "total_steps": 5, "warmup_steps": 6}, "warmup_steps.*6.*5"),
        ("qsr(alpha=1, h_base=2)", {"numel": 5, "total_steps": 9}, r"'qsr.*'.*\blr\b"),
        ("qsr(alpha=1, h_base=2)", {"numel": 5, "total_steps": 9, "lr": 0.1}, r"^lr .*0\.1$"),
    ],
)
def test_bad_argument_is_refused(spec, options, words):
    with pytest.raises(SpecError, match=words):
        explain(spec, **{"world_size": 2} | options)


@pytest.mark.parametrize(("model", "found"), [(nn.Linear, "type"), ("resnet50", "str")])
def test_model_must_be_a_module(model, found):
    with pytest.raises(UnsupportedModelError, match=rf"torch\.nn\.Module.*\b{found}\b"):
        explain("mean", model=model, world_size=2)


def test_impossible_learning_rate_is_refused():
    with pytest.raises(ScheduleError, match=r"step 0\b"):
        explain(
            "qsr(alpha=0.1, h_base=2)",
            numel=5,
            world_size=2,
            total_steps=9,
            lr=lambda step: 0.0,
        )
