"""register(manager=...): ranks join, leave and die between steps, and nothing of others is lost."""

import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.support.cases import thorough
from tests.support.manager import Cut, Fault, Group, Lighthouse, Manager, alone
from tests.support.models import (
    CONSERVING,
    SMALL_BUCKETS,
    THROUGH_DDP,
    Gradients,
    gradients,
    local_gradients,
    loss_of,
    mlp,
    unsent_gradients,
    weights,
)
from tests.support.outcomes import equal_on_all, same

TOPK = "ef(topk(0.1))"
STEPS = 12
Attempt = tuple[int, int]  # a step, and the quorum in which it was tried


@dataclass
class Record:
    """What one rank has seen."""

    dense: dict[Attempt, Gradients] = field(default_factory=dict)  # its own in each attempt
    sizes: dict[Attempt, int] = field(default_factory=dict)  # number of ranks in each attempt
    applied: dict[Attempt, Gradients] = field(default_factory=dict)  # means that it has counted
    unsent: Gradients = field(default_factory=dict)  # at the end, in the unit of its gradients
    weights: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # at the end
    error: BaseException | None = None


class Rank:
    """A rank with its model, on a thread."""

    def __init__(self, manager: Manager, spec: str, scales: bool = False, **ddp: Any) -> None:
        self.manager, self.record = manager, Record()
        self.model = DistributedDataParallel(
            mlp(), process_group=alone(), bucket_cap_mb=SMALL_BUCKETS, **ddp
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=256.0, growth_interval=3, enabled=scales
        )
        self.handle = torchcomp.register(self.model, spec, manager=manager, scaler=self.scaler)
        register = manager.register_state_dict_fn
        register("scaler", self.scaler.load_state_dict, self.scaler.state_dict)
        register("model", self.model.load_state_dict, lambda: deepcopy(self.model.state_dict()))

    def batch(self) -> torch.Tensor:
        seed = 1000 * self.manager.current_step() + ord(self.manager.name)
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(4, 16, generator=generator, dtype=torch.float64)

    def step(self, vote: bool = True) -> bool:
        """Train for one step, and return whether the manager has counted it."""
        manager, record = self.manager, self.record
        manager.start_quorum()
        self.model.zero_grad()
        attempt, batch = (manager.current_step(), manager._quorum_id), self.batch()
        record.dense[attempt] = local_gradients(self.model, (batch,))
        record.sizes[attempt] = manager.num_participants()
        # With a scaler, the loss of "a" overflows in the fifth step.
        overflows = self.scaler.is_enabled() and (attempt[0], manager.name) == (4, "a")
        loss = loss_of(self.model(batch)) * (torch.inf if overflows else 1.0)
        self.scaler.scale(loss).backward()
        counts = manager.should_commit(vote)
        if counts:
            record.applied[attempt] = gradients(self.model)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return counts

    def close(self) -> Record:
        parameters = self.handle.averager.parameters
        self.record.unsent = unsent_gradients(parameters, self.handle.state_dict())
        self.record.weights = weights(self.model)
        self.handle.close()
        self.manager.shutdown()
        return self.record


def train(
    spans: dict[str, tuple[int, int]],
    body: Callable[[Rank], None] | None = None,
    spec: str = TOPK,
    faults: dict[str, Fault] | None = None,
    **options: Any,
) -> dict[str, Record]:
    """Run `body` for each rank, on a thread. By default, train until the rank's last step."""
    lighthouse, records = Lighthouse(spans), {}

    def main(name: str) -> None:
        manager = Manager(lighthouse, name, *filter(None, [(faults or {}).get(name)]))
        rank = Rank(manager, spec, **options)
        try:
            if body is None:
                until(rank, spans[name][1])
            else:
                body(rank)
        except BaseException as error:
            rank.record.error = error
            lighthouse.gone(name)
            if manager._pg is not None:
                manager._pg.cut()
        records[name] = rank.close()

    threads = [threading.Thread(target=main, args=(name,), daemon=True) for name in spans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: records[name] for name in spans}


