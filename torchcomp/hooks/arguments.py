"""Checks of the arguments of `register` that do not depend on the kind of model."""

import torch

from torchcomp.checks import check_choice
from torchcomp.errors import SpecError
from torchcomp.keys import check_seed


def check_arguments(seed: object, scaler: object, check: object) -> None:
    """Require a valid seed, scaler and time of the check.

    Raises:
        SpecError: if one is invalid, or if they do not fit together.
    """
    check_seed(seed)
    check_scaler(scaler)
    check_choice("check", check, ("step", "late"))
    if check == "late" and isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
        raise late_does_not_fit("a GradScaler, which skips steps that overflow")


def check_scaler(scaler: object) -> None:
    """Require a GradScaler, or None."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise SpecError(f"scaler must be a torch.amp.GradScaler, not {type(scaler).__name__}")


def late_does_not_fit(needs: str) -> SpecError:
    """Return the error for an option that needs the result of a step in the same step."""
    return SpecError(
        f"check='late' decides after a step was applied, and does not fit {needs}. Use "
        "check='step'",
        "check",
    )


def inside_dtype(inside: object, nodes: object) -> torch.dtype | None:
    """Return the dtype of messages inside a node; None is that of the gradients.

    Raises:
        SpecError: if `inside` is invalid, or there are no nodes.
    """
    if inside is None:
        return None
    check_choice("inside", inside, ("bf16",))
    if nodes is None:
        raise SpecError(
            "inside is for the exchange inside a node: pass nodes as well, or leave it out",
            "inside",
        )
    return torch.bfloat16
