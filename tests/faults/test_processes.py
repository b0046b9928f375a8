"""A rank that raises, exits, is killed or stopped, or lacks memory, at every phase of training.

The other ranks must end or go on within the timeout of the process group, with an error that names
the rank. Nothing may be applied on some of them only.
"""

from pathlib import Path

import pytest
import torch

from tests.faults.ranks import TIMEOUT, VICTIM, Case, Outcome, run
from tests.support.cases import soak

MARGIN = 15
"""Seconds beyond the timeout: for reports of other ranks, on a busy machine."""

TYPES = {
    **{"raise": "MemoryError", "raise and stay": "MemoryError", "exit": "SystemExit"},
    **{"SIGINT": "KeyboardInterrupt", "out of memory": "RuntimeError"},
}
"""By fault: what the script of the rank itself sees."""

ENDS = ("raise", "exit", "SIGTERM", "SIGINT", "SIGKILL")
SIGNALS = ("SIGINT", "SIGKILL")
PLACES = ("register", "forward", "bucket 0", "bucket 1", "finish", "optimizer step")
PLACES += ("between steps", "gather", "swap")
OTHERS = ("late", "bidirectional", "two levels", "fsdp", "local sgd", "compressed local sgd")
OTHERS += ("jointspar",)

NOW = [
    Case("ddp", "bucket 1", "SIGKILL"),
    Case("ddp", "bucket 1", "raise and stay"),
    Case("ddp", "finished", "SIGINT"),
]
ALL = [Case("ddp", place, fault) for place in PLACES for fault in ENDS]
ALL += [Case("ddp", "finished", fault) for fault in SIGNALS]
ALL += [Case("ddp", "connect", fault) for fault in ("raise", "SIGKILL")]
ALL += [Case("ddp", place, "raise and stay") for place in ("bucket 0", "finish")]
ALL += [
    Case(client, place, fault)
    for client in OTHERS
    for place in ("between steps", "bucket 0", "finish")
    for fault in ("raise", *SIGNALS)
]
# Not LocalSGD: an interrupt between the end of its exchange and the copy of the means is not
# undone.
ALL += [
    Case(client, "finished", fault)
    for client in OTHERS
    for fault in SIGNALS
    if "local" not in client
]
ALL += [Case("two levels", "bucket 1", "raise and stay")]
ALL += [Case("ddp", place, "out of memory") for place in ("bucket 1", "finish")]
ALL += [Case(client, "bucket 0", "out of memory") for client in OTHERS]
LATER = [case for case in ALL if case not in NOW]


def survivors(outcomes: list[Outcome]) -> dict[int, Outcome]:
    return {rank: each for rank, each in enumerate(outcomes) if rank != VICTIM}


def assert_ended(case: Case, outcomes: list[Outcome], timeout: float = TIMEOUT) -> None:
    """Require an error on every other rank that names the rank, and an unchanged state."""
    for rank, each in survivors(outcomes).items():
        assert each.code == 0, f"rank {rank} hung, or died: {each}"
        assert each.seconds < timeout + MARGIN
        assert each.unchanged, f"rank {rank} has another state than before the step: {each.trace}"
        assert_left_nothing(case, rank, each)
        if case.client == "fsdp" and each.type == "RuntimeError":
            continue  # a collective of torch itself
        assert each.type == "RankFailureError", f"rank {rank}: {each.trace}"
        assert f"failed on rank {rank}" in each.message
        assert f"rank{'s' if case.client in PAIRS else ' 1'}" in each.message
        assert "checkpoint" in each.message


PAIRS = ("two levels", "fsdp")
"""Clients whose ranks exchange in groups of two. A rank whose partner lives sees it leave."""


def assert_left_nothing(case: Case, rank: int, each: Outcome) -> None:
    """Require that no descriptor and no thread remains after close()."""
    descriptors, threads = each.left
    # FSDP2 and device meshes keep their groups until the process ends. With hosts of their own,
    # rank 0 has the sockets of the store.
    if case.client != "fsdp":
        assert threads <= 0, f"rank {rank} has left {threads} threads"
        assert descriptors <= 0 or case.fault == "network", f"rank {rank} has left {descriptors}"


