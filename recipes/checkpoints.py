"""Checkpoints that survive a kill at any moment.

Every rank saves its own file. Between two synchronisations of local steps the ranks have different
weights, optimizer states and residuals, and their random generators always differ. A checkpoint is
complete when it has a marker file. Rank 0 writes the marker after all ranks have saved their files.
"""

import json
import os
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recipes.errors import RecipeError

_MARKER = "complete.json"
_KEPT = 2


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run.

    Attributes:
        folder: contains one sub-folder per checkpoint.
        rank: the rank that reads and writes.
        world_size: number of ranks of the run.
    """

    folder: Path
    rank: int
    world_size: int

    def save(self, step: int, state: dict[str, Any], settings: dict[str, Any]) -> None:
        """Save this rank's ``state``. All ranks must call this at the same step.

        Args:
            step: number of optimizer steps that the run has taken.
            state: everything that the rest of the run depends on.
            settings: those that a resumed run must keep; see :meth:`load`.
        """
        directory = self.folder / f"step-{step:09d}"
        directory.mkdir(parents=True, exist_ok=True)
        _write_atomically(directory / f"rank-{self.rank}.pt", lambda path: torch.save(state, path))
        # The marker must not exist before the last rank's file does.
        dist.barrier()
        if self.rank == 0:
            marker = json.dumps({"step": step, "ranks": self.world_size, "settings": settings})
            _write_atomically(directory / _MARKER, lambda path: path.write_text(marker))
            self._delete_old()

    def newest(self) -> Path | None:
        """Return the folder of the newest complete checkpoint, or None.

        All ranks must call this. They get what rank 0 sees: a shared file system can show new files
        to some ranks later than to others.
        """
        complete = self._complete() if self.rank == 0 else []
        found = [complete[-1] if complete else None]
        dist.broadcast_object_list(found)
        return found[0]

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's state from the newest complete checkpoint.

        Raises:
            RecipeError: if there is no checkpoint, if its file is damaged, or if it was written
                with another number of ranks or other ``settings``.
        """
        newest = self.newest()
        if newest is None:
            raise RecipeError(
                f"--resume: no complete checkpoint in {self.folder}; start without --resume, "
                "with --checkpoint-every above 0"
            )
        _check_compatible(json.loads((newest / _MARKER).read_text()), self.world_size, settings)
        return read_state(newest / f"rank-{self.rank}.pt")

    def _complete(self) -> list[Path]:
        # Steps are zero-padded, so the order of the names is the order of the steps.
        return sorted(marker.parent for marker in self.folder.glob(f"step-*/{_MARKER}"))

    def _delete_old(self) -> None:
        oldest_kept = self._complete()[-_KEPT:][0].name
        for directory in self.folder.glob("step-*"):
            # Keep newer ones without a marker: another rank may already be writing its next file.
            if directory.name < oldest_kept:
                # First the marker: a kill between these two lines must not leave a partial
                # checkpoint that looks complete.
                (directory / _MARKER).unlink(missing_ok=True)
                shutil.rmtree(directory)


def _write_atomically(path: Path, write: Any) -> None:
    unfinished = path.with_name(f".{path.name}")
    try:
        write(unfinished)
        # os.replace() is atomic, but it can reach the disk before the content does.
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        # On a full disk, it would take the space of the next checkpoint.
        unfinished.unlink(missing_ok=True)
        raise


def read_state(path: Path) -> dict[str, Any]:
    """Return the state in a file of :meth:`Checkpoints.save`.

    Raises:
        RecipeError: if the file is damaged.
    """
    try:
        # torch.load does not compare the checksums that torch.save writes.
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} does not match")
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load does not document which errors a damaged file raises
        raise RecipeError(
            f"--resume: {path} cannot be read ({error}); delete its folder to resume from the "
            "checkpoint before it"
        ) from None
    return state


def _check_compatible(marker: dict[str, Any], world_size: int, settings: dict[str, Any]) -> None:
    if marker["ranks"] != world_size:
        raise RecipeError(
            f"--resume: the checkpoint was written by {marker['ranks']} ranks and this run has "
            f"{world_size}; every rank has its own file, so start {marker['ranks']} ranks"
        )
    for name in sorted(marker["settings"].keys() | settings.keys()):
        saved, current = marker["settings"].get(name), settings.get(name)
        if saved != current:
            raise RecipeError(
                f"--resume: the checkpoint has {name} {saved!r} and this run has {current!r}; "
                "resume with the settings of the checkpoint"
            )
