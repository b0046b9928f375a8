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

from torchcomp.exchange import Exchange, Heard
from torchcomp.traffic import Load, gather_bytes, sum_bytes

_DIGIT = 11
_WINDOW = {torch.int32: 24, torch.int64: 53}
"""Bits that tell places in a window of two octaves apart, by dtype of the candidates."""

_TOGETHER = 8
"""So many ranks see all histograms at once. More would get too many bytes, and add them up."""


Sizes = tuple[int, ...]
"""Number of candidates, by rank."""


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
    sizes: Sizes
    k: int
    guess: int | None = None

    @property
    def all(self) -> bool:
        """Whether all candidates are wanted, so that there is nothing to agree on."""
        return self.k == sum(self.sizes)

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

    def binned(self, guess: int) -> Tensor:
        """By candidate, its bin around a guess; the end bins take what is outside of the window."""
        width = _WINDOW[self.candidates.dtype] - self.bins.bit_length() + 1
        distance = (self.candidates - guess) >> width
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


class LostTrackError(Exception):
    """A message of the agreement cannot be used, so nobody's answer is known.

    The exchange has noted whose. The caller leaves the bucket as it is, since all ranks conclude
    the step with an error.

    Attributes:
        awaited: whether this rank alone knows of it; the others learn it by its abstaining from the
            next exchange.
    """

    def __init__(self, *, awaited: bool) -> None:
        super().__init__()
        self.awaited = awaited


@dataclass(frozen=True)
class _Rest:
    """Candidates that are still to be looked at.

    Attributes:
        candidates: this rank's.
        sizes: number of candidates of each rank.
        above: by rank, how many are above them.
        narrow: whether the k-th largest is known to be among them; else there are none, and it has
            to be found otherwise.
    """

    candidates: Tensor
    sizes: Sequence[int]
    above: Sequence[int]
    narrow: bool = True


def order_bits(x: Tensor) -> Tensor:
    """Non-negative integers that order like |x|, NaN like infinity (int32, or int64 of float64)."""
    wide = x.abs().to(torch.promote_types(x.dtype, torch.float32))
    wide.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    return wide.view(torch.int64 if wide.dtype == torch.float64 else torch.int32)


def agree(exchange: Exchange, questions: Sequence[Question]) -> list[Agreed]:
    """Find the k largest of all ranks' candidates, for each question; all ranks call it alike.

    Raises:
        LostTrackError: if a message of it came in damaged.
    """
    open_ = [q for q in questions if not q.all]
    answers = iter(_agree(exchange, open_))
    return [Agreed(0, q.sizes) if q.all else next(answers) for q in questions]


def _agree(exchange: Exchange, questions: Sequence[Question]) -> list[Agreed]:
    nobody = [0] * exchange.world_size
    rests = {
        place: _Rest(q.candidates, q.sizes, nobody) for place, q in enumerate(questions) if q.few
    }
    guessed = {
        place: (q, q.guess)
        for place, q in enumerate(questions)
        if place not in rests and q.guess is not None
    }
    rests |= zip(guessed, _narrow(exchange, list(guessed.values())), strict=True)
    shown = dict(zip(rests, _show(exchange, list(rests.values())), strict=True))
    return [
        _pick(shown[place], rests[place].above, question.k)
        if place in rests and rests[place].narrow
        else _digits(exchange, question)
        for place, question in enumerate(questions)
    ]


def _usable(heard: Heard) -> list[Tensor]:
    """Every rank's numbers, or the error where one cannot be used."""
    if heard.absent or heard.damaged:
        raise LostTrackError(awaited=not heard.absent)
    return heard.rows


