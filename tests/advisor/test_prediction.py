"""Whole runs: hours, bytes and price, from `plan` and from the command line."""

from functools import partial

import pytest
from torch import nn

from torchcomp.advisor import Link, Prediction, Run, StepTime, Training, plan, values_of
from torchcomp.advisor.command import main
from torchcomp.advisor.prediction import BF16, DDP, USUAL, verdict
from torchcomp.aggregators import planned_traffic
from torchcomp.engine.bucket import BucketShape
from torchcomp.specs.errors import SpecError
from torchcomp.specs.learning_rates import decaying
from torchcomp.specs.spec import parse_aggregator

# 4,000,000 bytes of gradients; 1e9 bytes per second.
NUMEL = 1_000_000
IDEAL = {"latency_us": 0.0, "efficiency": 1.0, "overhead_us": 0.0}
LINK = Link(8.0, **IDEAL)
RUN = Run(4, 1000, step_seconds=1e-4, speedup=1e9)
VALUES = values_of(numel=NUMEL)
FAST = ["--numel", "1e5", "--world-size", "4", "--total-steps", "100", "--step-ms", "10"]


def on(spec, link=LINK, run=RUN, **options):
    return Prediction(spec, VALUES, run, **options).on(link)


def test_plain_ddp_by_hand_and_the_bf16_hook_with_half():
    found, half = on(DDP), on(BF16)
    # All of the step but its last 4 % is before the last all-reduce ends.
    moved = 2 * 3 / 4 * 4 * NUMEL
    assert found.step.seconds == pytest.approx(moved / 1e9, rel=0.05)
    assert found.step.compute == 1e-4
    assert found.hours == pytest.approx(1000 * found.step.seconds / 3600)
    assert found.gigabytes == pytest.approx(4 * moved * 1000 / 1e9)
    assert found.price(0.09) == pytest.approx(0.09 * 24)
    assert half.gigabytes == pytest.approx(found.gigabytes / 2)
    assert half.step.seconds == pytest.approx(found.step.seconds / 2, rel=0.1)
    alone = on(DDP, Link(10.0, **IDEAL), Run(1, 10, step_seconds=1e-3))
    assert (alone.step.seconds, alone.gigabytes) == (pytest.approx(1e-3, rel=0.01), 0)


@pytest.mark.parametrize("spec", ["ef(topk(0.01))", "powersgd(rank=2)", 'ef(quantize("int8"))'])
def test_methods_send_what_is_planned_for_all_nodes(spec):
    model = nn.Linear(300, 500)
    shapes = [BucketShape.of(("bias", "weight"), dict(model.named_parameters()))]
    found = plan(spec, RUN, Link(8.0, ranks_per_node=2), model=model)
    planned = planned_traffic(parse_aggregator(spec), shapes, 4, node=2).sent
    assert found.bytes_per_step == 2 * planned
    # Nothing passes the card of the only node.
    assert plan(spec, RUN, Link(8.0, ranks_per_node=4), model=model).gigabytes == 0


def test_a_schedule_pays_for_its_synchronisations_only():
    every, rare = on("every(1)"), on("every(8)")
    average = every.step.seconds - 1e-4
    assert average == pytest.approx(6e-3, rel=1e-2)
    assert rare.step.seconds == pytest.approx(1e-4 + average / 8)
    assert rare.bytes_per_step == pytest.approx(every.bytes_per_step / 8)
    compressed = on("every(8)", compress="ef(topk(0.01))")
    assert compressed.bytes_per_step < rare.bytes_per_step / 10
    # QSR reads the learning rate: synchronisations after 4, 8, 24 and 40 steps.
    run = Run(4, 40, 1e-4, warmup_steps=5, lr=lambda step: 0.25, speedup=1e9)
    found = on("qsr(alpha=1.0, h_base=4)", run=run)
    assert found.bytes_per_step == pytest.approx(on("every(10)").bytes_per_step)


def test_a_warm_up_counts_with_its_share_of_the_run():
    link = Link(1.0, **IDEAL)
    warmed = "ef(warmup(topk(0.001), steps=400, start=0.25))"
    found, plain = on(warmed, link), on("ef(topk(0.001))", link)
    shapes = [BucketShape.of(VALUES, VALUES)]
    spans = parse_aggregator(warmed).spans(RUN.total_steps)
    assert len(spans) > 2
    sent = sum(steps * planned_traffic(each, shapes, 4).sent for each, steps in spans) / 1000
    assert found.bytes_per_step == pytest.approx(4 * sent, rel=0.01)
    assert plain.bytes_per_step < found.bytes_per_step / 10
    assert plain.step.seconds < found.step.seconds < on("mean", link).step.seconds
    # A run that ends in the warm-up has its first stages only.
    short = on(warmed, link, Run(4, 50, step_seconds=1e-4, speedup=1e9))
    assert short.bytes_per_step > found.bytes_per_step


