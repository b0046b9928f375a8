"""register(manager=...): ranks join, leave and die between steps, and nothing of others is lost."""

import threading
from collections.abc import Callable
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
Attempt = tuple[int, int]
"""A step, and the quorum in which it was tried."""


@dataclass
class Record:
    """What one rank has seen.

    Attributes:
        dense: its own gradients in each attempt.
        sizes: number of ranks in each attempt.
        applied: the means of the attempts that it has counted.
        unsent: its residual at the end, in the unit of its gradients.
        weights: at the end.
    """

    dense: dict[Attempt, Gradients] = field(default_factory=dict)
    sizes: dict[Attempt, int] = field(default_factory=dict)
    applied: dict[Attempt, Gradients] = field(default_factory=dict)
    unsent: Gradients = field(default_factory=dict)
    weights: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    error: BaseException | None = None


class Rank:
    """A rank with its model, on a thread."""

    def __init__(self, manager: Manager, spec: str = TOPK, **options: Any) -> None:
        self.manager, self.record = manager, Record()
        self.model = DistributedDataParallel(
            mlp(), process_group=alone(), bucket_cap_mb=SMALL_BUCKETS
        )
        self.handle = torchcomp.register(self.model, spec, manager=manager, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        manager.register_state_dict_fn(
            "model", self.model.load_state_dict, lambda: clone(self.model.state_dict())
        )

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
        loss_of(self.model(batch)).backward()
        counts = manager.should_commit(vote)
        if counts:
            record.applied[attempt] = gradients(self.model)
            self.optimizer.step()
        return counts

    def close(self) -> Record:
        parameters = self.handle.averager.parameters
        self.record.unsent = unsent_gradients(parameters, self.handle.state_dict())
        self.record.weights = weights(self.model)
        self.handle.close()
        return self.record


def clone(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in state.items()}


def train(
    spans: dict[str, tuple[int, int]],
    body: Callable[[Rank], None] | None = None,
    spec: str = TOPK,
    faults: dict[str, Fault] | None = None,
) -> dict[str, Record]:
    """Run `body` for each rank, on a thread. By default, train until the rank's last step."""
    lighthouse, records = Lighthouse(spans), {}

    def main(name: str) -> None:
        manager = Manager(lighthouse, name, *filter(None, [(faults or {}).get(name)]))
        rank = Rank(manager, spec)
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
    assert {name: record.error for name, record in records.items()} == dict.fromkeys(SPANS)
    sizes = records["a"].sizes
    assert [sizes[attempt] for attempt in sorted(sizes)] == SIZES
    assert_none(missing(records, "ade"))
    assert equal_on_all(records[name].weights for name in "ade")
    for name in "bc":
        assert not any(part.any() for part in records[name].unsent.values())
    assert any(part.any() for name in "ade" for part in records[name].unsent.values())


@pytest.mark.parametrize("spec", thorough(THROUGH_DDP))
def test_every_method_goes_on_with_other_ranks(spec: str) -> None:
    records = train(SPANS, leave_at_the_end, spec)
    assert equal_on_all(records[name].weights for name in "ade")


def fault(step: int, call: int, point: str) -> Fault:
    """A fault of one collective of a step, once: before it sends, or when it receives."""

    to_come = [(step, call, point)]

    def raises(group: Group, where: str) -> None:
        if (group.manager.current_step(), group.of_step, where) in to_come:
            to_come.clear()
            raise Cut(f"{point} {call}")

    return raises


CALLS = 4
"""Collectives of a step of ef(topk): one for each of three groups, and the conclusion."""


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
    assert {name: record.error for name, record in records.items()} == dict.fromkeys("abc")
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


@pytest.mark.parametrize("spec", [TOPK, CONSERVING[1], *thorough(THROUGH_DDP)])
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

    records = train(
        {"a": (0, 12), "b": (0, 12), "d": (3, 12), "e": (8, 12)}, body, "ef(randk(0.3))"
    )
    assert {name: record.error for name, record in records.items()} == dict.fromkeys("abde")
    assert_none(missing(records, "abde"))
    assert equal_on_all(record.weights for record in records.values())


def test_a_run_goes_on_from_checkpoints_with_another_number_of_ranks() -> None:
    states: dict[str, Any] = {}

    def first(rank: Rank) -> None:
        until(rank, 3)
        states[rank.manager.name] = rank.handle.state_dict(), rank.model.state_dict()

    def second(rank: Rank) -> None:
        handle, model = states[rank.manager.name]
        rank.handle.load_state_dict(handle)
        rank.model.load_state_dict(model)
        rank.manager._step = 3
        until(rank, 6)

    spec = CONSERVING[1]
    before = train(dict.fromkeys("abc", (0, 3)), first, spec)
    assert {state["world_size"] for state, _ in states.values()} == {3}
    after = train(dict.fromkeys("ab", (3, 6)), second, spec)
    left = missing(after, "ab")
    for name in left:
        left[name] += sum(before[rank].unsent[name] for rank in "ab") / 3
    assert_none(left)
