"""Agreement: which entries are the k largest of a vector whose parts lie on several ranks.

Every rank brings the candidates of its part, as integers that order like magnitudes. Where they are
few, all ranks see all of them. Else, in two small messages: histograms of a narrow window around
the last step's threshold tell in which bin the k-th largest lies, and then all ranks see the
candidates in that bin. Where there is no last step, or the threshold has left the window, it is
found digit by digit from sums of histograms. Ties go to the lowest rank, and within a rank to the
lowest index, so that what is chosen is what one rank with the whole vector would choose.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcomp.exchange import Exchange, Load, gather_bytes, sum_bytes

_DIGIT = 11
_BINS = 512
_BIN = {torch.int32: 23 - 8, torch.int64: 52 - 8}
"""Bits of a bin: the window reaches an octave either way, and a bin holds a fiftieth of k or so."""


_TOGETHER = 8
"""So many ranks see all histograms at once. More would get too many bytes, and add them up."""


@dataclass(frozen=True)
class Question:
    """One vector, of which the k largest entries are wanted.

    Attributes:
        candidates: this rank's, from :func:`order_bits`.
        sizes: number of candidates of each rank.
        k: at most ``sum(sizes)``.
        guess: a threshold near the one wanted, if known, the same on all ranks; it saves rounds and
            never changes the answer.
    """

    candidates: Tensor
    sizes: tuple[int, ...]
    k: int
    guess: int | None = None

    @property
    def few(self) -> bool:
        """Whether showing all candidates to all ranks takes no more bytes than histograms."""
        itemsize = self.candidates.element_size()
        if self.guess is None:
            by_digits = _rounds(itemsize) * 4 * 2**_DIGIT
            return itemsize * sum(self.sizes) <= sum_bytes(by_digits, len(self.sizes))
        return _few(self.sizes, itemsize)

    def bins(self) -> Tensor:
        """By candidate, its bin in the window around the guess; the end bins take the rest."""
        distance = (self.candidates - (self.guess or 0)) >> _BIN[self.candidates.dtype]
        return (distance + _BINS // 2).clamp_(0, _BINS - 1)


@dataclass(frozen=True)
class Agreed:
    """The outcome for one vector.

    Attributes:
        threshold: the k-th largest of all candidates.
        counts: entries chosen from each rank's part.
    """

    threshold: int
    counts: tuple[int, ...]


@dataclass(frozen=True)
class _Rest:
    """Candidates that are still to be looked at, and how many of each rank are above them."""

    candidates: Tensor
    sizes: list[int]
    above: list[int]


def order_bits(x: Tensor) -> Tensor:
    """Non-negative integers that order like |x|, NaN like infinity (int32, or int64 of float64)."""
    wide = x.abs().to(torch.promote_types(x.dtype, torch.float32))
    wide.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    return wide.view(torch.int64 if wide.dtype == torch.float64 else torch.int32)


def agree(exchange: Exchange, questions: Sequence[Question]) -> list[Agreed]:
    """Find the k largest of all ranks' candidates, for each question; all ranks call it alike."""
    rests: list[_Rest | None] = [
        _Rest(q.candidates, list(q.sizes), [0] * len(q.sizes)) if q.few else None for q in questions
    ]
    guessed = [place for place, q in enumerate(questions) if not q.few and q.guess is not None]
    narrowed = _narrow(exchange, [questions[place] for place in guessed])
    for place, rest in zip(guessed, narrowed, strict=True):
        rests[place] = rest
    shown = iter(_show(exchange, [rest for rest in rests if rest is not None]))
    return [
        _digits(exchange, question) if rest is None else _pick(next(shown), rest.above, question.k)
        for question, rest in zip(questions, rests, strict=True)
    ]


def chosen(candidates: Tensor, threshold: int, count: int) -> Tensor:
    """Ascending positions of the `count` candidates of this rank that were chosen."""
    above = torch.nonzero(candidates > threshold).squeeze(1)
    tied = torch.nonzero(candidates == threshold).squeeze(1)[: count - above.numel()]
    return torch.cat([above, tied]).sort().values


def agreement_load(sizes: tuple[int, ...], itemsize: int, rank: int) -> Load:
    """What :func:`agree` moves over a rank's link for a vector, given a guess; about, if many."""
    others = len(sizes) - 1
    if _few(sizes, itemsize):
        received = itemsize * (sum(sizes) - sizes[rank])
        return Load(sent=itemsize * sizes[rank] * others, received=received)
    if len(sizes) <= _TOGETHER:
        moved = gather_bytes(4 * _BINS, len(sizes))
        return Load(sent=moved, received=moved)
    pairs = gather_bytes(8, len(sizes))
    return Load(4 * _BINS, pairs, pairs)


def _few(sizes: Sequence[int], itemsize: int) -> bool:
    return itemsize * sum(sizes) <= 4 * _BINS * len(sizes)


