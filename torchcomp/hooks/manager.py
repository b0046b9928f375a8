"""What torchcomp needs of torchft's Manager. torchcomp does not import torchft."""

from typing import Any

from torchcomp.errors import SpecError

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
    """Require a torchft Manager with settings under which every step has equal ranks.

    Raises:
        SpecError: if it is none, or has other settings.
    """
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