def assert_equal_replicas(case: Case, outcomes: list[Outcome]) -> None:
    """Require equal parameters on all ranks that have taken equally many steps."""
    if case.client in ("fsdp", "local sgd", "compressed local sgd"):
        return  # each rank has its own shard, or its own local steps
    by_step: dict[int, torch.Tensor] = {}
    for each in outcomes:
        if each.weights is not None:
            assert torch.equal(by_step.setdefault(each.step, each.weights), each.weights)


@pytest.mark.parametrize("case", [*NOW, *soak(LATER)], ids=str)
def test_the_other_ranks_end_with_an_error_and_the_state_before_the_step(
    case: Case, tmp_path: Path
) -> None:
    outcomes = run(case, tmp_path)
    assert_ended(case, outcomes)
    assert_equal_replicas(case, outcomes)
    victim = outcomes[VICTIM]
    if case.fault in ("SIGKILL", "SIGTERM"):
        assert victim.code in (-9, -15)
    else:
        # Its own error reaches the script, which can save.
        assert (victim.type, victim.code) == (TYPES[case.fault], 0), victim
        # After its backward pass, a step counts.
        assert victim.unchanged or case.place == "optimizer step", victim
    one_level = case.client in ("ddp", "late", "bidirectional", "jointspar")
    reported = case.fault == "raise and stay" or (case.fault == "out of memory" and one_level)
    if reported or (case.fault == "exit" and case.place.startswith("bucket")):
        for each in survivors(outcomes).values():
            assert f"rank 1 failed first with {TYPES[case.fault]}: {victim.message}" in each.message


STOPPED = [
    Case("ddp", place, "SIGSTOP")
    for place in ("register", "forward", "bucket 1", "finish", "gather", "swap")
]
STOPPED += [Case(client, "bucket 0", "SIGSTOP") for client in OTHERS]


@pytest.mark.parametrize("case", soak(STOPPED), ids=str)
def test_a_stopped_rank_ends_the_others_within_the_timeout(case: Case, tmp_path: Path) -> None:
    outcomes = run(case, tmp_path, timeout=8)
    assert_ended(case, outcomes, timeout=8)
    assert_equal_replicas(case, outcomes)
    # After SIGCONT, it finds that the others have ended.
    assert (outcomes[VICTIM].code, outcomes[VICTIM].unchanged) == (0, True)
    assert outcomes[VICTIM].type


PAUSE = "SIGSTOP for a while"
PAUSED = [Case("ddp", place, PAUSE) for place in ("register", "forward", "bucket 1", "finish")]
PAUSED += [Case("ddp", place, PAUSE) for place in ("gather", "swap")]
PAUSED += [Case(client, "bucket 0", PAUSE) for client in OTHERS]


@pytest.mark.parametrize("case", soak(PAUSED), ids=str)
def test_ranks_wait_for_a_paused_rank_and_get_the_same_bits(case: Case, tmp_path: Path) -> None:
    slow = run(case, tmp_path / "slow")
    whole = run(Case(case.client, case.place, "none"), tmp_path / "whole")
    for one, other in zip(slow, whole, strict=True):
        assert one.completed, one
        assert torch.equal(one.weights, other.weights)


@pytest.mark.soak
def test_without_descriptors_registering_fails_on_all_ranks(tmp_path: Path) -> None:
    case = Case("ddp", "connect", "no descriptors")
    outcomes = run(case, tmp_path, timeout=8)
    assert_ended(case, outcomes, timeout=8)
    assert (outcomes[VICTIM].code, outcomes[VICTIM].type) == (0, "RuntimeError")
    for each in outcomes:
        assert "Too many open files" in each.message


@pytest.mark.soak
@pytest.mark.parametrize("place", ["between steps", "gather", "swap"])
def test_after_registering_no_descriptor_is_needed(place: str, tmp_path: Path) -> None:
    assert all(each.completed for each in run(Case("ddp", place, "no descriptors"), tmp_path))
