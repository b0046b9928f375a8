"""Exchanges: results and byte counts. tests/exchange/test_private.py compares groups with them."""

import operator

import pytest
import torch

from tests.support.outcomes import caught
from tests.support.ranks import on_threads
from torchcomp import ProcessGroupExchange, RankMismatchError, run_in_process
from torchcomp.exchange.traffic import sum_bytes

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64]


def values(rank, size, dtype=torch.float32):
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(rank)) * 8
    return drawn.to(dtype)


def message(sender, receiver, size):
    return torch.arange(size, dtype=torch.uint8) + 16 * sender + receiver


def uneven(sender, receiver):
    """Size of a message; 0 for some pairs of ranks."""
    return (3 * sender + 5 * receiver) % 7


def collectives(exchange):
    """Call every collective, and return the results and the counted bytes by name."""
    rank, ranks = exchange.rank, exchange.world_size
    found, counted = {}, {}

    def note(name, result):
        found[name] = [t.clone() for t in result]
        moved = exchange.take_traffic(0)
        counted[name] = (moved.sent, moved.received)

    for dtype in DTYPES:
        total = values(rank, 6, dtype)
        exchange.all_reduce(total)
        note(f"all_reduce {dtype}", [total])
        note(f"reduce_scatter {dtype}", [exchange.reduce_scatter(values(rank, 3 * ranks, dtype))])
    note("reduce_scatter empty", [exchange.reduce_scatter(values(rank, 0))])
    for size in (0, 1, 17, 40_000):
        rows = exchange.all_gather_rows(values(rank, size, torch.bfloat16))
        assert rows.shape == (ranks, size)
        note(f"all_gather_rows {size}", rows.unbind())
    sizes = [uneven(sender, 0) for sender in range(ranks)]
    note("all_gather_v", exchange.all_gather_v(message(rank, 0, sizes[rank]), sizes).split(sizes))
    note("all_gather_v empty", [exchange.all_gather_v(message(rank, 0, 0), [0] * ranks)])
    outgoing = [uneven(rank, receiver) for receiver in range(ranks)]
    arriving = [uneven(sender, rank) for sender in range(ranks)]
    parts = torch.cat([message(rank, receiver, n) for receiver, n in enumerate(outgoing)])
    note("all_to_all", exchange.all_to_all(parts, outgoing, arriving).split(arriving))
    flags = torch.tensor([rank, 0, -rank, int(rank == 1)])
    note("all_reduce_max", [exchange.all_reduce_max(flags)])
    note("sum_control", [exchange.sum_control(torch.tensor([float(rank), 1.0]))()])
    return found, counted


def expected(rank, ranks):
    """The results by definition, except sums, which have rounding errors; and bytes by hand."""
    others = [other for other in range(ranks) if other != rank]
    sizes = [uneven(sender, 0) for sender in range(ranks)]
    parts = [message(sender, rank, uneven(sender, rank)) for sender in range(ranks)]
    sums = {}
    for dtype in DTYPES:
        sums[f"all_reduce {dtype}"] = (sum_bytes(6 * dtype.itemsize, ranks),) * 2
        sums[f"reduce_scatter {dtype}"] = (3 * dtype.itemsize * (ranks - 1),) * 2
    found = {
        "reduce_scatter empty": ([torch.empty(0)], (0, 0)),
        "all_gather_v": (
            [message(sender, 0, n) for sender, n in enumerate(sizes)],
            (sizes[rank] * len(others), sum(sizes[other] for other in others)),
        ),
        "all_gather_v empty": ([torch.empty(0, dtype=torch.uint8)], (0, 0)),
        "all_to_all": (
            parts,
            (sum(uneven(rank, r) for r in others), sum(uneven(r, rank) for r in others)),
        ),
        "all_reduce_max": ([torch.tensor([ranks - 1, 0, 0, int(ranks > 1)])], (0, 0)),
        "sum_control": ([torch.tensor([sum(range(ranks)), ranks]).float()], (0, 0)),
    }
    for n in (0, 1, 17, 40_000):
        rows = [values(r, n, torch.bfloat16) for r in range(ranks)]
        found[f"all_gather_rows {n}"] = rows, (2 * n * (ranks - 1),) * 2
    results = {name: result for name, (result, _) in found.items()}
    return results, sums | {name: moved for name, (_, moved) in found.items()}


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_collectives_return_and_count_what_is_expected(world_size):
    outcomes = run_in_process(world_size, collectives)
    for rank, (found, counted) in enumerate(outcomes):
        results, moved = expected(rank, world_size)
        assert counted == moved
        for name, wanted in results.items():
            assert len(found[name]) == len(wanted)
            assert all(map(torch.equal, found[name], wanted)), name
        for dtype in DTYPES:
            (total,) = found[f"all_reduce {dtype}"]
            wanted = sum(values(r, 6, dtype).double() for r in range(world_size))
            error = 0 if not dtype.is_floating_point else 100 * torch.finfo(dtype).eps
            torch.testing.assert_close(total.double(), wanted, rtol=0, atol=error)
            # The bits must be equal on all ranks, or replicas would drift apart.
            assert torch.equal(total, outcomes[0][0][f"all_reduce {dtype}"][0])
            (part,) = found[f"reduce_scatter {dtype}"]
            assert part.dtype == dtype
            whole = sum(values(r, 3 * world_size, dtype).double() for r in range(world_size))
            wanted = whole[3 * rank : 3 * rank + 3]
            torch.testing.assert_close(part.double(), wanted, rtol=0, atol=error)


