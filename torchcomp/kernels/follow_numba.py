"""Follow in Numba, for the CPU. The results equal those of plain torch bit for bit.

A backward pass fills the caches with its own code and data. Right after it, an operation of torch
takes 20 us. Each call here is therefore one kernel, with plain numbers as arguments.
"""

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]  # it does export carray
from torch import Tensor

from torchcomp.kernels import follow
from torchcomp.kernels.numba_jit import kernel, pointer


class Follower(follow.Follower):
    """Follows elements of a vector; see :class:`torchcomp.kernels.follow.Follower`.

    Args:
        index: 1-D int64, contiguous, the elements.
        numel: of the vector. All that is read is contiguous float32 of this length.
    """

    def __init__(self, index: Tensor, numel: int) -> None:
        super().__init__(index, torch.float32)
        self._numel, self._unsent = numel, torch.zeros(index.numel())
        self._where = index.data_ptr(), index.numel(), numel, self._unsent.data_ptr()
        # These tensors are only written in place, and live as long as their addresses are used.
        tensors = self._found, self._left, self._ages, self._earlier, self._changed
        self._addresses = tuple(each.data_ptr() for each in tensors)

    def begin(self, gradient: Tensor, factor: float) -> None:
        _add(*self._where, self._address(gradient), factor, True)

    def add(self, values: Tensor, factor: float) -> None:
        _add(*self._where, self._address(values), factor, False)

    def end(self, found: Tensor, factor: float, left: Tensor, mean: Tensor, same: bool) -> None:
        read = self._address(found), self._address(left), self._address(mean)
        _end(*self._where, *self._addresses, *read, factor, same, follow.SAME)

    def _address(self, x: Tensor) -> int:
        if x.dtype is not torch.float32 or x.numel() != self._numel or not x.is_contiguous():
            raise ValueError(
                f"guard: expected {self._numel} contiguous elements of torch.float32, as in the "
                f"shape of the bucket or in its slots, got {x.numel()} of {x.dtype} with the "
                f"stride {x.stride()}"
            )
        return x.data_ptr()


@kernel()
def _add(
    index: int, count: int, n: int, unsent: int, values: int, factor: float, first: bool
) -> None:
    at, x = carray(pointer(index), (count,), np.int64), carray(pointer(values), (n,), np.float32)
    out = carray(pointer(unsent), (count,), np.float32)
    for i in range(count):
        before = np.float32(0) if first else out[i]
        out[i] = before + x[np.uint64(at[i])] * np.float32(factor)


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
    limit: float,
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
        is_sent = abs(after[j] / expected - np.float32(1)) > np.float32(limit)
        waited = age[i]
        age_before[i] = waited
        if is_sent and applied[j] != 0:
            age[i] = 0
        elif after[j] != 0 or waited != 0:
            age[i] = waited + 1
        last_found[i], last_left[i] = before[j], after[j]
