"""The report, as text of 80 columns and as JSON."""

import json

import pytest

from tests.advisor.doctor.cases import facts, mesh
from torchcomp.advisor.collectives import KINDS, CollectiveTimes, Point
from torchcomp.advisor.doctor import findings
from torchcomp.advisor.doctor.findings import Row, judge
from torchcomp.advisor.doctor.job import Unreachable
from torchcomp.advisor.doctor.measures import Clock, Speed
from torchcomp.advisor.doctor.report import Results, as_dict, status, text
from torchcomp.advisor.doctor.training import MODES

PREDICTED = [
    Row("ef(topk(0.01))", 0.02, 0.018, 0.022, 0, caveat="may lose accuracy"),
    Row("a_method_with_a_name(of_more_than_forty=characters)", 0.01, 0.0, 0.1, 0),
]


def job(world_size=4, **odd):
    """Results of ranks that are all alike but for the last one."""
    results = Results("gloo", facts(world_size, **odd))
    results.findings = findings.of_facts(results.facts)
    results.clocks = [Clock(0.0, 0.0)] * world_size
    results.links = mesh(world_size)
    results.speeds = [Speed((0.1, 0.2), 0.5)] * world_size
    points = tuple(Point(4**exponent, 4.0**exponent / 1e6) for exponent in range(3, 13))
    results.collectives = CollectiveTimes(world_size, dict.fromkeys(KINDS, points))
    results.workload = "train.py " + "--option value " * 10
    results.rows = [Row(*each, 9) for each in zip(MODES, *[(0.1, 0.3, 0.2)] * 3, strict=True)]
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
ALL |= {"failed": Results("gloo", facts(2), error="rank 1 of 2 did not report")}
STATUSES = {"found": 1, "many": 1, "dead": 3, "failed": 3}


@pytest.mark.parametrize("name", ALL)
def test_a_report_fits_80_columns_and_its_json_has_everything(name):
    results = ALL[name]
    lines = text(results).split("\n")
    # A word without spaces is not broken: it is copied from the terminal.
    assert all(len(line) <= 80 or " " not in line.strip() for line in lines)
    assert all(line == line.rstrip() for line in lines)
    assert sum(line.startswith("verdict: ") for line in lines) == 1
    values = json.loads(json.dumps(as_dict(results), allow_nan=False))
    assert values["schema"] == 2
    assert status(results) == values["status"] == STATUSES.get(name, 0)
    assert len(values["facts"]) == results.world_size
    for row, link in zip(values["links"], results.links, strict=True):
        assert (row["source"], row["bandwidth"]) == (link.source, link.bandwidth)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("found", ["4 ranks on 1 node, gloo", "[versions]", "rank 3", "800 Mbit/s"]),
        ("found", ["ef(topk(0.01)), predicted", "may lose accuracy", "67% of the step", "3.00x"]),
        ("found", ["between nodes 12", "4.1 kB 262 kB 4.2 MB", "1.00x"]),
        ("dead", ["rank 0 and rank 1", "NVIDIA H100", "cannot train together"]),
        ("many", ["64 ranks", "findings: 1", "a ring and a sample"]),
        ("alone", ["1 rank on 1 node", "findings: none", "one rank exchanges nothing"]),
        ("failed", ["none, because rank 1 of 2"]),
    ],
)
def test_a_report_says_what_was_measured(name, words):
    printed = " ".join(text(ALL[name]).split())
    assert [word for word in words if word not in printed] == []