def until(rank: Rank, end: int) -> None:
    while rank.manager.current_step() < end:
        rank.step()


def assert_no_error(records: dict[str, Record]) -> None:
    assert {name: record.error for name, record in records.items()} == dict.fromkeys(records)


def missing(records: dict[str, Record], present: str) -> Gradients:
    """Return the dense means that were neither applied nor are unsent on the ranks `present`.

    Also require that all ranks have applied the same means.
    """
    counted = {attempt for record in records.values() for attempt in record.applied}
    assert len(counted) == len({step for step, _ in counted})
    total: Gradients = {}
    for attempt in counted:
        ranks = [record for record in records.values() if attempt in record.dense]
        means = [record.applied[attempt] for record in ranks if attempt in record.applied]
        for name, mean in means[0].items():
            assert equal_on_all(each[name] for each in means)
            dense = sum(record.dense[attempt][name] for record in ranks)
            assert len(ranks) == ranks[0].sizes[attempt]
            total[name] = total.get(name, 0) + dense / len(ranks) - mean
    for name in total:
        total[name] -= sum(records[n].unsent[name] for n in present) / len(present)
    return total


def assert_none(left: Gradients) -> None:
    for name, values in left.items():
        assert float(values.abs().max()) < 1e-12, name


SPANS = {"a": (0, 12), "b": (0, 6), "c": (0, 6), "d": (3, 12), "e": (9, 12)}
SIZES = [3] * 3 + [4] * 3 + [2] * 3 + [3] * 3


def leave_at_the_end(rank: Rank) -> None:
    end = SPANS[rank.manager.name][1]
    until(rank, end - 1)
    if end < STEPS:
        rank.handle.leave()
        assert not rank.handle.left
    rank.step()
    assert rank.handle.left == (end < STEPS)


@pytest.mark.parametrize("spec", [*CONSERVING[:2], *thorough(CONSERVING[2:])])
def test_ranks_join_and_leave_and_nothing_is_lost(spec: str) -> None:
    records = train(SPANS, leave_at_the_end, spec)
    assert_no_error(records)
    sizes = records["a"].sizes
    assert [sizes[attempt] for attempt in sorted(sizes)] == SIZES
    assert_none(missing(records, "ade"))
    assert equal_on_all(records[name].weights for name in "ade")
    for name in "bc":
        assert not any(part.any() for part in records[name].unsent.values())
    assert any(part.any() for name in "ade" for part in records[name].unsent.values())


def fault(step: int, call: int, point: str) -> Fault:
    """A fault of one collective of a step, once: before it sends, or when it receives."""

    to_come = [(step, call, point)]

    def raises(group: Group, where: str) -> None:
        if (group.manager.current_step(), group.of_step, where) in to_come:
            to_come.clear()
            raise Cut(f"{point} {call}")

    return raises


METHODS = [spec for spec in THROUGH_DDP if spec not in CONSERVING[:2]]
CALLS = 4  # collectives of a step of ef(topk): one for each of three groups, and the conclusion


def kill(at: int, call: int) -> tuple[dict[str, Record], int]:
    """Train three ranks, of which "b" dies in a collective."""

    def body(rank: Rank) -> None:
        name = rank.manager.name
        while rank.manager.current_step() < 6:
            if not rank.step() and name == "b":
                raise KeyboardInterrupt

    return train(dict.fromkeys("abc", (0, 6)), body, faults={"b": fault(at, call, "send")})


@pytest.mark.parametrize("call", range(1, CALLS + 1))
def test_a_rank_that_dies_takes_its_own_residual_and_nothing_else(call: int) -> None:
    records = kill(3, call)
    assert isinstance(records["b"].error, KeyboardInterrupt)
    assert records["a"].error is records["c"].error is None
    left = missing(records, "ac")
    lost = records["b"].unsent
    assert any(part.any() for part in lost.values())
    assert_none({name: left[name] - part / 3 for name, part in lost.items()})
    assert equal_on_all(records[name].weights for name in "ac")
    assert sorted(records["a"].sizes.values()) == [2] * 3 + [3] * 4


