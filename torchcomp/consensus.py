"""Consensus: facts that all ranks must share, and one error on all of them where they do not."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from torchcomp.errors import RankMismatchError

Built = TypeVar("Built")


class Consensus(ABC):
    """Ranks that can compare what they hold; all of them call the same method."""

    @abstractmethod
    def same_everywhere(self, number: int) -> bool:
        """Whether all ranks hold the same 64-bit number."""

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in rank order. Slow: for errors, not for training."""

    def require_same(self, what: str, facts: dict[str, Any], advice: str = "") -> None:
        """Raise on all ranks, with each rank's value, unless all ranks hold equal `facts`.

        Args:
            what: what is being compared, for the error.
            facts: name -> printable value; compared as text.
            advice: what to do about it, appended to the error.

        Raises:
            RankMismatchError: listing every fact that differs and who holds which value.
        """
        mine = {"call": what, **{name: str(value) for name, value in facts.items()}}
        if self.same_everywhere(_digest(repr(mine))):
            return
        everyone = self.gather_objects(mine)
        common = [name for name in mine if all(name in theirs for theirs in everyone)]
        lines = [_spread(name, [theirs[name] for theirs in everyone]) for name in common]
        differing = "; ".join(line for line in lines if line)
        raise RankMismatchError(f"{what}: ranks disagree. {differing}. {advice}".strip())

    def agree(
        self,
        what: str,
        given: dict[str, Any],
        build: Callable[[], tuple[Built, dict[str, Any]]],
        advice: str = "",
    ) -> Built:
        """Build something on every rank alike, or raise on every rank.

        Args:
            what: what is being built, for the error.
            given: this rank's arguments, compared if nothing can be built from them.
            build: returns what was built and the facts that must be the same on all ranks.
            advice: what to do if they are not.

        Raises:
            RankMismatchError: if the facts differ, or only some ranks fail to build.
            Exception: what `build` raised, if it did on all ranks alike.
        """
        problem: Exception | None = None
        facts: dict[str, Any] = {}
        try:
            built, facts = build()
        except Exception as error:
            problem = error
        self.require_same(what, {**given, "problem": _first_line(problem), **facts}, advice)
        if problem is not None:
            raise problem
        return built


def _first_line(problem: Exception | None) -> str:
    return "none" if problem is None else str(problem).partition("\n")[0]


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _spread(name: str, values: list[Any]) -> str:
    holders: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    if len(holders) == 1:
        return ""
    return f"{name}: " + ", ".join(
        f"{_short(value)} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        for value, ranks in holders.items()
    )


def _short(value: Any, longest: int = 200) -> str:
    text = str(value)
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"