# Published for QSR: ViT-B with AdamW on 2 machines of 8 GPUs, parallel 26.7 h and QSR 20.2 h. Two
# equations give 0.748 s for a step, and 0.279 s for each of 93,600 - 9,711 averages more.


def test_the_published_hours_of_qsr_are_reproduced():
    steps = {"total_steps": 93_600, "warmup_steps": 10_000}
    lr = decaying("cosine", peak=0.008, final=1e-6, **steps)
    run = partial(Run, step_seconds=0.748, lr=lr, speedup=1e6, **steps)
    # A fiftieth of the model over a fiftieth of the link.
    link = Link(9.91 * (15 / 8) / 50, ranks_per_node=8, efficiency=1.0)
    numel = 86_381_800 // 50
    # Parallel training that overlaps nothing is an average after every step.
    for spec, hours in {"every(1)": 26.7, "qsr(alpha=0.0175, h_base=4)": 20.2}.items():
        assert plan(spec, run(16), link, numel=numel).hours == pytest.approx(hours, rel=0.02)


@pytest.mark.parametrize(
    "bad",
    [
        *(partial(Run, *bad) for bad in ((0, 1, 1.0), (1025, 1, 1.0), (2, 0, 1.0), (2, 1, 0.0))),
        *(partial(Run, 2, 1, 1.0, **bad) for bad in ({"warmup_steps": 1}, {"speedup": 0})),
        *(partial(values_of, numel=bad) for bad in (None, 0, 400_000_000)),
        lambda: values_of(nn.Linear(2, 2), 5),
        lambda: on("mean", Link(1.0, ranks_per_node=3)),
        lambda: on("nothing"),
        lambda: on("qsr(alpha=1.0, h_base=4)"),
        lambda: on(DDP).price(-1),
    ],
)
def test_bad_runs_are_refused(bad):
    with pytest.raises(SpecError):
        bad()


def took(method, seconds, local=False):
    return Training(method, StepTime(seconds, 0.1), 1000, 5e6, local)


def test_the_verdict_compares_with_the_bf16_hook_and_keeps_local_steps_apart():
    known = [took(DDP, 0.4), took(BF16, 0.3)]
    (keep,) = verdict([*known, took("ef(topk(0.01))", 0.299)])
    (change,) = verdict([*known, took("ef(topk(0.01))", 0.15)])
    assert "ef(topk(0.01))" not in keep
    assert "ef(topk(0.01)) is 2x" in change
    assert verdict([took("ef(topk(0.01))", 0.2)]) == []
    local = took("every(8)", 0.1, local=True)
    keep, also = verdict([*known, local, took("ef(topk(0.01))", 0.3)])
    assert "every(8)" not in keep
    assert "every(8) is 3x" in also
    (alone,) = verdict([*known, took("ef(topk(0.01))", 0.1), took("every(8)", 0.3, True)])
    assert "ef(topk(0.01)) is 3x" in alone
    assert [on(spec).local for spec in (DDP, "ef(topk(0.01))", "every(8)")] == [False, False, True]


def test_plan_prints_the_usual_methods_in_80_columns_the_fastest_first(capsys):
    price = ["--price-per-gb", "0.09", "--currency", "EUR"]
    assert main(["plan", "--all", *FAST, "--gbit", "0.1", *price]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if " EUR  " in line]
    assert len(rows) == len(USUAL)
    milliseconds = [float(row[0]) for row in rows]
    assert milliseconds == sorted(milliseconds)


def test_plan_takes_a_cluster_and_a_learning_rate(capsys):
    cluster = ["--ranks-per-node", "2", "--inside-gbit", "100", "--latency-us", "9"]
    cluster += ["--inside-latency-us", "2", "--efficiency", "0.8", "--overhead-us", "5"]
    words = ["plan", "ef(topk(0.01))", *FAST, "--gbit", "25", *cluster, "--backend", "gloo"]
    assert main([*words, "--speedup", "10"]) == 0
    assert "4 ranks, 25 Gbit/s, 9 us, 2 ranks per node, gloo" in capsys.readouterr().out
    words = ["plan", "qsr(alpha=0.1, h_base=4)", *FAST, "--gbit", "1", "--lr", "0.1"]
    assert main([*words, "--warmup-steps", "10"]) == 0
    assert "qsr" in capsys.readouterr().out