@pytest.mark.parametrize("call", range(1, CALLS + 1))
@pytest.mark.parametrize("spec", [TOPK, *thorough(THROUGH_DDP[1:])])
def test_a_rank_that_alone_misses_a_message_loses_nothing(call: int, spec: str) -> None:
    """Of the last message, the others count the step that it takes for failed; then it heals."""
    spans, faults = dict.fromkeys("abc", (0, 6)), {"c": fault(3, call, "receive")}
    records = train(spans, spec=spec, faults=faults)
    assert_no_error(records)
    if spec == TOPK:
        assert [len(records[name].applied) for name in "abc"] == [6, 6, 5 if call == CALLS else 6]
    if spec in CONSERVING:
        assert_none(missing(records, "abc"))
    assert equal_on_all(record.weights for record in records.values())


def twice(rank: Rank, refusing: str) -> None:
    """Train for six steps. The fourth gets a vote of no from some ranks at first."""
    refused = False
    while rank.manager.current_step() < 6:
        refuses = rank.manager.current_step() == 3 and not refused
        refused |= refuses
        rank.step(vote=not (refuses and rank.manager.name in refusing))
        assert not rank.handle.left


@pytest.mark.parametrize("spec", [TOPK, CONSERVING[1], *thorough(METHODS)])
def test_a_step_that_is_not_counted_is_repeated_bit_for_bit(spec: str) -> None:
    plain, again = (
        train(dict.fromkeys("abc", (0, 6)), lambda rank, who=who: twice(rank, who), spec)
        for who in ("", "abc")
    )
    assert len(again["a"].sizes) == len(plain["a"].sizes) + 1
    for name, record in plain.items():
        assert torch.equal(record.weights, again[name].weights)
        assert same(record.unsent, again[name].unsent)


def test_a_rank_that_alone_votes_no_keeps_what_the_others_have_counted() -> None:
    records = train(dict.fromkeys("abc", (0, 6)), lambda rank: twice(rank, "c"))
    assert len(records["c"].applied) == 5
    assert_none(missing(records, "abc"))
    assert equal_on_all(record.weights for record in records.values())


def test_a_rank_that_joins_takes_the_method_of_the_others() -> None:
    """Also in the middle of a flush: the next steps send a residual that "mean" has no slot for."""

    def body(rank: Rank) -> None:
        for spec, end in (("mean", 3), (TOPK, 6), ("powersgd(rank=1)", 12)):
            until(rank, end)
            if rank.manager.current_step() == end < 12:
                rank.handle.swap(spec)

    spans = {"a": (0, 12), "b": (0, 12), "d": (3, 12), "e": (8, 12)}
    records = train(spans, body, "ef(randk(0.3))")
    assert_no_error(records)
    assert_none(missing(records, "abde"))
    assert equal_on_all(record.weights for record in records.values())


@pytest.mark.parametrize("convert", [True, False])
@pytest.mark.parametrize("spec", [CONSERVING[1], *thorough(CONSERVING[:1])])
def test_a_run_goes_on_from_checkpoints_with_another_number_of_ranks(
    spec: str, convert: bool
) -> None:
    """Converted, nothing is lost. Otherwise, what was unsent on the rank that is missing."""
    saved: dict[str, Any] = {}

    def first(rank: Rank) -> None:
        until(rank, 3)
        saved[rank.manager.name] = rank.handle.state_dict(), rank.model.state_dict()

    def second(rank: Rank) -> None:
        rank.handle.load_state_dict(states[rank.manager.name])
        rank.model.load_state_dict(saved["a"][1])
        rank.manager._step = 3
        until(rank, 6)

    before = train(dict.fromkeys("abc", (0, 3)), first, spec)
    states = {name: state for name, (state, _) in saved.items()}
    assert {state["world_size"] for state in states.values()} == {3}
    if convert:
        states = dict(zip("ab", torchcomp.redistribute(list(states.values()), 2), strict=True))
    after = train(dict.fromkeys("ab", (3, 6)), second, spec)
    left = missing(after, "ab")
    for name in left:
        left[name] += sum(before[rank].unsent[name] for rank in ("abc" if convert else "ab")) / 3
    assert_none(left)


