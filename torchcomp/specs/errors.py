"""The errors that users can catch. Each states what was wrong, what was expected, and why."""


class SpecError(ValueError):
    """A method, schedule or argument is invalid.

    Attributes:
        field: name of the invalid option, or None. The parser puts its caret below that option.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnsupportedModelError(TypeError):
    """A communication hook does not work with this model or DDP option."""


class RankMismatchError(RuntimeError):
    """A value that must match on all ranks does not. The message lists the value of each rank."""


class NonFiniteError(FloatingPointError):
    """An exchange contained a NaN or an infinity. The step was discarded on every rank."""


class WireError(RuntimeError):
    """A received message was damaged or not in the expected format. The step was discarded."""


class RankFailureError(RuntimeError):
    """Another rank ended, is stopped or cannot be reached. The message names it if it is known."""


class CheckpointError(ValueError):
    """A state dict is damaged, or belongs to another model, method, rank or world size."""


class ScheduleError(ValueError):
    """A run with local steps left its schedule: too many steps, or an invalid learning rate."""


ON_ALL_RANKS = (NonFiniteError, WireError, RankMismatchError)
"""Errors of a step that every rank raises in the same call, so that all can take another step."""