@pytest.mark.parametrize("kind", ["in process", "process group"])
def test_arguments_do_not_change_and_results_do_not_share_their_memory(kind):
    def body(exchange):
        mine = torch.full((2,), float(exchange.rank))
        exchange.all_to_all(mine, [1, 1], [1, 1]).fill_(8.0)
        exchange.reduce_scatter(mine).fill_(7.0)
        exchange.all_gather_rows(mine).fill_(6.0)
        exchange.all_reduce_max(torch.zeros(1))
        return mine.tolist(), exchange.all_gather_rows(mine).tolist()

    in_process = kind == "in process"
    run = run_in_process if in_process else on_threads
    found = run(2, body if in_process else lambda: body(ProcessGroupExchange()))
    assert found == [([float(rank)] * 2, [[0.0, 0.0], [1.0, 1.0]]) for rank in range(2)]


# --- Values that must match on all ranks ----------------------------------------------------------


def refusals(world_size, body):
    return run_in_process(world_size, lambda exchange: caught(lambda: body(exchange)))


def test_verify_of_equal_values_passes_and_counts_no_bytes():
    def body(exchange):
        exchange.verify("a call", {"spec": "mean", "step": 3})
        traffic = exchange.take_traffic(0)
        # Numbers that differ in their sign or last bit are not the same.
        same = [exchange.same(n + d * exchange.rank) for n in (0, 2**62) for d in (0, 1)]
        return same, traffic.sent, traffic.received

    assert run_in_process(2, body) == [([True, False, True, False], 0, 0)] * 2


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_verify_raises_on_every_rank_with_the_values_that_differ(odd):
    def body(exchange):
        step = 4 if exchange.rank == odd else 3
        exchange.verify("a call", {"spec": "mean", "step": step}, "Do this.")

    others = ", ".join(str(rank) for rank in range(3) if rank != odd)
    for error in refusals(3, body):
        assert type(error) is RankMismatchError
        assert f"4 on rank {odd}" in str(error)
        assert f"3 on ranks {others}" in str(error)
        assert "mean" not in str(error)
        assert str(error).endswith("Do this.")


def fails_alone(exchange):
    return operator.truediv(1, exchange.rank), {}


@pytest.mark.parametrize(
    ("call", "make", "problem"),
    [
        (lambda e: "a call", lambda e: (0, {"spec": f"s{e.rank}"}), "s0 on rank 0, s1 on rank 1"),
        (lambda e: "a call", fails_alone, "division by zero on rank 0, none on rank 1"),
        (lambda e: f"call {e.rank}", lambda e: (0, {}), "call 1 on rank 1"),
    ],
    ids=["values", "error", "call"],
)
def test_build_raises_on_every_rank_if_they_differ(call, make, problem):
    for error in refusals(2, lambda e: e.build(call(e), {"x": 1}, lambda: make(e))):
        assert type(error) is RankMismatchError
        assert problem in str(error)


def test_build_returns_the_object_of_each_rank_or_raises_what_all_ranks_raise():
    def body(exchange):
        built = exchange.build("a call", {"x": 1}, lambda: (exchange.rank, {"y": 2}))
        return built, repr(caught(lambda: exchange.build("a call", {}, lambda: {}["gone"])))

    assert run_in_process(3, body) == [(rank, "KeyError('gone')") for rank in range(3)]


# --- Ranks of one process -------------------------------------------------------------------------


def test_the_error_of_a_rank_reaches_the_caller_and_wakes_the_others():
    def body(exchange):
        if exchange.rank == 1:
            raise LookupError("here")
        exchange.all_gather_rows(torch.zeros(1))

    with pytest.raises(LookupError, match="here"):
        run_in_process(3, body)
