"""Checkpoints of torch.distributed.checkpoint, which a run in any mode and of any size can load."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import torchcomp
from recipes.errors import RecipeError
from recipes.nodes.modes import Replica


def save(
    folder: Path, step: int, replica: Replica, optimizer: torch.optim.Optimizer, task: str
) -> None:
    """Save the state after `step` steps. All ranks call this."""
    state = {
        **_states(replica, optimizer),
        # Every rank saves its residual.
        "handle": torchcomp.PerRank(replica.handle),
        "progress": {"step": step, "task": task},
    }
    dcp.save(state, checkpoint_id=folder / f"step-{step:06d}")


def resume(folder: Path, replica: Replica, optimizer: torch.optim.Optimizer, task: str) -> int:
    """Load the newest checkpoint, and return the number of its steps. All ranks call this."""
    # dcp.save writes this file last.
    complete = sorted(folder.glob("step-*/.metadata"))
    if not complete:
        raise RecipeError(f"--resume: no checkpoint in {folder}; start with --checkpoint-every")
    newest = complete[-1].parent
    progress: dict[str, Any] = {"step": 0, "task": ""}
    dcp.load({"progress": progress}, checkpoint_id=newest)
    if progress["task"] != task:
        raise RecipeError(
            f"--resume: {newest} is of a run with {progress['task']}, and this run has {task}; "
            "resume with the same settings"
        )
    state = _states(replica, optimizer)
    dcp.load(state, checkpoint_id=newest)
    set_state_dict(
        replica.model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    # Also of another mode, or of other nodes.
    torchcomp.PerRank(replica.handle).load(newest)
    step: int = progress["step"]
    return step


def _states(replica: Replica, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, state = get_state_dict(replica.model, optimizer)
    return {"model": model, "optimizer": state}
