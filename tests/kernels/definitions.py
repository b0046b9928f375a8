"""What kernels compute, by its definition, and vectors that are hard to treat."""

import numpy as np
import torch

from tests.support.vectors import normal
from torchcomp.kernels.elias_fano import low_bits

BIG = 2**31 + 5

EXAMPLES = [
    ([5, 40, 41, 120], 128, "85 89 19 04"),  # the example of docs/wire.md, l = 4
    ([1, 200, 255], 256, "01 7d 81 02"),  # l = 5: a low part spans two bytes
    ([0, 2, 3, 9], 10, "0d 02"),  # l = 0, a bitmap
    ([BIG - 1], BIG, "04 00 00 00 10"),  # l = 29
    ([], 1000, ""),
    ([0, 1, 2], 3, ""),
]
"""Indices, the length of their vector, and the bytes of their code."""


def awkward(n, dtype):
    """Ties, both zeros, denormals, infinities of both signs and NaN among ordinary numbers."""
    x = normal(n, dtype=dtype)
    tiny = torch.finfo(dtype).smallest_normal / 4
    odd = [0.0, -0.0, tiny, -tiny, 1.5, -1.5, torch.inf, -torch.inf, torch.nan, -torch.nan]
    for at, value in enumerate(odd):
        x[at::23] = value
    return x


def sorted_out(x, k):
    """The k largest by a stable sort of magnitudes, NaN and infinities first."""
    magnitude = x.double().abs().nan_to_num(nan=torch.inf, posinf=torch.inf).numpy()
    return torch.from_numpy(np.sort(np.argsort(-magnitude, kind="stable")[:k]))


def drift(n, steps):
    """Yield gradients and residuals as in training with error feedback."""
    e, out = torch.zeros(n), torch.empty(n)
    for step in range(steps):
        g = normal(n, seed=step) * 3.0 ** (step // 2)
        yield g, e, out
        e = out.clone()
        e[sorted_out(out, n // 100)] = 0.0


def some_of(n, k, seed=0):
    """Draw k of n indices, also if n is too large to permute."""
    generator = np.random.default_rng(seed)
    drawn = np.unique(generator.integers(0, n, 2 * k + 8)) if k < n // 100 else np.arange(n)
    return torch.from_numpy(np.sort(generator.choice(drawn, k, replace=False)))


def specified(chosen, n):
    """The Elias-Fano code of indices, bit by bit."""
    k = len(chosen)
    if k in (0, n):
        return []
    low = low_bits(n, k)
    lows = [value >> bit & 1 for value in chosen for bit in range(low)]
    # With the padding, so that invalid indices have a code as well.
    highs = [0] * (-(-(k + ((n - 1) >> low) if low else n) // 8) * 8)
    for i, value in enumerate(chosen):
        highs[(value >> low) + i if low else value] = 1
    parts = [np.array(bits, dtype=np.uint8) for bits in (lows, highs)]
    return np.concatenate([np.packbits(bits, bitorder="little") for bits in parts]).tolist()


def is_code(raw, n, k):
    """Whether bytes are the code of some k of n indices."""
    low = low_bits(n, k)
    bits = np.unpackbits(np.array(raw, dtype=np.uint8), bitorder="little").astype(np.int64)
    cut = (k * low + 7) // 8 * 8
    places = np.flatnonzero(bits[cut:])
    if len(places) != k or bits[k * low : cut].any():
        return False
    lows = bits[: k * low].reshape(k, low) @ (1 << np.arange(low)) if low else 0
    index = ((places - np.arange(k)) << low) + lows if low else places
    return bool((np.diff(index) > 0).all() and index[-1] < n)


def same(a, b):
    """Require equal values, where NaN equals NaN."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def same_bits(a, b):
    """Whether two tensors have equal bits, but for those of NaN."""
    a, b = a.cpu(), b.cpu()
    if a.is_floating_point():
        both = a.isnan() & b.isnan()
        a, b = a.masked_fill(both, 0.0), b.masked_fill(both, 0.0)
    return a.dtype == b.dtype and a.contiguous().view(torch.uint8).equal(
        b.contiguous().view(torch.uint8)
    )
