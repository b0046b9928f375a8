"""Whole runs: hours, bytes and price, from `explain(..., link=)` and from the command line."""

import re

import pytest
import torch
from torch import nn

import torchcomp
from torchcomp import Link, SpecError, explain
from torchcomp.__main__ import main
from torchcomp.aggregators import planned_traffic
from torchcomp.bucket import BucketShape
from torchcomp.spec import parse_aggregator
from torchcomp.step_model import BF16, DDP, USUAL, Prediction, Run, Training, values_of
from torchcomp.step_model.simulation import StepTime
from torchcomp.step_model.table import table, verdict
from torchcomp.step_model.units import duration, span, volume

# 4,000,000 bytes of gradients; 1e9 bytes per second.
NUMEL = 1_000_000
LINK = Link(8.0, latency_us=0.0, efficiency=1.0, overhead_us=0.0)
RUN = Run(4, 1000, step_seconds=1e-4, speedup=1e9)
VALUES = values_of(numel=NUMEL)
FAST = ["--numel", "1e5", "--world-size", "4", "--total-steps", "100", "--step-ms", "10"]


def on(spec, link=LINK, run=RUN, **options):
    return Prediction(spec, VALUES, run, **options).on(link)


def test_plain_ddp_by_hand():
    found = on(DDP)
    # All of the step but its last 4 % is before the last all-reduce ends.
    moved = 2 * 3 / 4 * 4 * NUMEL
    assert found.step.seconds == pytest.approx(moved / 1e9, rel=0.05)
    assert found.step.compute == 1e-4
    assert found.hours == pytest.approx(1000 * found.step.seconds / 3600)
    assert found.gigabytes == pytest.approx(4 * moved * 1000 / 1e9)
    assert found.price(0.09) == pytest.approx(0.09 * 24)


def test_the_bf16_hook_sends_half():
    half, whole = on(BF16), on(DDP)
    assert half.gigabytes == pytest.approx(whole.gigabytes / 2)
    assert half.step.seconds == pytest.approx(whole.step.seconds / 2, rel=0.1)


@pytest.mark.parametrize("spec", ["ef(topk(0.01))", "powersgd(rank=2)", 'ef(quantize("int8"))'])
def test_methods_send_what_is_planned_for_all_nodes(spec):
    values = values_of(nn.Linear(300, 500))
    shapes = [BucketShape.of(tuple(reversed(values)), values)]
    link = Link(8.0, ranks_per_node=2)
    found = Prediction(spec, values, RUN).on(link)
    planned = planned_traffic(parse_aggregator(spec), shapes, 4, node=2).sent
    assert found.bytes_per_step == 2 * planned
    # Nothing passes the card of the only node.
    assert Prediction(spec, values, RUN).on(Link(8.0, ranks_per_node=4)).gigabytes == 0


def test_two_levels_send_less_over_the_card():
    link = Link(1.0, ranks_per_node=2)
    flat, levels = on("ef(topk(0.01))", link), on("ef(topk(0.01))", link, nodes=2)
    assert levels.bytes_per_step < flat.bytes_per_step
    assert levels.step.seconds < on(DDP, link).step.seconds


def test_a_schedule_pays_for_its_synchronisations_only():
    every, rare = on("every(1)"), on("every(8)")
    average = every.step.seconds - 1e-4
    assert average == pytest.approx(6e-3, rel=1e-2)
    assert rare.step.seconds == pytest.approx(1e-4 + average / 8)
    assert rare.bytes_per_step == pytest.approx(every.bytes_per_step / 8)
    compressed = on("every(8)", compress="ef(topk(0.01))")
    assert compressed.bytes_per_step < rare.bytes_per_step / 10


def test_qsr_reads_the_learning_rate():
    spec = "qsr(alpha=1.0, h_base=4)"
    run = Run(4, 40, 1e-4, warmup_steps=5, lr=lambda step: 0.25, speedup=1e9)
    # Synchronisations after 4, 8, 24 and 40 steps.
    assert on(spec, run=run).bytes_per_step == pytest.approx(on("every(10)").bytes_per_step)
    with pytest.raises(SpecError):
        on(spec)


