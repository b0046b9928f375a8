"""Whole messages and steps with Triton's kernels: the bits of plain torch."""

import numpy as np
import pytest
import torch

from tests.kernels.definitions import awkward, drift, is_code, same, some_of, sorted_out, specified
from tests.kernels.forms import vectors
from tests.kernels.interpreted.place import small_blocks, triton_on_the_cpu
from tests.support import outcomes
from tests.support.cases import only, thorough
from tests.support.codecs import codec_of
from tests.support.vectors import normal
from torchcomp import Averager, run_in_process
from torchcomp.compressors import Quantize, TopK
from torchcomp.engine.keys import Key
from torchcomp.kernels import backend, quantize
from torchcomp.kernels.cast import narrow, saturate
from torchcomp.kernels.elementwise_triton import DTYPES, CastSum
from torchcomp.kernels.elias_fano import low_bits
from torchcomp.kernels.sparse_triton import SparseTriton
from torchcomp.routes.allreduce import _share

# Differences of infinities.
pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:overflow encountered:RuntimeWarning",
)


@pytest.fixture(autouse=True)
def _small_blocks():
    with small_blocks():
        yield


# --- Messages -------------------------------------------------------------------------------------

SIZES = {"one": [1000], "several": [1, 0, 600, 2, 150], "even": [512, 256]}
COMPRESSORS = [
    *(TopK(0.05, values=fmt, scope="tensor") for fmt in (None, *quantize.FORMATS)),
    TopK(0.4, values="int8", rounding="stochastic", scope="tensor"),  # bitmaps
    TopK(0.01),
    Quantize("int8"),
    Quantize("int4", rounding="stochastic"),
]
CASES = [
    (compressor, dtype, memory, case)
    for compressor in COMPRESSORS
    for dtype in DTYPES
    for memory in DTYPES
    for case in SIZES
]
NOW = [
    (COMPRESSORS[0], torch.float32, torch.bfloat16, "several"),
    (COMPRESSORS[4], torch.bfloat16, torch.bfloat16, "several"),
    (COMPRESSORS[7], torch.float16, torch.bfloat16, "several"),
]


def through(compressor, dtype, memory, case):
    """Frames, rests and means of two ranks, and those of a second step with the same codec."""
    codec, numel, found, rows = codec_of(compressor, SIZES[case], dtype), sum(SIZES[case]), [], []
    for rank, step in ((0, 0), (1, 0), (0, 1)):
        key, g = Key(3, step, rank=rank), normal(numel, dtype=dtype, seed=step)
        if rank == 1:
            g = awkward(numel, dtype)
            if getattr(compressor, "values", "int8") not in quantize.LEVELS:
                g.nan_to_num_(nan=3.0, posinf=torch.inf, neginf=-torch.inf)  # bits of NaN vary
        e, rest = normal(numel, dtype=memory, seed=9), torch.empty(numel, dtype=memory)
        sent = codec.encode_sum(g, e, rest, key)
        rows.append(codec.frames.outgoing.clone())
        x = normal(numel, dtype=memory, seed=5)
        codec.subtract(sent, x, key, -3.0 if compressor.selects else -1.0)
        found += [rows[-1], rest, x]
    codec.encode(normal(numel, dtype=dtype, seed=7), key)
    mean = torch.full((numel,), torch.nan, dtype=dtype)
    codec.mean_of(torch.stack(rows), mean, Key(3), 3)
    return [*found, codec.frames.outgoing.clone(), mean]


@pytest.mark.parametrize("case", [*NOW, *thorough(CASES[::11])], ids=str)
def test_frames_rests_and_means_are_those_of_plain_torch(case):
    with backend.plain_torch("cpu"):
        expected = through(*case)
    with triton_on_the_cpu():
        found = through(*case)
    for a, b in zip(found, expected, strict=True):
        same(a, b)