def test_a_rank_goes_on_where_parameters_are_unused() -> None:
    def body(rank: Rank) -> None:
        if rank.manager.name in "bc" and rank.manager.current_step() == 0:
            until(rank, 5)
            rank.handle.leave()
        until(rank, SPANS[rank.manager.name][1])

    records = train(SPANS, body, find_unused_parameters=True)
    assert_no_error(records)
    assert_none(missing(records, "ade"))


def test_a_rank_that_joins_follows_the_loss_scale() -> None:
    """A step that overflows is skipped on all ranks, and counts for the manager."""
    records = train(SPANS, leave_at_the_end, scales=True)
    assert_no_error(records)
    assert equal_on_all(records[name].weights for name in "ade")
    assert all(part.isfinite().all() for name in "ade" for part in records[name].unsent.values())


# --- Errors ---------------------------------------------------------------------------------------


def on_two_ranks(body: Callable[[Rank], None]) -> None:
    assert_no_error(train(dict.fromkeys("ab", (0, 9)), body))


def test_a_nan_is_raised_on_every_rank_and_changes_nothing() -> None:
    def body(rank: Rank) -> None:
        until(rank, 2)
        if rank.manager.name == "b":
            rank.batch = lambda: torch.full((4, 16), torch.nan, dtype=torch.float64)
        before = rank.handle.state_dict()["slots"]
        with pytest.raises(torchcomp.NonFiniteError, match="on rank 1"):
            rank.step()
        rank.manager.should_commit(vote=False)
        assert same(rank.handle.state_dict()["slots"], before)

    on_two_ranks(body)


def test_two_backward_passes_in_one_step_are_refused() -> None:
    def body(rank: Rank) -> None:
        rank.manager.start_quorum()
        loss_of(rank.model(rank.batch())).backward()
        for call in (rank.handle.state_dict, lambda: rank.handle.left):
            with pytest.raises(RuntimeError, match="should_commit"):
                call()
        with pytest.raises(RuntimeError, match="manager"):
            rank.handle.gather_state_dict()
        with pytest.raises(RuntimeError, match="should_commit"):
            loss_of(rank.model(rank.batch())).backward()
        rank.manager.should_commit()
        rank.step()

    on_two_ranks(body)


def test_an_error_that_the_manager_knows_of_ends_the_step() -> None:
    def body(rank: Rank) -> None:
        until(rank, 1)
        start = rank.manager.start_quorum

        def broken() -> None:
            start()
            rank.manager.report_error(Cut("configure"))

        rank.manager.start_quorum = broken
        assert not rank.step()
        rank.manager.start_quorum = start
        assert rank.step()

    on_two_ranks(body)


def test_damaged_checkpoints_are_refused_and_change_nothing() -> None:
    def body(rank: Rank) -> None:
        until(rank, 2)
        before = rank.handle.state_dict()
        for change in ({"rank": 2}, {"world_size": 0}, {"spec": "mean"}, {"rank": "0"}):
            with pytest.raises(torchcomp.CheckpointError):
                rank.handle.load_state_dict({**before, **change})
            assert same(rank.handle.state_dict(), before)
        rank.step()

    on_two_ranks(body)


def swap_twice(rank: Rank) -> None:
    """Flush the residual in the fourth step, and go on with the first method three steps later."""
    until(rank, 3)
    rank.handle.swap("mean")
    until(rank, 6)
    rank.handle.swap(TOPK)
    until(rank, 9)


# The last one says that the flush is over.
@pytest.mark.parametrize("call", range(1, CALLS + 2))
def test_a_rank_that_alone_misses_a_message_of_a_flush_loses_nothing(call: int) -> None:
    faults = {"c": fault(3, call, "receive")}
    records = train(dict.fromkeys("abc", (0, 9)), swap_twice, faults=faults)
    assert_no_error(records)
    assert_none(missing(records, "abc"))
    assert equal_on_all(record.weights for record in records.values())
