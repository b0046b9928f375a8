"""The page of doctor matches its CSV file, and a case passes for the right finding only."""

from typing import Any

import pytest

from benchmarks import report_doctor
from benchmarks.doctor_cases import FAULTS, HEALTHY, Case, Outcome


def test_the_page_matches_the_csv_file() -> None:
    assert report_doctor.PAGE.filled() == report_doctor.PAGE.text


def outcome(*findings: tuple[str, list[int]]) -> Outcome:
    found = [{"code": code, "ranks": ranks} for code, ranks in findings]
    return Outcome({"status": int(bool(found)), "findings": found}, (0,), "", "", 1.0)


CASE, FINE = Case("slow", "slow-link", (1, 2)), Case("fine")


@pytest.mark.parametrize(
    ("case", "found", "passes"),
    [
        (CASE, [("slow-link", [1, 2])], True),
        (CASE, [("slow-link", [2, 1]), ("slow-link", [1, 2])], True),
        (CASE, [("slow-link", [0, 2])], False),
        (CASE, [("slow-links", [1, 2])], False),
        (CASE, [("slow-link", [1, 2]), ("shm", [1, 2])], False),
        (CASE, [], False),
        (FINE, [], True),
        (FINE, [("shm", [1])], False),
    ],
)
def test_a_case_passes_for_its_finding_alone(case: Case, found: Any, passes: bool) -> None:
    assert outcome(*found).names(case) == passes


def test_there_are_ten_faults_and_twenty_healthy_jobs() -> None:
    assert (len(FAULTS), len(HEALTHY)) == (10, 20)
    assert len({case.name for case in (*FAULTS, *HEALTHY)}) == 30


def test_no_answer_passes_no_case() -> None:
    assert not Outcome({"error": "lost"}, (1,), "", "", 1.0).names(CASE)
    assert not Outcome({}, (1,), "", "", 1.0).names(FINE)