@pytest.mark.parametrize("ranks", [1, 5, *thorough([64])])
def test_any_number_of_messages(ranks):
    codec, rows = codec_of(TopK(0.1), [300]), []
    for rank in range(ranks):
        codec.encode(normal(300, seed=rank), Key(3))
        rows.append(codec.frames.outgoing.clone())
    rows, out, expected = torch.stack(rows), torch.empty(300), torch.empty(300)
    codec.mean(codec.frames.unpack(rows), expected, Key(3), ranks)
    SparseTriton(codec.vectors, None).mean_of(rows, out, ranks)
    same(out, expected)


CASTS = [(g, w, e) for g in DTYPES for w in quantize.CASTS.values() for e in DTYPES]


@pytest.mark.parametrize("combination", only(CASTS, now=CASTS[::4]), ids=str)
@pytest.mark.parametrize("ranks", [8, *thorough([3])])
def test_a_sum_of_casts(combination, ranks):
    dtype, sent, memory = combination
    n = 500
    g, e = awkward(n, dtype), normal(n, dtype=memory, seed=1)
    g[200:] = normal(300, dtype=dtype, seed=2)
    g[3], g[4], e[5] = torch.finfo(dtype).max, -torch.finfo(dtype).max, 60000.0
    sums = torch.add(g, e, out=torch.empty(n, dtype=memory))
    shares = _share(dtype, ranks), _share(sent, ranks)
    # As AllReduceRoute does.
    x = narrow(sums, dtype, torch.empty(n, dtype=dtype), shares[0])
    x = saturate(x, sent, shares[1]).clone().mul_(1.0 / ranks)
    wanted = narrow(x, sent)
    message, rest = torch.empty(n, dtype=sent), torch.empty(n, dtype=memory)
    kernels = CastSum(dtype, sent, ranks, shares)
    kernels.add(g, e, rest, message)
    same(message, wanted)
    # In float32: torch's `add_` rounds `alpha * wanted` first in the last elements of a vector.
    same(rest, (sums.float() - ranks * wanted.float()).to(memory))


# --- Selection ------------------------------------------------------------------------------------


