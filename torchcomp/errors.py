"""The errors that users can catch. Each says what was wrong, what was expected, and why."""


class SpecError(ValueError):
    """A method or schedule that cannot be built: unknown name or option, bad value, nonsense mix.

    Attributes:
        field: name of the option at fault, where there is one; the parser points its caret there.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnsupportedModelError(TypeError):
    """A model, or a DDP option, that a communication hook cannot serve."""


class RankMismatchError(RuntimeError):
    """Ranks that should hold the same value do not; the message lists each rank's value."""


class NonFiniteError(FloatingPointError):
    """A NaN or an infinity reached an exchange; nothing of that step was kept or applied."""


class WireError(RuntimeError):
    """A message that is not what its sender should have sent; nothing of that step was applied."""


class CheckpointError(ValueError):
    """A state dict that does not belong to this model, method or world size."""


class ScheduleError(ValueError):
    """A local-step run that left its schedule: steps beyond the end, or an impossible rate."""
