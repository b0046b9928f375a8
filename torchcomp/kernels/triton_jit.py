"""What the Triton kernels share. Import it only with Triton installed.

With ``TRITON_INTERPRET=1`` before the first import, they run on CPU tensors, interpreted.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

INFINITY = tl.constexpr(0x7F800000)
"""The bits of infinity in float32. The bits of NaN are larger."""


EXACT = {"enable_fp_fusion": False}
"""Options of every launch: round every product, as torch does. Triton's default varies."""


def kernel(*general: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function with ``triton.jit``, once for all values of the integers `general`."""
    return lambda function: triton.jit(function, do_not_specialize=general)


@kernel()
def number(x):
    """Return values of a 16-bit or 32-bit floating-point dtype as float32."""
    # Convert the bits, because Triton's interpreter flushes bfloat16 denormals to zero.
    if x.dtype == tl.bfloat16:
        wide = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
        x = wide.to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@kernel()
def magnitude(x):
    """Return int32 keys that order as the magnitudes of `x` do. NaN counts as infinity."""
    bits = number(x).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.minimum(bits, INFINITY)


@kernel()
def rounded(x, dtype: tl.constexpr):
    """Round float32 values to a 16-bit or 32-bit floating-point dtype, half to even."""
    # By hand, because Triton's interpreter cuts off what does not fit into bfloat16.
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        bits = tl.where(x == x, bits, 0x7FC0)
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@kernel()
def clamped(x, source: tl.constexpr, dtype: tl.constexpr):
    """Clamp finite float32 values of dtype `source` to the range of `dtype`, if it is narrower."""
    if dtype == tl.float16 and source != tl.float16:
        x = within(x, 65504.0)
    elif dtype == tl.bfloat16 and source == tl.float32:
        x = within(x, 3.3895313892515355e38)
    return x


@kernel()
def within(x, largest):
    """Clamp finite values to magnitudes up to `largest`. NaN and infinities stay."""
    finite = tl.abs(x) < float("inf")  # not true for NaN
    return tl.where(finite, tl.minimum(tl.maximum(x, -largest), largest), x)


@kernel()
def narrowed(x, source: tl.constexpr, dtype: tl.constexpr):
    """Convert float32 values of dtype `source` as :func:`.cast.narrow` does, in float32."""
    if source != dtype:
        x = number(rounded(clamped(x, source, dtype), dtype))
    return x
