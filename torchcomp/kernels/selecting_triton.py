"""Selecting: the entries of largest magnitude of the segments of a vector in Triton, for CUDA.

7 launches of kernels of :mod:`.selection_triton`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from torchcomp.engine import host
from torchcomp.kernels import selection_triton as selection
from torchcomp.kernels.fields_triton import Format
from torchcomp.kernels.launch import Launch
from torchcomp.kernels.segments import Segment, digit_bits
from torchcomp.kernels.table_triton import SIZES, Table, tabled
from torchcomp.kernels.triton_jit import kernel

_MARGIN = 1 << 20
"""First margin below the last threshold, in units of float32's last place: 6 to 12 %."""


class Selecting:
    """Selection from the segments of a vector. Workspaces are for one stream at a time."""

    shared = False
    """Whether other ranks select from other parts of the same segments."""

    def __init__(self, table: Table, bits: int = 8) -> None:
        self._table, self._bits, rows, device = table, bits, table.count, table.rows.device
        self._rounds = 32 // bits
        self._counters = torch.zeros(
            rows * (3 + (self._rounds << bits)), dtype=torch.int32, device=device
        )
        self._found, self._pairs, self._counts = torch.split(
            self._counters, [rows, 2 * rows, self._rounds * rows << bits]
        )
        self._clean = True
        self._bound = torch.full((2 * rows,), _MARGIN, dtype=torch.int32, device=device)
        lengths = [
            4 * table.programs["block"], 2 * table.programs["group"],
            2 * self._rounds * rows, 3 * rows,
        ]  # fmt: skip
        memory = torch.empty(sum(lengths), dtype=torch.int32, device=device)
        self._blocks, self._groups, self._state, self._result = torch.split(memory, lengths)
        self._launches: dict[object, list[Launch]] = {}

    def select(
        self, g: Tensor, e: Tensor, x: Tensor, frame: Tensor | None = None, bound: Any = None
    ) -> Tensor:
        """Write ``g + e`` to `x`, and select from it. If `g` is `x`, select from it as it is."""
        index = torch.empty(self._table.entries, dtype=torch.int64, device=x.device)
        if not self._table.programs["block"]:
            return index
        bound = self._bound if bound is None else bound
        kind = "select", g is not x, frame is not None
        collect, *counts, tally, write = self._launches.get(kind) or self._selection(kind)
        if not self._clean:  # an earlier call did not end
            self._counters.zero_()
        self._clean = False
        size = 2 * self._table.capacity
        work, out = torch.empty(size, dtype=torch.int32, device=x.device), x
        if frame is not None:
            out = frame
        collect(g, e, x, work, bound)
        summed = self._summed()
        for done, count in enumerate(counts):
            count(x, work, summed)
            self._add_up(done)
        tally(x, work, out, summed)
        self._decide()
        write(x, work, out, index)
        self._clean = True
        return index

    # What others do who select together.

    def _summed(self) -> Tensor:
        return self._found

    def _add_up(self, done: int) -> None:
        """Add up the counts of a round."""

    def _decide(self) -> None:
        """Share the entries."""

    # Preparations of launches, each once.

    def _selection(self, kind: tuple[Any, ...]) -> list[Launch]:
        _, add, frame = kind
        table, counts = self._table, self._counts
        found, blocks, groups = self._found, self._blocks, self._groups
        place, grid = (table.rows, table.count), (table.programs["block"],)
        tallied = {"BLOCK": SIZES["block"], "GROUPED": SIZES["group"]}
        every = {**tallied, "FRAME": frame, "DONE": self._rounds, "CHUNK": SIZES["chunk"]}
        made = self._launches[kind] = [
            Launch(
                selection.collect, grid, *place, self._bound[table.count :], found, blocks, groups,
                ADD=add, STEP=table.step, warps=8, **tallied,
            ),
            *(
                Launch(
                    selection.count_digits, (table.programs["count"],),
                    *place, found, counts, self._state,
                    DONE=done, BLOCK=SIZES["count"], BITS=self._bits, warps=8,
                )
                for done in range(self._rounds if table.entries or self.shared else 0)
            ),
            Launch(
                selection.tally, grid, *place, self._bound, found, blocks, groups, self._pairs,
                counts, self._state, self._result,
                SHARED=self.shared, BINS=1 << self._bits, warps=2, **every,
            ),
            Launch(
                selection.write, grid, *place, found, blocks, groups, counts, self._result,
                BINS=1 << self._bits, warps=2, **every,
            ),
        ]  # fmt: skip
        return made


class Search(Selecting):
    """The search for the entries that owners keep together; see :mod:`.searches`."""

    shared = True

    def __init__(
        self,
        segments: Sequence[Segment],
        at: Sequence[int],
        sizes: Sequence[int],
        searched: Sequence[bool],
        exchange: Any,
        device: torch.device,
    ) -> None:
        # Whatever the format: nothing is written to frames here.
        table = tabled([(s, 0) for s in segments], Format(None, torch.float32), device, sizes)
        super().__init__(table, digit_bits(len(segments)))
        places = torch.full((exchange.world_size * len(segments),), -1, dtype=torch.int64)
        places[torch.tensor(at, dtype=torch.int64)] = torch.arange(len(at))
        self._exchange, self._pieces = exchange, len(at)
        self._share = Launch(
            share, (len(segments),), table.rows, len(segments),
            self._pairs, self._result,
            host.copy_to(torch.tensor(searched, dtype=torch.int32), device),
            host.copy_to(places, device), exchange.world_size, exchange.rank,
        )  # fmt: skip
        self._each = torch.split(self._counts, len(segments) << self._bits)

    def __call__(
        self, g: Tensor, e: Tensor, x: Tensor, before: Tensor, after: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Do as :class:`torchcomp.routes.searches.DigitSearch` does."""
        numbers = torch.empty(self._pieces, dtype=torch.int64, device=x.device)
        self._outcome = numbers, after
        return self.select(g, e, x, None, before), numbers

    def _summed(self) -> Tensor:
        summed = self._found.clone()
        self._exchange.all_reduce(summed)
        return summed

    def _add_up(self, done: int) -> None:
        self._exchange.all_reduce(self._each[done])

    def _decide(self) -> None:
        self._share(*self._outcome, self._exchange.all_gather_rows(self._pairs))


@kernel("rows", "ranks", "rank")
def share(counts, after, gathered, table, rows, pairs, result, searched, places, ranks, rank):
    """Share the k entries of a segment among the owners: equal ones go to the lowest ranks."""
    segment = tl.program_id(0)
    tl.store(pairs + 2 * segment, 0)
    tl.store(pairs + 2 * segment + 1, 0)
    left = tl.load(result + 3 * segment + 1)
    remembered = tl.load(result + 3 * segment) * tl.load(searched + segment)
    tl.store(after + segment, remembered.to(after.dtype.element_ty))
    for owner in range(0, ranks):
        pair = gathered + 2 * (owner * rows + segment)
        taken = tl.minimum(tl.load(pair + 1), left)
        left -= taken
        place = tl.load(places + owner * rows + segment)
        tl.store(
            counts + place, (tl.load(pair) + taken).to(counts.dtype.element_ty), mask=place >= 0
        )
        if owner == rank:
            tl.store(result + 3 * segment + 1, taken)
