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
_WINDOW = {torch.int32: 24, torch.int64: 53}
"""Bits that tell places in a window of two octaves apart, by dtype of the candidates."""

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
            return _beats_digits(self.sizes, itemsize)
        return _few(self.sizes, itemsize, self.k)

    @property
    def bins(self) -> int:
        """Number of bins in the window around the guess."""
        return _bins(self.k, len(self.sizes))

    def binned(self) -> Tensor:
        """By candidate, its bin; the end bins take what is outside of the window."""
        width = _WINDOW[self.candidates.dtype] - self.bins.bit_length() + 1
        distance = (self.candidates - (self.guess or 0)) >> width
        return (distance + self.bins // 2).clamp_(0, self.bins - 1)


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


def agreement_load(sizes: tuple[int, ...], itemsize: int, k: int, rank: int) -> Load:
    """What :func:`agree` moves over a rank's link for a vector, given a guess; about, if many."""
    others = len(sizes) - 1
    if _few(sizes, itemsize, k):
        received = itemsize * (sum(sizes) - sizes[rank])
        return Load(sent=itemsize * sizes[rank] * others, received=received)
    if len(sizes) <= _TOGETHER:
        moved = gather_bytes(4 * _bins(k, len(sizes)), len(sizes))
        return Load(sent=moved, received=moved)
    pairs = gather_bytes(8, len(sizes))
    return Load(4 * _bins(k, len(sizes)), pairs, pairs)


def _bins(k: int, world_size: int) -> int:
    """A power of two, so that histograms and what is left in a bin take about as many bytes.

    That is if ten times k candidates lie in the window, which is a guess.
    """
    return int(2 ** max(5, (10 * k // world_size).bit_length() // 2))


def _few(sizes: Sequence[int], itemsize: int, k: int) -> bool:
    return itemsize * sum(sizes) <= 4 * _bins(k, len(sizes)) * len(sizes)


def _beats_digits(sizes: Sequence[int], itemsize: int) -> bool:
    """Whether showing so many candidates takes no more bytes than the digits of a threshold."""
    by_digits = _rounds(itemsize) * 4 * 2**_DIGIT
    return itemsize * sum(sizes) <= sum_bytes(by_digits, len(sizes))


def _narrow(exchange: Exchange, questions: list[Question]) -> list[_Rest | None]:
    """What is left of each question once all ranks know the histograms; None if it stays open."""
    if not questions:
        return []
    binned = [question.binned() for question in questions]
    mine = [
        torch.bincount(each, minlength=question.bins).int()
        for each, question in zip(binned, questions, strict=True)
    ]
    places, found = (_together if exchange.world_size <= _TOGETHER else _summed)(
        exchange, mine, [question.k for question in questions]
    )
    return [
        _within(question, each, place, above, inside)
        for question, each, place, (above, inside) in zip(
            questions, binned, places, found, strict=True
        )
    ]


Found = list[tuple[list[int], list[int]]]
"""By question and rank, how many candidates are above the threshold's bin, and how many in it."""


def _together(exchange: Exchange, mine: list[Tensor], ks: list[int]) -> tuple[list[int], Found]:
    """The threshold's bin of each question, from all ranks' histograms."""
    joined = torch.cat(mine)
    everyone = exchange.gather_varied(joined, [joined.numel()] * exchange.world_size)
    rows = torch.split(everyone.view(exchange.world_size, -1), [h.numel() for h in mine], 1)
    places = [_place(each.sum(0), k) for each, k in zip(rows, ks, strict=True)]
    found = [_around(each, place) for each, place in zip(rows, places, strict=True)]
    return places, [(pair[:, 0].tolist(), pair[:, 1].tolist()) for pair in found]


def _summed(exchange: Exchange, mine: list[Tensor], ks: list[int]) -> tuple[list[int], Found]:
    """The same, from the histograms' sum, and then the ranks' shares of it."""
    total = torch.split(exchange.sum_counts(torch.cat(mine)), [h.numel() for h in mine])
    places = [_place(each, k) for each, k in zip(total, ks, strict=True)]
    own = [_around(each[None], place) for each, place in zip(mine, places, strict=True)]
    joined = torch.cat(own).view(-1)
    everyone = exchange.gather_varied(joined, [joined.numel()] * exchange.world_size)
    rows = everyone.view(exchange.world_size, len(mine), 2).unbind(1)
    return places, [(pair[:, 0].tolist(), pair[:, 1].tolist()) for pair in rows]


def _place(histogram: Tensor, k: int) -> int:
    """The bin of the k-th largest candidate."""
    at_least = histogram.flip(0).cumsum(0).flip(0)
    return int((at_least >= k).sum()) - 1


def _around(histograms: Tensor, place: int) -> Tensor:
    """By rank, how many candidates are above a bin, and how many in it; two columns."""
    above = histograms[:, place + 1 :].sum(1, dtype=histograms.dtype)
    return torch.stack([above, histograms[:, place]], 1)


def _within(
    question: Question, binned: Tensor, place: int, above: list[int], inside: list[int]
) -> _Rest | None:
    """The candidates in the threshold's bin; None if that is an end bin, or holds too many."""
    many = not _beats_digits(inside, question.candidates.element_size())
    if many or place in (0, question.bins - 1):
        return None
    return _Rest(question.candidates[binned == place], inside, above)


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
        digit = _place(histogram, k)
        k -= int(histogram[digit + 1 :].sum())
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
