"""Values that must match on all ranks, and objects that are built on all of them or on none."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torchcomp.exchange.collectives import Collectives
from torchcomp.specs.errors import RankMismatchError

Built = TypeVar("Built")


class Verifying(Collectives):
    """Collectives that compare values of all ranks."""

    def verify(
        self,
        what: str,
        values: dict[str, Any],
        advice: str = "",
        on_level: dict[str, Any] | None = None,
    ) -> None:
        """Verify that `values` match on all ranks of all levels, or raise on every rank.

        Args:
            what: the call that is verified, for the error.
            values: name -> printable value; compared as text.
            advice: what the user can do, appended to the error.
            on_level: further values, which must match only on the ranks of this exchange.

        Raises:
            RankMismatchError: lists every value that differs, with the ranks that have it.
        """
        found: RankMismatchError | None = None
        compared = {"error": "none", **values, **(on_level or {})}
        for level in (self, *(each for each in self._levels if each is not self)):
            try:
                _verify(level, what, compared, advice)
            except RankMismatchError as mismatch:
                found = found or mismatch
            # Pass a mismatch on to the other level. One of its ranks is in every group of this one,
            # so all ranks find it.
            compared = {"error": "none", **values} | ({"error": found} if found else {})
        if found is not None:
            raise found

    def build(
        self,
        what: str,
        arguments: dict[str, Any],
        make: Callable[[], tuple[Built, dict[str, Any]]],
        advice: str = "",
    ) -> Built:
        """Build an object on every rank, or raise on every rank; see :meth:`verify`.

        Args:
            what: the call that builds, for the error.
            arguments: name -> printable argument of the call; must match on all ranks.
            make: returns the object, and further values that must match. A value replaces the
                argument of the same name, as a parsed spec replaces its string.
            advice: what the user can do if they do not match.

        Raises:
            RankMismatchError: if arguments or values differ, or `make` fails only on some ranks.
            Exception: the exception of `make`, if it fails on all ranks in the same way.
        """
        try:
            built, values = make()
        except Exception as error:
            # First tell the others: they would wait in `verify` for a rank that fails alone.
            self.verify(what, {**arguments, "error": str(error).partition("\n")[0]}, advice)
            raise
        self.verify(what, {**arguments, "error": "none", **values}, advice)
        return built


def _verify(level: Collectives, what: str, values: dict[str, Any], advice: str) -> None:
    # Compare `what` as well, to detect ranks that are in different calls.
    mine = {"call": what, **{name: str(value) for name, value in values.items()}}
    # Compare a digest first: the values themselves can be long, and almost always match.
    digest = hashlib.sha256(repr(mine).encode()).digest()
    if level.same(int.from_bytes(digest[:7], "big")):
        return
    by_rank = level.gather_objects(mine)
    common = [name for name in mine if all(name in theirs for theirs in by_rank)]
    lines = [
        _ranks_by_value(name, [theirs[name] for theirs in by_rank], level.global_ranks)
        for name in common
    ]
    differing = "; ".join(line for line in lines if line)
    problem = f"{what}: values that must match on all ranks differ: {differing}"
    raise RankMismatchError(f"{problem}. {advice}".strip())


def _ranks_by_value(name: str, values: list[Any], ranks: Sequence[int]) -> str:
    """Return "name: value on rank 0, other value on ranks 1, 2", or "" if all values are equal."""
    holders: dict[Any, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        text = str(value)
        short = text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
        holders.setdefault((value, short), []).append(rank)
    if len(holders) == 1:
        return ""
    return f"{name}: " + ", ".join(
        f"{short} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        for (_, short), ranks in holders.items()
    )