def test_a_warm_up_counts_with_its_share_of_the_run():
    link = Link(1.0, latency_us=0.0, efficiency=1.0, overhead_us=0.0)
    dense, warmed = "mean", "ef(warmup(topk(0.001), steps=400, start=0.25))"
    found, plain = on(warmed, link), on("ef(topk(0.001))", link)
    method = parse_aggregator(warmed)
    shapes = [BucketShape.of(VALUES, VALUES)]
    spans = method.spans(RUN.total_steps)
    assert sum(steps for _, steps in spans) == 1000
    assert len(spans) > 2
    sent = sum(steps * planned_traffic(each, shapes, 4).sent for each, steps in spans) / 1000
    assert found.bytes_per_step == pytest.approx(4 * sent, rel=0.01)
    assert plain.bytes_per_step < found.bytes_per_step / 10
    assert plain.step.seconds < found.step.seconds < on(dense, link).step.seconds
    # A run that ends in the warm-up has its first stages only.
    short = on(warmed, link, Run(4, 50, step_seconds=1e-4, speedup=1e9))
    assert short.bytes_per_step > found.bytes_per_step


def test_a_run_on_one_rank_exchanges_nothing():
    link = Link(10.0, latency_us=0.0, overhead_us=0.0)
    found = on(DDP, link, Run(1, 10, step_seconds=1e-3))
    assert (found.step.seconds, found.gigabytes) == (pytest.approx(1e-3, rel=0.01), 0)


def test_explain_predicts_with_the_dtype_of_the_gradients():
    options = {"numel": 100_000, "world_size": 4, "step_seconds": 0.01, "total_steps": 50}
    half = explain("mean", dtype=torch.bfloat16, link=Link(1.0), **options)
    whole = explain("mean", link=Link(1.0), **options)
    assert half.training.gigabytes == pytest.approx(whole.training.gigabytes / 2)


def test_explain_predicts_the_whole_run():
    options = {"numel": 100_000, "world_size": 8, "step_seconds": 0.01, "total_steps": 50}
    plan = explain("ef(topk(0.01))", link=Link(1.0), **options)
    assert isinstance(plan.training, Training)
    assert (plan.training.method, plan.training.total_steps) == ("ef(topk(0.01))", 50)
    assert plan.training.bytes_per_step == 8 * plan.bytes_sent
    assert {"predicted step", "whole run"} <= {line[2:19].strip() for line in str(plan).split("\n")}
    levels = explain("ef(topk(0.01))", nodes=4, link=Link(1.0, ranks_per_node=4), **options)
    assert levels.training.bytes_per_step == 2 * levels.nodes.card_bytes
    local = explain("every(5)", link=Link(1.0), compress="ef(topk(0.01))", **options)
    assert local.training.bytes_per_step == pytest.approx(8 * local.bytes_sent, rel=1e-4)
    without = explain("ef(topk(0.01))", numel=100_000, world_size=8)
    assert without.training is None


@pytest.mark.parametrize(
    "bad",
    [
        {"step_seconds": None},
        {"total_steps": None},
        {"link": None},
        {"step_seconds": 0},
        {"world_size": 6, "link": Link(1.0, ranks_per_node=4)},
        {"nodes": 4},
        {"numel": 400_000_000},
        {"spec": "every(2)", "outer": "nesterov"},
        {"spec": "every(2)", "time": torchcomp.TimeModel(1.0, 1.0)},
        {"lr": lambda step: 0.1},
    ],
)
def test_bad_arguments_of_explain_are_refused(bad):
    run = {"spec": "ef(topk(0.01))", "numel": 1000, "world_size": 8, "link": Link(1.0)}
    with pytest.raises(SpecError):
        explain(**{**run, "step_seconds": 0.1, "total_steps": 10, **bad})


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Run(0, 1, 1.0),
        lambda: Run(1025, 1, 1.0),
        lambda: Run(2, 1, 1.0, warmup_steps=1),
        lambda: Run(2, 1, 1.0, speedup=0),
        lambda: values_of(numel=0),
        lambda: values_of(nn.Linear(2, 2), 5),
        lambda: on("every(2)", nodes=2),
        lambda: on("nothing"),
        lambda: on(DDP).price(-1),
    ],
)
def test_bad_runs_are_refused(bad):
    with pytest.raises(SpecError):
        bad()


# --- The table and the command line ---------------------------------------------------------------


def took(method, seconds, local=False):
    return Training(method, StepTime(seconds, 0.1), 1000, 5e6, local)


def test_the_table_begins_with_the_fastest_method():
    found = [took(DDP, 0.4), took("ef(topk(0.01))", 0.2), took(BF16, 0.3)]
    text = table(found, Run(8, 1000, 0.1), LINK, price_per_gb=2.0, currency="EUR")
    rows = [line for line in text.split("\n") if " ms" in line and " EUR" in line]
    assert [row.split()[0] for row in rows] == ["200", "300", "400"]
    assert [row.split()[-1] for row in rows] == ["ef(topk(0.01))", BF16, DDP]
    assert rows[0].split()[2:9] == ["50%", "3.33", "min", "5", "GB", "10", "EUR"]
    assert "EUR" not in table(found, Run(8, 1000, 0.1), LINK)


