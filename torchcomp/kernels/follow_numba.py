"""Follow in Numba, for the CPU. The results equal those of plain torch bit for bit.

In a step, hardly any code is in the caches after the backward pass, and each operation of torch
takes 20 us. This is why each call here is one kernel with plain numbers as arguments.
"""

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]  # it does export carray
from torch import Tensor

from torchcomp.kernels import follow
from torchcomp.kernels.numba_jit import kernel, pointer


class Follower(follow.Follower):
    """Follows elements of a vector of float32; see :class:`torchcomp.kernels.follow.Follower`."""

    def __init__(self, index: Tensor, numel: int, dtype: torch.dtype) -> None:
        super().__init__(index, numel, dtype)
        self._where = index.data_ptr(), index.numel(), numel
        self._sums = self._unsent.data_ptr()
        tensors = self.found, self.left, self.ages, self.earlier, self.changed
        self._addresses = tuple(each.data_ptr() for each in tensors)

    def begin(self, gradient: Tensor, factor: float) -> None:
        _begin(*self._where, self._sums, gradient.data_ptr(), factor)

    def add(self, values: Tensor, factor: float) -> None:
        _add(*self._where, self._sums, values.data_ptr(), factor)

    def end(self, found: Tensor, factor: float, left: Tensor, mean: Tensor, same: bool) -> None:
        read = found.data_ptr(), left.data_ptr(), mean.data_ptr()
        _end(*self._where, self._sums, *self._addresses, *read, factor, same)


@kernel()
def _begin(index: int, count: int, n: int, unsent: int, values: int, factor: float) -> None:
    at, x = carray(pointer(index), (count,), np.int64), carray(pointer(values), (n,), np.float32)
    out = carray(pointer(unsent), (count,), np.float32)
    for i in range(count):
        out[i] = x[np.uint64(at[i])] * np.float32(factor)


@kernel()
def _add(index: int, count: int, n: int, unsent: int, values: int, factor: float) -> None:
    at, x = carray(pointer(index), (count,), np.int64), carray(pointer(values), (n,), np.float32)
    out = carray(pointer(unsent), (count,), np.float32)
    for i in range(count):
        out[i] += x[np.uint64(at[i])] * np.float32(factor)


@kernel(error_model="numpy")
def _end(
    index: int,
    count: int,
    n: int,
    unsent: int,
    found: int,
    left: int,
    ages: int,
    earlier: int,
    changed: int,
    residual_before: int,
    residual_after: int,
    mean: int,
    factor: float,
    same: bool,
) -> None:
    at = carray(pointer(index), (count,), np.int64)
    sums = carray(pointer(unsent), (count,), np.float32)
    last_found = carray(pointer(found), (count,), np.float32)
    last_left = carray(pointer(left), (count,), np.float32)
    age = carray(pointer(ages), (count,), np.int32)
    age_before = carray(pointer(earlier), (count,), np.int32)
    has_changed = carray(pointer(changed), (count,), np.bool_)
    before = carray(pointer(residual_before), (n,), np.float32)
    after = carray(pointer(residual_after), (n,), np.float32)
    applied = carray(pointer(mean), (n,), np.float32)
    for i in range(count):
        j = np.uint64(at[i])
        if same and before[j] != last_left[i]:
            has_changed[i] = True
        expected = sums[i] + before[j] * np.float32(factor)
        # In this order, for the same rounding as in plain torch.
        is_sent = abs(after[j] / expected - np.float32(1)) > np.float32(follow.SAME)
        waited = age[i]
        age_before[i] = waited
        if is_sent and applied[j] != 0:
            age[i] = 0
        elif after[j] != 0 or waited != 0:
            age[i] = waited + 1
        last_found[i], last_left[i] = before[j], after[j]