def _narrow(exchange: Exchange, questions: list[Question]) -> list[_Rest | None]:
    """What is left of each question once all ranks know the histograms; None if it stays open."""
    if not questions:
        return []
    bins = [question.bins() for question in questions]
    mine = torch.stack([torch.bincount(each, minlength=_BINS).int() for each in bins])
    if exchange.world_size <= _TOGETHER:
        everyone = exchange.gather_varied(mine.view(-1), [mine.numel()] * exchange.world_size)
        histograms = everyone.view(-1, *mine.shape)
        places = _places(histograms.sum(0), questions)
        found = _around(histograms, places)
    else:
        places = _places(exchange.sum_counts(mine.view(-1)).view(mine.shape), questions)
        around = _around(mine[None], places)
        found = exchange.gather_varied(around.view(-1), [around.numel()] * exchange.world_size)
        found = found.view(-1, len(questions), 2)
    return [
        _within(question, each, place, found[:, row].t().tolist())
        for row, (question, each, place) in enumerate(zip(questions, bins, places, strict=True))
    ]


def _places(histograms: Tensor, questions: list[Question]) -> list[int]:
    """By question, the bin of its k-th largest candidate."""
    at_least = histograms.flip(1).cumsum(1).flip(1)
    wanted = torch.tensor([question.k for question in questions], device=histograms.device)
    places: list[int] = ((at_least >= wanted[:, None]).sum(1) - 1).tolist()
    return places


def _around(histograms: Tensor, places: list[int]) -> Tensor:
    """By rank and question, how many candidates are above the bin at its place, and how many in it.

    Args:
        histograms: by rank, question and bin.
        places: by question.
    """
    rows = torch.arange(len(places), device=histograms.device)
    at = torch.tensor(places, device=histograms.device)
    at_least = histograms.flip(2).cumsum(2, dtype=torch.int32).flip(2)
    inside = histograms[:, rows, at]
    return torch.stack([at_least[:, rows, at] - inside, inside], 2)


def _within(question: Question, bins: Tensor, place: int, found: list[list[int]]) -> _Rest | None:
    """The candidates in the threshold's bin; None if that is an end bin, or holds too many."""
    above, sizes = found
    if place in (0, _BINS - 1) or not _few(sizes, question.candidates.element_size()):
        return None
    return _Rest(question.candidates[bins == place], sizes, above)


def _show(exchange: Exchange, rests: list[_Rest]) -> list[list[Tensor]]:
    """For each of several, every rank's candidates, in one message."""
    if not rests:
        return []
    mine = torch.cat([rest.candidates for rest in rests])
    by_rank = list(zip(*(rest.sizes for rest in rests), strict=True))
    everyone = exchange.gather_varied(mine, [sum(sizes) for sizes in by_rank])
    rows = [
        torch.split(part, list(sizes))
        for part, sizes in zip(
            torch.split(everyone, [sum(sizes) for sizes in by_rank]), by_rank, strict=True
        )
    ]
    return [[row[place] for row in rows] for place in range(len(rests))]


def _pick(parts: list[Tensor], above: list[int], k: int) -> Agreed:
    """The answer, from what all ranks have shown; there, `k` less `above` are wanted."""
    everyone = torch.sort(torch.cat(parts), descending=True).values
    threshold = int(everyone[k - sum(above) - 1]) if k else 0
    higher = [n + int((part > threshold).sum()) for n, part in zip(above, parts, strict=True)]
    tied = [int((part == threshold).sum()) for part in parts]
    return Agreed(threshold, _share(higher, tied, k))


def _digits(exchange: Exchange, question: Question) -> Agreed:
    """The answer without a guess: the threshold's digits, one by one."""
    candidates = question.candidates
    rounds = _rounds(candidates.element_size())
    threshold = _threshold(exchange, candidates.long(), rounds, question.k)
    mine = torch.stack([(candidates > threshold).sum(), (candidates == threshold).sum()])
    rows = exchange.gather_varied(mine, [2] * exchange.world_size)
    above, tied = rows.view(-1, 2).t().tolist()
    return Agreed(threshold, _share(above, tied, question.k))


def _rounds(itemsize: int) -> int:
    return -(-(8 * itemsize - 1) // _DIGIT)


def _threshold(exchange: Exchange, alive: Tensor, rounds: int, k: int) -> int:
    threshold = 0
    for step in reversed(range(rounds)):
        digits = (alive >> (step * _DIGIT)) & (2**_DIGIT - 1)
        histogram = exchange.sum_counts(torch.bincount(digits, minlength=2**_DIGIT).int())
        at_least = histogram.flip(0).cumsum(0).flip(0)
        digit = int((at_least >= k).sum()) - 1
        k -= int(at_least[digit] - histogram[digit])
        alive = alive[digits == digit]
        threshold = threshold << _DIGIT | digit
    return threshold


def _share(above: list[int], tied: list[int], k: int) -> tuple[int, ...]:
    room = k - sum(above)
    counts = []
    for strictly, equal in zip(above, tied, strict=True):
        taken = min(equal, room)
        room -= taken
        counts.append(strictly + taken)
    return tuple(counts)