def selecting(n, k, dtype=torch.float32):
    return SparseTriton(vectors((0, n, k), dtype=dtype), None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_numbers_and_vectors_that_drift(dtype):
    n = 1400
    for k in (1, 14, 700, n - 1):
        x, kernels = awkward(n, dtype), selecting(n, k, dtype)
        for _ in range(2):  # from all, and from the last threshold
            assert kernels.select(x).equal(sorted_out(x, k))
    kernels = selecting(900, 9)
    for g, e, out in drift(900, 3):
        assert kernels.add_and_select(g, e, out).equal(sorted_out(g + e, 9))


BOUNDS = {  # a threshold and a margin
    "zero": (0, 0),
    "negative": (0, 1 << 26),
    "too low": (0x3C000000, 1 << 13),
    "too high": (0x41000000, 1 << 13),
    "above infinity": (2**31 - 1, 0),
}


@pytest.mark.parametrize("bound", only(BOUNDS, now=["too low", "too high"]))
def test_no_bound_changes_the_result(bound):
    x = normal(1400)
    for k in (10, 300):  # at 10, most candidates of a low bound do not fit
        kernels, expected = selecting(1400, k), sorted_out(x, k)
        kernels.select(x)
        kernels._selecting._bound.copy_(torch.tensor(BOUNDS[bound]))
        for _ in range(2):
            assert kernels.select(x).equal(expected)
        # Whatever the bound was, the threshold of this step is the next one's.
        assert int(kernels._selecting._bound[0]) == int(x.abs()[expected].min().view(torch.int32))


def test_after_a_step_that_did_not_end():
    x, kernels = normal(600), selecting(600, 9)
    kernels.select(x)
    write = kernels._selecting._launches["select", False, False].pop()
    with pytest.raises(TypeError, match="DONE"):
        kernels.select(x)
    kernels._selecting._launches["select", False, False].append(write)
    kernels._selecting._counters.fill_(5)
    kernels._selecting._clean = False
    assert kernels.select(x).equal(sorted_out(x, 9))


# --- Damage ---------------------------------------------------------------------------------------


def damaged(n, k, generator):
    """Codes with flipped bits, random bytes, and indices that do not ascend below n."""
    good = some_of(n, k).tolist()
    for flips in [1, 2] * 3:
        raw = np.array(specified(good, n), dtype=np.uint8)
        for bit in generator.integers(0, 8 * len(raw), flips):
            raw[bit // 8] ^= 1 << bit % 8
        yield raw.tolist()
    for density in (0.1, 0.3, 0.5, 0.9):
        yield np.packbits(generator.random(8 * len(raw)) < density).tolist()
    yield specified([*good[:-2], good[-1], good[-1]], n)
    yield specified([*good[:-2], good[-1], good[-2]], n)
    if n >> low_bits(n, k) == n - 1 >> low_bits(n, k):  # the high part has room for it
        yield specified([*good[:-1], n], n)
    yield specified(some_of(n, k, 1).tolist(), n)  # of other indices


CODES = [(40, 2), (64, 9), (100, 60), (1000, 10), (2000, 100)]


@pytest.mark.parametrize("code", only(CODES, now=[(40, 2), (1000, 10)]), ids=str)
def test_damage_is_found(code):
    n, k = code
    codec, rows = codec_of(TopK(k=k, scope="tensor"), [50, n, 50]), []
    for rank in range(2):
        codec.encode(normal(100 + n, seed=rank), Key(3))
        rows.append(codec.frames.outgoing.clone())
    (begin, *_) = codec.frames._places[1][-1]
    expected, verdicts = torch.empty(100 + n), []
    codec.mean(codec.frames.unpack(torch.stack(rows)), expected, Key(3), 2)
    for content in damaged(n, k, np.random.default_rng(n)):
        if len(content) != len(specified(some_of(n, k).tolist(), n)):
            continue
        broken = torch.stack(rows)
        broken[1, begin : begin + len(content)] = torch.tensor(content)
        out = torch.empty(100 + n)
        with triton_on_the_cpu():
            codec_of(TopK(k=k, scope="tensor"), [50, n, 50]).mean_of(broken, out, Key(3), 2)
        intact = is_code(content, n, k)
        assert out[:50].equal(expected[:50]) if intact else out.isnan().all()
        verdicts.append(intact)
    assert len(set(verdicts)) == 2


# --- Whole steps ----------------------------------------------------------------------------------

METHODS = [
    'ef(topk(0.05), exchange="allgather")',
    "bidirectional(topk(0.05), topk(0.05))",
    *only(
        [
            'ef(topk(0.05), exchange="sharded")',
            'bidirectional(topk(0.05), topk(0.05), selection="exact")',
            'ef(quantize("int4"))',
            'ef21(topk(0.05), exchange="allgather")',
        ],
        now=[],
    ),
]


def steps(method, dtype):
    """Return the means and the states of all ranks after three steps."""

    def body(exchange):
        draws = torch.Generator().manual_seed(exchange.rank)
        shapes = {"weight": (60, 40), "bias": (77,)}
        like = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
        averager, means = Averager(method, exchange, like), []
        for _ in range(3):
            tensors = {name: torch.randn(s, generator=draws) for name, s in shapes.items()}
            tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
            averager.average_all(tensors)
            means.append(tensors)
        state = averager.state_dict()
        if '"exact"' in method:
            # On an accelerator, the search for the entries of a downlink sends other messages.
            del state["traffic"]
        return means, state

    return run_in_process(2, body)


@pytest.mark.parametrize("dtype", [torch.float32, *thorough([torch.bfloat16])])
@pytest.mark.parametrize("method", METHODS)
def test_the_bits_of_a_training_are_those_of_the_host(method, dtype):
    expected = steps(method, dtype)
    with triton_on_the_cpu():
        found = steps(method, dtype)
    assert outcomes.same(found, expected)
