"""The report, as text of 80 columns and as JSON."""

import json
from functools import partial

import pytest

from tests.advisor.doctor.cases import facts, mesh
from torchcomp.advisor.collectives import KINDS, CollectiveTimes, Point
from torchcomp.advisor.doctor import findings
from torchcomp.advisor.doctor.findings import Row, judge
from torchcomp.advisor.doctor.job import Unreachable
from torchcomp.advisor.doctor.measures import Clock, Speed
from torchcomp.advisor.doctor.report import Results, as_dict, status, text
from torchcomp.advisor.doctor.training import MODES


def job(world_size=4, **odd):
    results = Results("gloo", facts(world_size, **odd))
    results.findings = findings.of_facts(results.facts)
    results.clocks = [Clock(0.0, 0.0)] * world_size
    results.links = mesh(world_size)
    results.speeds = [Speed((0.1, 0.2), 0.5)] * world_size
    points = tuple(Point(4**exponent, 4.0**exponent / 1e6) for exponent in range(3, 13))
    results.collectives = CollectiveTimes(world_size, dict.fromkeys(KINDS, points))
    results.workload = "train.py " + "--option value " * 10
    results.rows = [Row(*each, 9) for each in zip(MODES, *[(0.1, 0.3, 0.2)] * 3, strict=True)]
    results.verdict = judge(results.rows, [Row("ef(topk(0.01))", 0.02, 0.018, 0.022, 0)])
    return results


def dead_link():
    results = Results("nccl", facts(2, gpu="NVIDIA H100 80GB HBM3", host="h" * 60))
    way = partial(Unreachable, address="192.168.1.1:65535", reason="no route", host_answers=False)
    results.findings = findings.of_connections([way(0, 1), way(1, 0)])
    return results


ALL = {
    "healthy": (job(), 0, ["ef(topk(0.01)), predicted", "67% of the step", "3.00x"]),
    "found": (job(torch="x" * 60), 1, ["[versions]", "800 Mbit/s", "4.1 kB 262 kB 4.2 MB"]),
    "dead": (dead_link(), 3, ["rank 0 and rank 1", "NVIDIA H100", "cannot train together"]),
    "many": (job(64, cores=1), 1, ["64 ranks", "findings: 1", "a ring and a sample"]),
    "alone": (Results("gloo", facts(1)), 0, ["1 rank on 1 node", "one rank exchanges nothing"]),
    "failed": (Results("gloo", facts(2), error="rank 1 is lost"), 3, ["none, because rank 1"]),
}


@pytest.mark.parametrize("name", ALL)
def test_a_report_fits_80_columns_and_its_json_has_everything(name):
    results, expected, words = ALL[name]
    lines = text(results).split("\n")
    printed = " ".join(" ".join(lines).split())
    assert [word for word in words if word not in printed] == []
    # A word without spaces is not broken: it is copied from the terminal.
    assert all(len(line) <= 80 or " " not in line.strip() for line in lines)
    values = json.loads(json.dumps(as_dict(results), allow_nan=False))
    assert (status(results), values["status"], values["schema"]) == (expected, expected, 2)
    assert len(values["facts"]) == results.world_size
    for row, link in zip(values["links"], results.links, strict=True):
        assert (row["source"], row["bandwidth"]) == (link.source, link.bandwidth)
