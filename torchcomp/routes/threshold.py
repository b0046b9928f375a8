"""Threshold: which entries are the k largest of a vector whose parts lie on several ranks.

Every rank brings the candidates of its part, as integers that order like magnitudes. The ranks show
each other histograms of an interval that holds the k-th largest, first of a window around the last
step's threshold if there is one, and go on with the bin that it lies in. When few candidates are
left in there, all ranks see those. Ties go to the lowest rank, and within a rank to the lowest
index, so that what is chosen is what one rank with the whole vector would choose.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcomp.exchange import Exchange
from torchcomp.traffic import Load

_WINDOW = {torch.int32: 24, torch.int64: 53}
"""Bits that tell positions in a window of two octaves apart, by dtype of the candidates."""


@dataclass(frozen=True)
class Question:
    """One vector, of which the k largest entries are wanted."""

    candidates: Tensor  # this rank's, from order_bits
    sizes: Sequence[int]  # number of candidates of each rank
    k: int  # at most the sum of the sizes
    guess: int = 0  # a threshold near the one wanted, equal on all ranks: saves rounds, no more


@dataclass(frozen=True)
class Answer:
    """The outcome for one vector."""

    threshold: int  # the k-th largest of all candidates; 0 if all are wanted
    counts: Sequence[int]  # entries chosen from each rank's part


def order_bits(x: Tensor) -> Tensor:
    """Non-negative integers that order like |x|, NaN like infinity (int32, or int64 of float64)."""
    wide = x.abs().to(torch.promote_types(x.dtype, torch.float32))
    wide.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    return wide.view(torch.int64 if wide.dtype == torch.float64 else torch.int32)


def chosen(candidates: Tensor, threshold: int, count: int) -> Tensor:
    """Ascending positions of the `count` candidates of this rank that were chosen."""
    above = torch.nonzero(candidates > threshold).squeeze(1)
    tied = torch.nonzero(candidates == threshold).squeeze(1)[: count - above.numel()]
    return torch.cat([above, tied]).sort().values


class _Search:
    """The interval [low, high) that holds the k-th largest candidate of one question.

    Attributes:
        above: by rank, how many candidates are above the interval.
        inside: by rank, how many are in it.
    """

    def __init__(self, question: Question) -> None:
        self.candidates, self.k = question.candidates, question.k
        self.inside = list(question.sizes)
        self.above = [0] * len(self.inside)
        # Above every candidate (infinity's bits are less), and within their dtype: torch wraps a
        # number that is compared with a tensor of a narrower one.
        self.low, self.high = 0, torch.iinfo(self.candidates.dtype).max
        self.bins = _bins(question.k, len(self.inside))
        # Bins are as wide as they must be to fill the interval, or a window around the guess.
        self._shift = _WINDOW[self.candidates.dtype] - self.bins.bit_length() + 1
        # A guess may come from a checkpoint.
        guess = min(question.guess, self.high - 1)
        self._start = max(0, guess - (self.bins // 2 << self._shift))
        if not question.guess:
            self._fill_interval()

    @property
    def over(self) -> bool:
        """Whether showing what is left takes no more bytes than another round of histograms."""
        left = self.candidates.element_size() * sum(self.inside)
        return self.high - self.low == 1 or left <= 4 * self.bins * len(self.inside)

    def histogram(self) -> Tensor:
        """This rank's candidates by bin; the end bins take what is outside of the window."""
        binned = ((self.candidates - self._start) >> self._shift).clamp_(0, self.bins - 1)
        return torch.bincount(binned, minlength=self.bins).int()

    def narrow(self, histograms: Tensor) -> None:
        """Go on with the bin of the k-th largest, given all ranks' histograms as rows."""
        at_least = histograms.sum(0).flip(0).cumsum(0).flip(0)
        place = int((at_least >= self.k - sum(self.above)).sum()) - 1
        higher = histograms[:, place + 1 :].sum(1).tolist()
        self.above = [n + more for n, more in zip(self.above, higher, strict=True)]
        self.inside = histograms[:, place].tolist()
        if place < self.bins - 1:
            self.high = min(self.high, self._start + (place + 1 << self._shift))
        if place > 0:
            self.low = max(self.low, self._start + (place << self._shift))
        held = (self.candidates >= self.low) & (self.candidates < self.high)
        self.candidates = self.candidates[held]
        self._fill_interval()

    def answer(self, shown: Sequence[Tensor]) -> Answer:
        """The outcome, given every rank's candidates in the interval."""
        if self.high - self.low == 1:
            return Answer(self.low, _share(self.above, self.inside, self.k))
        everyone = torch.sort(torch.cat(list(shown)), descending=True).values
        threshold = int(everyone[self.k - sum(self.above) - 1])
        higher = [int((part > threshold).sum()) for part in shown]
        above = [n + more for n, more in zip(self.above, higher, strict=True)]
        tied = [int((part == threshold).sum()) for part in shown]
        return Answer(threshold, _share(above, tied, self.k))

    def _fill_interval(self) -> None:
        width = self.high - self.low
        self._start, self._shift = self.low, max(0, (-(-width // self.bins) - 1).bit_length())


def find_largest(exchange: Exchange, questions: Sequence[Question]) -> list[Answer]:
    """Find the k largest of all ranks' candidates, for each question; all ranks call it alike."""
    searches = {
        place: _Search(question)
        for place, question in enumerate(questions)
        if question.k < sum(question.sizes)
    }
    while wide := [search for search in searches.values() if not search.over]:
        mine = torch.cat([search.histogram() for search in wide])
        rows = torch.stack(exchange.all_gather(mine))
        for search, columns in zip(wide, torch.split(rows, [s.bins for s in wide], 1), strict=True):
            search.narrow(columns)
    # What is one value needs not be shown.
    few = {place: search for place, search in searches.items() if search.high - search.low > 1}
    shown: dict[int, list[Tensor]] = {place: [] for place in searches}
    if few:
        mine = torch.cat([search.candidates for search in few.values()])
        counts = list(zip(*(search.inside for search in few.values()), strict=True))
        parts = exchange.all_gather_v(mine, [sum(row) for row in counts])
        rows_of = [torch.split(part, list(row)) for part, row in zip(parts, counts, strict=True)]
        shown |= {place: [row[i] for row in rows_of] for i, place in enumerate(few)}
    return [
        searches[place].answer(shown[place]) if place in searches else Answer(0, question.sizes)
        for place, question in enumerate(questions)
    ]


def search_load(vectors: Sequence[tuple[Sequence[int], int]], itemsize: int, rank: int) -> Load:
    """What :func:`find_largest` moves over a rank's link, given good guesses; about.

    Args:
        vectors: number of candidates of each rank, and k.
        itemsize: bytes of a candidate.
        rank: whose link.
    """
    load = Load()
    for sizes, k in vectors:
        others, histogram = len(sizes) - 1, 4 * _bins(k, len(sizes))
        if k < sum(sizes) and itemsize * sum(sizes) <= histogram * len(sizes):
            load.sent += itemsize * others * sizes[rank]
            load.received += itemsize * (sum(sizes) - sizes[rank])
        elif k < sum(sizes):
            load.add(Load(sent=others * histogram, received=others * histogram))
    return load


def _bins(k: int, world_size: int) -> int:
    """A power of two, so that histograms and what is left in a bin take about as many bytes.

    That is if ten times k candidates lie in the window, which is a guess.
    """
    return int(2 ** max(5, (10 * k // world_size).bit_length() // 2))


def _share(above: Sequence[int], tied: Sequence[int], k: int) -> list[int]:
    """Entries of each rank, if what is above the threshold is taken and ties are in rank order."""
    room, counts = k - sum(above), []
    for strictly, equal in zip(above, tied, strict=True):
        taken = min(equal, room)
        room -= taken
        counts.append(strictly + taken)
    return counts
