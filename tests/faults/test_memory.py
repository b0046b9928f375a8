"""A rank that runs out of memory or of descriptors."""

from pathlib import Path

import pytest

from tests.faults.clients import STEPS
from tests.faults.ranks import VICTIM, Case, run
from tests.faults.test_processes import (
    OTHERS,
    assert_ended,
    assert_equal_replicas,
    survivors,
)

pytestmark = pytest.mark.soak
OUT_OF_MEMORY = [Case("ddp", place, "out of memory") for place in ("bucket 1", "finish")]
OUT_OF_MEMORY += [Case(client, "bucket 0", "out of memory") for client in OTHERS]


@pytest.mark.parametrize("case", OUT_OF_MEMORY, ids=str)
def test_an_allocation_that_fails_on_one_rank_ends_all(case: Case, tmp_path: Path) -> None:
    outcomes = run(case, tmp_path)
    assert_ended(case, outcomes)
    assert_equal_replicas(case, outcomes)
    victim = outcomes[VICTIM]
    assert (victim.code, victim.unchanged) == (0, True)
    assert "can't allocate memory" in victim.message
    if case.client in ("ddp", "late", "bidirectional", "jointspar"):
        for each in survivors(outcomes).values():
            assert "rank 1 failed first with RuntimeError" in each.message
            assert "can't allocate memory" in each.message


def test_without_descriptors_registering_fails_on_all_ranks(tmp_path: Path) -> None:
    case = Case("ddp", "connect", "no descriptors")
    outcomes = run(case, tmp_path, timeout=8)
    assert_ended(case, outcomes, timeout=8)
    victim = outcomes[VICTIM]
    assert (victim.code, victim.type) == (0, "RuntimeError")
    assert "Too many open files" in victim.message
    for each in survivors(outcomes).values():
        assert "rank 1 failed first with RuntimeError" in each.message
        assert "Too many open files" in each.message


@pytest.mark.parametrize("place", ["between steps", "gather", "swap"])
def test_after_registering_no_descriptor_is_needed(place: str, tmp_path: Path) -> None:
    for each in run(Case("ddp", place, "no descriptors"), tmp_path):
        assert (each.error, each.code, each.step) == ([], 0, STEPS)
