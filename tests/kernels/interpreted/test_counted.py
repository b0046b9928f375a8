"""Messages with counts that only the device knows, and the search for them, against plain torch."""

from types import SimpleNamespace

import pytest
import torch

from tests.kernels.definitions import same
from tests.kernels.interpreted.place import small_blocks, triton_on_the_cpu
from tests.support.cases import only, some, thorough
from tests.support.vectors import normal
from torchcomp import run_in_process
from torchcomp.compressors import TopK
from torchcomp.engine.bucket import BucketShape
from torchcomp.engine.keys import Key
from torchcomp.kernels import quantize
from torchcomp.kernels.counted_triton import Counted, Search
from torchcomp.routes.searches import HostSearch
from torchcomp.routes.sharded import Messages, _messages
from torchcomp.routes.shards import direction

CPU, KEY, RANKS = torch.device("cpu"), Key(0), 3

# Differences of infinities.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def _small_blocks():
    with small_blocks():
        yield


def shape_of(dtype=torch.float32):
    return BucketShape(("a", "b", "c"), ((30, 20), (7,), (500,)), dtype)


def bucket_of(checked=None):
    """A bucket of rank 1. The headers of the frames that it receives are added to `checked`."""

    def check(frames, received, senders):
        headers = frames.headers(received) if frames.nbytes else None
        if checked is not None:
            checked.append(headers)

    exchange = SimpleNamespace(checksum=False, rank=1, world_size=RANKS, check=check)
    return SimpleNamespace(exchange=exchange, slots={}, device=CPU)


def both(role, compressor, dtype=torch.float32, checked=None):
    """The messages of rank 1 in both forms, and what they are made for."""
    way = direction(role, compressor, "exact", shape_of(dtype), RANKS)
    every, own = range(RANKS), [1] * RANKS
    sends, reads = (every, own) if role == "up" else ([1], every)
    bucket = bucket_of(checked)
    with triton_on_the_cpu():
        counted = _messages(bucket, way, sends, reads)
    assert isinstance(counted, Counted)
    return Messages(way, sends, reads, bucket), counted, way


COUNTS = {"some": 0.1, "none": 0.0, "all": 1.0, "many": 0.6}


def chosen(pieces, share, seed):
    """Some indices of each piece, and their counts. Every other piece has none."""
    draws, index, counts = torch.Generator().manual_seed(seed), [torch.arange(0)], []
    for i, piece in enumerate(pieces):
        k = int(share * piece.n) if share == 1 or i % 2 == 0 else 0
        index.append(torch.randperm(piece.n, generator=draws)[:k].sort().values + piece.start)
        counts.append(k)
    return torch.cat(index), torch.tensor(counts)


CASES = [
    (share, fmt, dtype, scope)
    for share in COUNTS
    for fmt in (None, *quantize.FORMATS)
    for dtype in (torch.float32, torch.bfloat16)
    for scope in ("bucket", "tensor")
]


@pytest.mark.parametrize("case", only(CASES[::3], now=CASES[::21]), ids=str)
def test_the_frames_and_the_mean_are_those_of_plain_torch(case):
    share, fmt, dtype, scope = case
    checked = []
    plain, counted, way = both("up", TopK(0.5, values=fmt, scope=scope), dtype, checked)
    numel, (_, own, _) = way.shape.numel, way.shards
    pieces = [piece for owner in range(RANKS) for piece in way.places(owner, True)]
    index, mine = chosen(pieces, COUNTS[share], 1)
    x = normal(numel, seed=3)
    # Of plain values, NaN can have other bits.
    x[5] = torch.nan if fmt in quantize.LEVELS else torch.inf
    frames, theirs = [], []
    for rank in range(RANKS):  # what the others send to rank 1
        sender = Messages(way, [1], [], bucket_of())
        there, counts = chosen(way.places(1, True), COUNTS[share], rank)
        sender.begin(counts, counts[:0])
        sender.write(normal(numel, seed=rank), there, KEY, False)
        frames.append(sender.outgoing.clone())
        theirs.append(counts)
    received, found = torch.cat(frames), []
    for form in (plain, counted):
        form.begin(mine, torch.cat(theirs))
        rest = x.clone()
        form.write(rest, index, KEY, True)
        form.subtract(rest, KEY, -3.0)
        out = torch.full((own.stop - own.start,), torch.nan)
        form.mean(received, out, KEY, RANKS)
        found.append((rest, out, list(form.sizes), list(form.arriving), form.outgoing.clone()))
    for a, b in zip(*found, strict=True):
        assert (a == b) if isinstance(a, list) else same(a, b) is None
    assert checked[0] is None, "the host sees that they are right"
    assert not checked[1].any()