def _gathered(exchange: Exchange, mine: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return _usable(exchange.gather_numbers(mine, sizes))


def _added(exchange: Exchange, counts: Tensor) -> Tensor:
    """The sum of all ranks' `counts`: every rank adds a part up, and hands it out."""
    parts = torch.tensor_split(counts, exchange.world_size)
    sizes = [part.numel() for part in parts]
    heard = exchange.scatter_numbers(parts, [sizes[exchange.rank]] * exchange.world_size)
    mine = torch.stack(_usable(heard)).sum(0, dtype=counts.dtype)
    return torch.cat(_gathered(exchange, mine, sizes))


def chosen(candidates: Tensor, threshold: int, count: int) -> Tensor:
    """Ascending positions of the `count` candidates of this rank that were chosen."""
    above = torch.nonzero(candidates > threshold).squeeze(1)
    tied = torch.nonzero(candidates == threshold).squeeze(1)[: count - above.numel()]
    return torch.cat([above, tied]).sort().values


def agreement_load(vectors: Sequence[tuple[Sizes, int]], itemsize: int, rank: int) -> Load:
    """What :func:`agree` moves over a rank's link, given guesses; about, where candidates are many.

    Args:
        vectors: number of candidates of each rank, and k.
        itemsize: bytes of a candidate.
        rank: whose link.
    """
    asked = [(sizes, k) for sizes, k in vectors if k < sum(sizes)]
    few = [sizes for sizes, k in asked if _few(sizes, itemsize, k)]
    bins = [_bins(k, len(sizes)) for sizes, k in asked if not _few(sizes, itemsize, k)]
    if not asked:
        return Load()
    world_size = len(asked[0][0])
    shown = [1 + sum(sizes[r] for sizes in few) for r in range(world_size)]
    load = _gather_load(itemsize, shown, rank)
    if bins:
        load.add(_histograms_load(sum(bins), len(bins), world_size, rank))
    return load


def _gather_load(itemsize: int, sizes: Sequence[int], rank: int) -> Load:
    sent = gather_bytes(itemsize * sizes[rank], len(sizes))
    return Load(sent=sent, received=itemsize * (sum(sizes) - sizes[rank]))


def _histograms_load(bins: int, count: int, world_size: int, rank: int) -> Load:
    """What `count` histograms move, of that many int32 `bins` together."""
    if world_size <= _TOGETHER:
        return _gather_load(4, [bins + 1] * world_size, rank)
    parts = [bins // world_size + (r < bins % world_size) for r in range(world_size)]
    handed_out = _gather_load(4, [part + 1 for part in parts], rank)
    load = Load(sent=handed_out.received, received=handed_out.sent)
    load.add(handed_out)
    load.add(_gather_load(4, [2 * count + 1] * world_size, rank))
    return load


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


def _narrow(exchange: Exchange, windows: list[tuple[Question, int]]) -> list[_Rest]:
    """What is left of each question once all ranks know the histograms.

    Args:
        exchange: the collectives of the group.
        windows: questions, each with its guess.
    """
    if not windows:
        return []
    questions = [question for question, _ in windows]
    binned = [question.binned(guess) for question, guess in windows]
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
    everyone = _gathered(exchange, joined, [joined.numel()] * exchange.world_size)
    rows = torch.split(torch.stack(everyone), [h.numel() for h in mine], 1)
    places = [_place(each.sum(0), k) for each, k in zip(rows, ks, strict=True)]
    found = [_around(each, place) for each, place in zip(rows, places, strict=True)]
    return places, [(pair[:, 0].tolist(), pair[:, 1].tolist()) for pair in found]


def _summed(exchange: Exchange, mine: list[Tensor], ks: list[int]) -> tuple[list[int], Found]:
    """The same, from the histograms' sum, and then the ranks' shares of it."""
    total = torch.split(_added(exchange, torch.cat(mine)), [h.numel() for h in mine])
    places = [_place(each, k) for each, k in zip(total, ks, strict=True)]
    own = [_around(each[None], place) for each, place in zip(mine, places, strict=True)]
    joined = torch.cat(own).view(-1)
    everyone = _gathered(exchange, joined, [joined.numel()] * exchange.world_size)
    rows = torch.stack(everyone).view(exchange.world_size, len(mine), 2).unbind(1)
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
) -> _Rest:
    """The candidates in the threshold's bin; none if that is an end bin, or holds too many."""
    many = not _beats_digits(inside, question.candidates.element_size())
    if many or place in (0, question.bins - 1):
        return _Rest(question.candidates[:0], [0] * len(inside), above, narrow=False)
    return _Rest(question.candidates[binned == place], inside, above)


def _show(exchange: Exchange, rests: list[_Rest]) -> list[list[Tensor]]:
    """For each of several, every rank's candidates, in one message.

    It is sent even if it holds none: whoever could not read a histogram cannot know that.
    """
    if not rests:
        return []
    mine = torch.cat([rest.candidates for rest in rests])
    by_rank = list(zip(*(rest.sizes for rest in rests), strict=True))
    everyone = _gathered(exchange, mine, [sum(sizes) for sizes in by_rank])
    rows = [torch.split(part, list(sizes)) for part, sizes in zip(everyone, by_rank, strict=True)]
    return [[row[place] for row in rows] for place in range(len(rests))]


def _pick(parts: list[Tensor], above: Sequence[int], k: int) -> Agreed:
    """The answer, from what all ranks have shown; there, `k` less `above` are wanted."""
    everyone = torch.sort(torch.cat(parts), descending=True).values
    threshold = int(everyone[k - sum(above) - 1])
    higher = [n + int((part > threshold).sum()) for n, part in zip(above, parts, strict=True)]
    tied = [int((part == threshold).sum()) for part in parts]
    return Agreed(threshold, _share(higher, tied, k))


def _digits(exchange: Exchange, question: Question) -> Agreed:
    """The answer without a guess: the threshold's digits, one by one."""
    candidates = question.candidates
    rounds = _rounds(candidates.element_size())
    threshold = _threshold(exchange, candidates.long(), rounds, question.k)
    mine = torch.stack([(candidates > threshold).sum(), (candidates == threshold).sum()])
    rows = _gathered(exchange, mine, [2] * exchange.world_size)
    above, tied = torch.stack(rows).t().tolist()
    return Agreed(threshold, _share(above, tied, question.k))


def _rounds(itemsize: int) -> int:
    return -(-(8 * itemsize - 1) // _DIGIT)


def _threshold(exchange: Exchange, alive: Tensor, rounds: int, k: int) -> int:
    threshold = 0
    for step in reversed(range(rounds)):
        digits = (alive >> (step * _DIGIT)) & (2**_DIGIT - 1)
        histogram = _added(exchange, torch.bincount(digits, minlength=2**_DIGIT).int())
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
