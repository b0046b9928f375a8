"""What torchcomp needs of the Manager of torchft, which it does not import, and how it votes."""

from typing import Any

from torchcomp.specs.errors import SpecError

_NEEDED = (
    "wait_quorum",
    "errored",
    "report_error",
    "current_step",
    "participating_rank",
    "num_participants",
    "register_state_dict_fn",
)


def check_manager(manager: Any) -> None:
    """Require a torchft Manager with settings under which every step has equal ranks."""
    missing = [name for name in _NEEDED if not callable(getattr(manager, name, None))]
    if missing:
        raise SpecError(
            f"manager must be a torchft.Manager, not {type(manager).__name__}: it has no "
            f"{', '.join(missing)}",
            "manager",
        )
    mode = manager._replica_world_size_mode.name
    problems = {
        "use_async_quorum=True lets a rank that joins take part in a step before it has healed, "
        "with other weights. Pass use_async_quorum=False": manager._use_async_quorum,
        f"world_size_mode={mode} counts zeros for spare ranks, and their residuals would never be "
        "sent. Pass WorldSizeMode.DYNAMIC": mode != "DYNAMIC",
        f"its replica groups have {manager._group_world_size} ranks, and each would have a "
        "residual of its own that nobody heals. Use one rank per replica "
        "group": manager._group_world_size != 1,
    }
    for problem, present in problems.items():
        if present:
            raise SpecError(f"this manager cannot be used: {problem}", "manager")


class Ballot:
    """What a ``torchft.Manager`` has decided on the last step.

    Attributes:
        quorum: the quorum of the last step, or None.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.quorum: int | None = None
        self._step = 0
        # The manager's counters when the last step ended; None if it was decided.
        self._before: tuple[int, int] | None = None
        self._decided: bool | None = None

    def _counters(self) -> tuple[int, int]:
        # One of them changes with every vote.
        return self._manager.current_step(), self._manager._commit_failures

    def open(self, step: int, quorum: int | None) -> None:
        """Begin to wait for the decision on a step."""
        self._step, self.quorum = step, quorum
        self._before, self._decided = self._counters(), None

    def close(self) -> None:
        """Forget the last step."""
        self._before = self._decided = None

    @property
    def has_voted(self) -> bool:
        """Whether the manager has voted on the last step."""
        return self._before != self._counters()

    def require_vote(self, what: str) -> None:
        """Require that the manager has voted on the last step, before `what`."""
        if not self.has_voted:
            raise RuntimeError(
                f"{what} came before the vote on the last step. Under a manager, each step has one "
                "start_quorum(), one backward pass that exchanges gradients, and one "
                "should_commit(); torchft's Optimizer makes both calls. Accumulate gradients under "
                "model.no_sync()"
            )

    def heal(self, step: int, quorum: int | None) -> bool:
        """Note the last step of the rank that heals this one. Return whether both met in it.

        Then others have counted it: what this rank sent in it was applied, also if its own vote was
        no.
        """
        met = self._before is not None and (step, quorum) == (self._step, self.quorum)
        if self._before is not None:
            self._decided = met or self._manager._commit_failures <= self._before[1]
        return met

    @property
    def voted_yes(self) -> bool:
        """Whether the manager has counted the last step, as long as no other rank has healed it."""
        return self._before is not None and self._manager.current_step() > self._before[0]

    def counts(self) -> bool:
        """Whether the last step counts."""
        counted = self.voted_yes if self._decided is None else self._decided
        self._before = None
        return counted
