"""How often the host may wait, and how many kernels it may launch, for each method.

Launches are those of plain torch, which `tests/device/test_budgets.py` counts on a simulated
device. Copies and collectives count as launches as well. `tests/gpu` checks the waits on a GPU.
"""

from typing import NamedTuple


class Budget(NamedTuple):
    """What one bucket may cost."""

    waits: int  # of the host, for each bucket
    waits_per_step: int
    launches: int  # for each bucket, among any number of ranks
    launches_per_rank: int

    def launches_among(self, ranks: int) -> int:
        """Return the number of launches that a bucket may take."""
        return self.launches + self.launches_per_rank * ranks


BUDGETS = {
    "mean": Budget(0, 0, 1, 0),
    'ef(topk({ratio}), exchange="allgather")': Budget(0, 1, 62, 1),
    'ef(topk({ratio}, values="int8"), exchange="allgather")': Budget(0, 1, 94, 1),
    'ef(topk({ratio}), exchange="sharded")': Budget(1, 1, 54, 35),
    'bidirectional(topk({ratio}), topk({ratio}), selection="shard")': Budget(0, 1, 66, 51),
    'bidirectional(topk({ratio}), topk({ratio}), selection="exact")': Budget(12, 1, 176, 58),
    "ef(randk({ratio}))": Budget(0, 1, 17, 0),
    'ef(cast("bf16"))': Budget(0, 1, 14, 0),
    'quantize("int8")': Budget(0, 1, 34, 1),
    'ef(quantize("int8"), exchange="allgather")': Budget(0, 1, 39, 1),
    'quantize("int8", rounding="stochastic")': Budget(0, 1, 39, 1),
    'ef21(topk({ratio}), exchange="allgather")': Budget(0, 1, 70, 1),
    'dgc(topk({ratio}), exchange="allgather")': Budget(0, 1, 70, 1),
}
"""By method; `ratio` is the share of the entries that are kept."""


class Weight(NamedTuple):
    """What one bucket may cost with Triton's kernels, among 8 and 64 ranks."""

    launches: int
    calls: int  # of torchcomp's functions, within `Averager.average`
    waits: int = 0  # of the host


WEIGHTS = {
    "mean": Weight(1, 40),
    'ef(cast("bf16"))': Weight(5, 60),
    'ef(topk(0.01), exchange="allgather")': Weight(12, 120),
    'ef(topk(0.01, values="int8"), exchange="allgather")': Weight(12, 120),
    'ef(topk(0.01, values="int4"), exchange="allgather")': Weight(12, 120),
    "bidirectional(topk(0.01), topk(0.01))": Weight(24, 220),
    'bidirectional(quantize("int8"), quantize("int8"))': Weight(24, 220),
    'bidirectional(quantize("int4"), quantize("int4"))': Weight(24, 220),
    "powersgd(rank=1)": Weight(20, 120),
    'ef(topk(0.01), exchange="sharded")': Weight(40, 120, 1),
    'bidirectional(topk(0.01), topk(0.01), selection="exact")': Weight(60, 220, 2),
}
"""By method."""
