"""Exchange: the collectives of a set of ranks, the bytes they move, and what was wrong with them.

Every call is straight-line and blocking for the stream or thread that makes it. Nothing is chained
on futures: a second collective issued from a callback can pair with the wrong one on another rank.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchcomp import wire
from torchcomp.errors import RankMismatchError, WireError
from torchcomp.traffic import Load, Traffic

Built = TypeVar("Built")


class Exchange(ABC):
    """Collectives among `world_size` ranks. All ranks make the same calls in the same order.

    Args:
        rank: this process's rank among them.
        world_size: number of ranks.
        device: where small control messages live ("cuda" for NCCL).

    Attributes:
        concludes: whether frames came in since the last :meth:`conclude`, which then asks all
            ranks.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.concludes = False
        self._load = Load()
        self._found: list[tuple[int, int | Tensor]] = []
        self._levels: tuple[Exchange, ...] = (self,)

    # What an implementation provides. None of these counts bytes.

    @abstractmethod
    def _all_reduce(self, values: Tensor) -> None:
        """Replace `values` (1-D, contiguous) by their sum over the ranks."""

    @abstractmethod
    def _all_gather(self, mine: Tensor) -> Tensor:
        """Every rank's `mine` (1-D, of the same length everywhere), one after another."""

    @abstractmethod
    def _all_to_all(
        self, outgoing: Tensor, sizes: Sequence[int], arriving: Sequence[int]
    ) -> Tensor:
        """Send ``sizes[r]`` elements to each rank r; receive ``arriving[r]`` from each."""

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in rank order. Slow: for errors, not for training."""

    # Collectives.

    def all_reduce(self, values: Tensor) -> None:
        """Replace `values` (1-D, contiguous) by their sum over the ranks."""
        self._all_reduce(values)
        self._load.summed += values.nbytes

    def all_gather(self, message: Tensor) -> list[Tensor]:
        """Every rank's `message` (1-D, of the same length everywhere), in rank order."""
        rows = self._all_gather(message)
        moved = message.nbytes * (self.world_size - 1)
        self._load.sent += moved
        self._load.received += moved
        return list(rows.view(self.world_size, -1).unbind())

    def all_gather_v(self, mine: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Every rank's `mine` (1-D), in rank order, where rank r's has ``sizes[r]`` elements."""
        copies = [mine.numel()] * self.world_size
        return self.all_to_all(mine.repeat(self.world_size), copies, sizes)

    def all_to_all(
        self, outgoing: Tensor, sizes: Sequence[int], arriving: Sequence[int]
    ) -> list[Tensor]:
        """Send every rank its part of `outgoing`, and receive what they send here.

        Args:
            outgoing: 1-D; the parts for rank 0, 1, ... one after another.
            sizes: elements of each part.
            arriving: elements that each rank sends here.

        Returns:
            What each rank sent, in rank order.
        """
        received = self._all_to_all(outgoing, sizes, arriving)
        itemsize, rank = outgoing.element_size(), self.rank
        self._load.sent += itemsize * (sum(sizes) - sizes[rank])
        self._load.received += itemsize * (sum(arriving) - arriving[rank])
        return list(torch.split(received, list(arriving)))

    def any_of(self, flags: Tensor) -> Tensor:
        """Per element, the largest of all ranks' `flags` (1-D integers): whether any is set."""
        return self._all_gather(flags).view(self.world_size, -1).amax(0)

    # Frames that came in, and what is wrong with them.

    def receive(self, sender: int, frame: Tensor, length: int) -> Tensor:
        """Check a frame, noting what is found, and return its message (1-D uint8, a view).

        What is wrong with it is raised by :meth:`conclude`, by all ranks together: raised here, it
        would leave the others waiting.
        """
        self.concludes = True
        finding = wire.inspect(frame, length)
        if isinstance(finding, Tensor) or finding != wire.INTACT:
            self._found.append((sender, finding))
        return wire.payload(frame, length)

    def conclude(self, finite: Tensor, where: str, advice: str) -> bool:
        """Learn what the ranks found in this step. All ranks call it, of both levels of a split.

        Args:
            finite: scalar bool, whether all that this rank has looked at is finite.
            where: what is exchanged, for the error.
            advice: what the step left behind.

        Returns:
            Whether it is finite on all ranks.

        Raises:
            WireError: if a frame that came in since the last call was not intact; on all ranks,
                naming the senders and what is wrong with their messages.
        """
        if len(self._levels) == 1 and not self.concludes:
            return bool(finite)
        found = [(level, *entry) for level in self._levels for entry in level._found]
        flags = torch.zeros(2, dtype=torch.uint8, device=self.device)
        if found:
            findings = [torch.as_tensor(finding, device=self.device) for *_, finding in found]
            flags[0] = torch.stack(findings).amax()
        flags[1:] = ~finite
        for level in self._levels:
            flags = level.any_of(flags)
        self.reset()
        damaged, nonfinite = flags.tolist()
        if damaged:
            told = {f"rank {r}'s {wire.FINDINGS[int(f)]}" for _, r, f in found if int(f)}
            for level in self._levels:
                told = set().union(*level.gather_objects(told))
            problems = "; ".join(sorted(told))
            raise WireError(f"a message of {where} cannot be used: {problems}. {advice}")
        return not nonfinite

    def reset(self) -> None:
        """Forget the frames of a step that is over, or did not finish."""
        for level in self._levels:
            level._found.clear()
            level.concludes = False

    def take_traffic(self, dense_bytes: int) -> Traffic:
        """Bytes of payload since the last call, of both levels of a split.

        Args:
            dense_bytes: bytes that plain DDP would have sent instead.
        """
        taken = Traffic(dense=dense_bytes)
        for level in self._levels:
            taken.add(level._load.traffic(level.world_size, 0))
            level._load = Load()
        return taken

    @staticmethod
    def split(inside: "Exchange", between: "Exchange") -> "tuple[Exchange, Exchange]":
        """Make two exchanges the levels of one: they share counters and findings.

        Every rank of one `inside` group is in another `between` group. A :meth:`conclude` or a
        :meth:`build` of either then asks all ranks of both.
        """
        inside._levels = between._levels = (between, inside)
        return inside, between

    # What must be equal on all ranks.

    def same(self, number: int) -> bool:
        """Whether all ranks hold the same 63-bit number."""
        bounds = torch.tensor([number, -number], dtype=torch.int64, device=self.device)
        highest, lowest = self.any_of(bounds).tolist()
        return bool(highest == -lowest)

    def verify(self, what: str, values: dict[str, Any], advice: str = "") -> None:
        """Raise on all ranks, with each rank's value, unless all ranks hold equal `values`.

        Args:
            what: what is being compared, for the error.
            values: name -> printable value; compared as text.
            advice: what to do about it, appended to the error.

        Raises:
            RankMismatchError: listing every fact that differs and which ranks hold which value.
        """
        mine = {"call": what, **{name: str(value) for name, value in values.items()}}
        digest = hashlib.sha256(repr(mine).encode()).digest()
        if self.same(int.from_bytes(digest[:7], "big")):
            return
        everyone = self.gather_objects(mine)
        common = [name for name in mine if all(name in theirs for theirs in everyone)]
        lines = [_spread(name, [theirs[name] for theirs in everyone]) for name in common]
        differing = "; ".join(line for line in lines if line)
        raise RankMismatchError(f"{what}: ranks disagree. {differing}. {advice}".strip())

    def build(
        self,
        what: str,
        given: dict[str, Any],
        make: Callable[[], tuple[Built, dict[str, Any]]],
        advice: str = "",
    ) -> Built:
        """Build something on every rank alike, or raise on every rank.

        Args:
            what: what is being built, for the error.
            given: this rank's arguments, compared if nothing can be built from them.
            make: returns what was built and the values that must be the same on all ranks.
            advice: what to do if they are not.

        Raises:
            RankMismatchError: if the values differ, or only some ranks fail to build.
            Exception: what `make` raised, if it did on all ranks alike.
        """
        problem: Exception | None = None
        values: dict[str, Any] = {}
        try:
            built, values = make()
        except Exception as error:
            problem = error
        for level in reversed(self._levels):
            told = "none" if problem is None else str(problem).partition("\n")[0]
            try:
                level.verify(what, {**given, "problem": told, **values}, advice)
            except RankMismatchError as mismatch:  # which the other level has to learn, too
                problem, values = mismatch, {}
        if problem is not None:
            raise problem
        return built


def _spread(name: str, values: list[Any]) -> str:
    holders: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        text = str(value)
        short = text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
        holders.setdefault((value, short), []).append(rank)
    if len(holders) == 1:
        return ""
    return f"{name}: " + ", ".join(
        f"{short} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        for (_, short), ranks in holders.items()
    )
