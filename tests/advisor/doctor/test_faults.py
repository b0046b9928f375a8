"""Doctor on real jobs: planted faults are found and named, and healthy jobs have none."""

import pytest

from benchmarks.net.shell import missing
from tests.advisor.doctor.planted import FAULTS, HEALTHY, Case, examined

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("case", [*FAULTS, *HEALTHY], ids=lambda case: case.name)
def test_doctor_finds_a_planted_fault_and_nothing_else(case: Case) -> None:
    if missing():
        pytest.skip(missing())
    outcome = examined(case)
    assert outcome.names(case), f"{outcome.report}\n{outcome.log}"
    assert all(len(line) <= 80 or " " not in line for line in outcome.report.split("\n"))
    # torchrun exits with 1 whatever the status of its processes is.
    assert set(outcome.codes) == ({1} if case.code else {0})