@pytest.mark.parametrize("bit", [3, 12, 30, 64, *thorough([126])])
def test_headers_that_differ_are_found(bit):
    checked = []
    _, counted, way = both("down", TopK(0.1), checked=checked)
    counts = torch.tensor([len(way.places(rank, True)) * 9 for rank in range(RANKS)])
    counted.begin(counts[1:2], counts)
    index = torch.arange(int(counts[1]))
    counted.write(torch.ones(way.shards[1].stop), index, KEY, False)
    received = torch.zeros(sum(counted.arriving), dtype=torch.uint8)
    start = counted.arriving[0]
    received[start : start + counted.arriving[1]] = counted.outgoing
    received[start + bit // 8] ^= 1 << bit % 8
    out = torch.empty(way.shape.numel)
    counted.mean(received, out, KEY, 1)
    (differences,) = checked
    words = [0, 0]
    words[bit // 64] = 1 << bit % 64
    assert differences[1].tolist() == words
    assert differences[0].all()
    assert differences[2].all()
    assert out.isnan().all(), "the codes of the others are zeros"


@pytest.mark.parametrize("count", [-5, 10**6])
def test_counts_that_cannot_be_lead_nowhere_else(count):
    checked = []
    _, counted, way = both("down", TopK(0.1), checked=checked)
    right, wrong = torch.tensor([9, 9, 9]), torch.tensor([9, 9, count])
    counted.begin(right[1:2], right)
    size = counted.arriving[2]
    counted.begin(right[1:2], wrong)
    assert 0 <= counted.arriving[2] <= 5 * way.shape.numel
    received = torch.zeros(max(sum(counted.arriving), size), dtype=torch.uint8)
    counted.mean(received, torch.empty(way.shape.numel), KEY, 1)
    assert checked[0][:2].all()


# --- The search -----------------------------------------------------------------------------------


def drawn(kind, numel, step):
    """A vector whose magnitudes are hard to select from."""
    x = normal(numel, seed=step)
    if kind == "ties":
        return (x * 2).round()
    if kind == "zeros":
        return torch.where(torch.arange(numel) % 50 == 0, x, 0.0)
    if kind == "one owner":
        x[: numel // 8] *= 1e6
    if kind == "equal":
        x.fill_(-3.0)
    if kind == "not finite":
        x[::9], x[4::11] = torch.nan, -torch.inf
    return x * (10.0**-step if kind == "falling" else 1.0)


KINDS = ["normal", "ties", "zeros", "one owner", "equal", "not finite", "falling"]


def searched(form, kind, compressor, steps):
    """By step and rank: the entries, counts and thresholds that ranks find with this form."""
    way = direction("down", compressor, "exact", shape_of(), RANKS)

    def body(exchange):
        rank = exchange.rank
        at = [p.vector + o * len(way.kept) for o in range(RANKS) for p in way.pieces[o]]
        place = [way.place(v, rank) for v in range(len(way.kept))]
        if form is Search:
            search = Search(place, at, way.sizes, way.searched, exchange, CPU)
        else:
            search = HostSearch(way, exchange, CPU)
        own, found = slice(way.shards[rank].start, way.shards[rank].stop), []
        before = torch.zeros(len(way.kept), dtype=torch.int64)
        for step in range(steps):
            g, e = drawn(kind, way.shape.numel, step)[own], torch.zeros(own.stop - own.start)
            x, after = torch.empty_like(g), torch.empty_like(before)
            index, counts = search(g, e, x, before, after)
            first = sum(len(pieces) for pieces in way.pieces[:rank])
            kept, at, parts = counts[first : first + len(way.pieces[rank])].tolist(), 0, []
            for piece, count in zip(way.pieces[rank], kept, strict=True):
                room = way.candidates[piece.vector][rank] if form is Search else count
                parts.append(index[at : at + count])
                at += room
            found.append((torch.cat(parts).tolist(), counts.tolist(), after.tolist(), x.tolist()))
            before = after
        return found

    return run_in_process(RANKS, body)


@pytest.mark.parametrize("kind", only(KINDS, now=["ties", "one owner", "falling"]))
@pytest.mark.parametrize("compressor", some([TopK(0.05), TopK(0.3, scope="tensor")], of=2), ids=str)
def test_both_forms_of_the_search_find_the_same(kind, compressor):
    found = [str(searched(form, kind, compressor, 3)) for form in (Search, HostSearch)]
    assert found[0] == found[1]  # as text: NaN differs from itself