def test_the_verdict_says_when_nothing_is_faster():
    slow, fast = took("ef(topk(0.01))", 0.299), took("ef(topk(0.01))", 0.15)
    (keep,) = verdict([took(DDP, 0.4), took(BF16, 0.3), slow])
    (change,) = verdict([took(DDP, 0.4), took(BF16, 0.3), fast])
    assert "ef(topk(0.01))" not in keep
    assert "ef(topk(0.01)) is 2x" in change
    assert verdict([slow]) == []


def test_the_verdict_keeps_local_steps_apart():
    known = [took(DDP, 0.4), took(BF16, 0.3), took("every(8)", 0.1, local=True)]
    keep, local = verdict([*known, took("ef(topk(0.01))", 0.3)])
    assert "every(8)" not in keep
    assert "every(8) is 3x" in local
    (alone,) = verdict([*known[:2], took("ef(topk(0.01))", 0.1), took("every(8)", 0.3, True)])
    assert "ef(topk(0.01)) is 3x" in alone
    assert [on(spec).local for spec in (DDP, "ef(topk(0.01))", "every(8)")] == [False, False, True]


def test_units():
    assert [duration(s) for s in (0.00012, 0.0123, 1.5)] == ["0.12 ms", "12.3 ms", "1.5 s"]
    times = {1e-4: "0.36 s", 0.001: "3.6 s", 0.033: "1.98 min", 2.0: "2 h", 1234.0: "1,234 h"}
    assert [span(each) for each in times] == list(times.values())
    sizes = (2e6, 1.5e3, 0.25, 3e-5, 0.0)
    assert [volume(gb) for gb in sizes] == ["2 PB", "1.5 TB", "250 MB", "30 kB", "0 B"]


def test_plan_compares_the_usual_methods_in_80_columns(capsys):
    price = ["--price-per-gb", "0.09", "--currency", "EUR"]
    assert main(["plan", "--all", *FAST, "--gbit", "0.1", *price]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.split("\n"))) <= 80
    joined = re.sub(r"\s+", " ", printed)
    for spec in USUAL:
        assert spec.replace("(rank=2)", "") in joined
    assert joined.count(" EUR ") == len(USUAL)


def test_plan_takes_one_method_and_a_cluster(capsys):
    cluster = ["--ranks-per-node", "2", "--inside-gbit", "100", "--latency-us", "9"]
    cluster += ["--inside-latency-us", "2", "--efficiency", "0.8", "--overhead-us", "5"]
    words = ["plan", "ef(topk(0.01))", *FAST, "--gbit", "25", *cluster, "--backend", "gloo"]
    assert main([*words, "--two-levels", "--speedup", "10"]) == 0
    printed = capsys.readouterr().out
    assert "4 ranks, 25 Gbit/s, 9 us, 2 ranks per node, gloo" in printed
    assert "ef(topk(0.01))" in printed


def test_plan_reads_learning_rates(capsys):
    words = ["plan", "qsr(alpha=0.1, h_base=4)", *FAST, "--gbit", "1", "--lr", "0.1"]
    assert main([*words, "--warmup-steps", "10"]) == 0
    assert "qsr" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "--all"),
        (["mean", "--all"], "--all"),
        (["mean", "--currency", "EUR"], "--price-per-gb"),
        (["mean", "--lr", "0.1"], "--lr"),
        (["qsr(alpha=0.1, h_base=4)"], "--lr"),
        (["every(2)", "--two-levels", "--ranks-per-node", "2"], "--two-levels"),
        (["--all", "--two-levels", "--ranks-per-node", "2"], "--two-levels"),
        (["ef(topk(0.01))", "--two-levels"], "--ranks-per-node"),
        (["mean", "--ranks-per-node", "3"], "ranks_per_node"),
        (["meen"], "meen"),
    ],
)
def test_bad_plans_exit_2_with_one_error(words, named, capsys):
    assert main(["plan", *words, *FAST, "--gbit", "1"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert named in printed.err


@pytest.mark.parametrize("words", [["--gbit", "0"], ["--gbit", "x"], [], ["--backend", "mpi"]])
def test_bad_flags_of_plan_exit_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "mean", *FAST, *words])
    assert ended.value.code == 2
    assert capsys.readouterr().out == ""
