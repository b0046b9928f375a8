"""The verdict, and the report as text of 80 columns and as JSON."""

import json

import pytest

from tests.advisor.doctor.cases import facts, mesh
from torchcomp.advisor import KINDS, CollectiveTimes, Point
from torchcomp.advisor.doctor import findings
from torchcomp.advisor.doctor.clocks import Clock
from torchcomp.advisor.doctor.examination import Results
from torchcomp.advisor.doctor.phases import BF16, MODES, NO_EXCHANGE, PLAIN, StepTimes
from torchcomp.advisor.doctor.preflight import Unreachable
from torchcomp.advisor.doctor.report import FOUND, HEALTHY, NOT_MEASURED, as_dict, status, text
from torchcomp.advisor.doctor.speed import Speed
from torchcomp.advisor.doctor.verdict import Row, judge, measured_rows
from torchcomp.advisor.units import duration, rate, size


def rows(floor, ddp, bf16, spread=0.0, steps=9):
    seconds = {NO_EXCHANGE: floor, PLAIN: ddp, BF16: bf16}
    return [
        Row(mode, seconds[mode], seconds[mode] - spread, seconds[mode] + spread, steps)
        for mode in MODES
    ]


PREDICTED = [
    Row("ef(topk(0.01))", 0.02, 0.018, 0.022, 0, caveat="may lose accuracy"),
    Row("a_method_with_a_name(of_more_than_forty=characters)", 0.01, 0.0, 0.1, 0),
]


# --- Verdict --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ddp", "bound", "waiting"),
    [
        (0.100, "compute-bound", 0.0),
        (0.095, "compute-bound", 0.0),
        (0.110, "compute-bound", 1 / 11),
        (0.125, "partly network-bound", 0.2),
        (0.250, "network-bound", 0.6),
    ],
)
def test_a_verdict_is_the_share_of_the_step_that_waits(ddp, bound, waiting):
    verdict = judge(rows(0.1, ddp, ddp))
    assert (verdict.bound, verdict.waiting) == (bound, pytest.approx(waiting))


def test_a_verdict_names_the_fastest_method_measured_or_predicted():
    assert "1.5x" in judge(rows(0.1, 0.3, 0.2)).advice
    verdict = judge(rows(0.01, 0.3, 0.2), PREDICTED[:1])
    assert "ef(topk(0.01)) is 15.0x" in verdict.advice
    assert [row.method for row in verdict.rows] == [*MODES, "ef(topk(0.01))"]


def test_steps_that_vary_by_more_than_the_exchange_give_no_verdict():
    assert judge(rows(0.1, 0.2, 0.2, spread=0.06)).bound == "unclear"
    assert judge(rows(0.1, 0.2, 0.2, spread=0.04)).bound == "network-bound"
    assert judge(rows(0.1, 0.1, 0.1, spread=0.04)).bound == "compute-bound"
    # One step does not show how they vary.
    assert judge(rows(0.1, 0.14, 0.14, steps=1)).bound == "unclear"
    assert judge(rows(0.1, 0.2, 0.2, steps=1)).bound == "network-bound"
    # Nothing can be faster than no exchange.
    assert judge(rows(0.1, 0.2, 0.08)).bound == "unclear"


def test_the_slowest_rank_gives_the_row():
    ranks = [[StepTimes(PLAIN, (1.0, 2.0, 3.0))], [StepTimes(PLAIN, (1.0, 5.0, 9.0, 5.0))]]
    assert measured_rows(ranks) == [Row(PLAIN, 5.0, 5.0, 5.0, 4)]
    assert measured_rows([[StepTimes(PLAIN, (4.0,))]]) == [Row(PLAIN, 4.0, 4.0, 4.0, 1)]


# --- Report ---------------------------------------------------------------------------------------


def job(world_size=4, **odd):
    """Results of ranks that are all alike but for the last one."""
    results = Results("gloo", facts(world_size, **odd))
    results.findings = findings.of_facts(results.facts)
    results.clocks = [Clock(0.0, 0.0)] * (world_size - 1) + [Clock(float("nan"), 0.0)]
    results.links = mesh(world_size)
    results.speeds = [Speed((0.1, 0.2), 0.5)] * world_size
    points = tuple(Point(4**exponent, 4.0**exponent / 1e6) for exponent in range(3, 13))
    results.collectives = CollectiveTimes(world_size, dict.fromkeys(KINDS, points))
    results.workload = "train.py " + "--option value " * 10
    results.rows = rows(0.1, 0.3, 0.2)
    results.verdict = judge(results.rows, PREDICTED)
    return results


def dead_link():
    results = Results("nccl", facts(2, gpu="NVIDIA H100 80GB HBM3", host="h" * 60))
    ways = [
        Unreachable(source, 1 - source, "192.168.100.100:65535", "no route to host", False)
        for source in (0, 1)
    ]
    results.findings = findings.of_connections(ways)
    return results


ALL = {"healthy": job(), "found": job(torch="2.12.0+" + "x" * 60), "dead": dead_link()}
ALL |= {"many": job(64, cores=1), "alone": Results("gloo", facts(1))}


@pytest.mark.parametrize("results", ALL.values(), ids=ALL)
def test_a_report_fits_80_columns(results):
    lines = text(results).split("\n")
    # A word without spaces is not broken: it is copied from the terminal.
    assert all(len(line) <= 80 or " " not in line.strip() for line in lines)
    assert all(line == line.rstrip() for line in lines)
    assert any(line.startswith("verdict: ") for line in lines)


@pytest.mark.parametrize(
    ("name", "code"),
    [("healthy", HEALTHY), ("alone", HEALTHY), ("found", FOUND), ("dead", NOT_MEASURED)],
)
def test_the_exit_status_says_what_was_found(name, code):
    assert status(ALL[name]) == as_dict(ALL[name])["status"] == code


def test_a_report_names_findings_links_and_rows():
    printed = " ".join(text(ALL["found"]).split())
    assert "[versions]" in printed
    assert "rank 3" in printed
    assert "800 Mbit/s" in printed
    assert "ef(topk(0.01)), predicted" in printed
    assert "may lose accuracy" in printed
    assert "67% of the step" in printed
    assert "rank 0 and rank 1" in " ".join(text(ALL["dead"]).split())


@pytest.mark.parametrize("results", ALL.values(), ids=ALL)
def test_json_has_everything_and_a_version(results):
    values = json.loads(json.dumps(as_dict(results), allow_nan=False))
    assert values["schema"] == 1
    assert {"facts", "findings", "clocks", "links", "speeds", "rows", "verdict"} <= set(values)
    assert len(values["facts"]) == results.world_size
    for row, link in zip(values["links"], results.links, strict=True):
        assert (row["source"], row["bandwidth"]) == (link.source, link.bandwidth)


@pytest.mark.parametrize(
    ("function", "number", "words"),
    [
        (duration, 3.14e-5, "31 us"),
        (duration, 4.2e-3, "4.2 ms"),
        (duration, 0.9999, "1,000 ms"),
        (duration, 61.0, "61 s"),
        (rate, 1.18e6, "9.4 Mbit/s"),
        (rate, 1.25e9, "10 Gbit/s"),
        (size, 2**24, "17 MB"),
        (size, 12, "12 bytes"),
    ],
)
def test_numbers_have_the_unit_that_people_use(function, number, words):
    assert function(number) == words
