"""Checkpoints that survive a kill at any moment: one file per rank, valid once all are written.

Between two synchronisations of local steps the ranks' weights differ, and so do their optimizers,
residuals and random numbers: every rank saves its own. A set counts only when its marker
exists, and rank 0 writes the marker after every rank has finished its file.
"""

import json
import os
import shutil
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
    """The checkpoints of one run, in ``folder``, as one of its ranks sees them."""

    folder: Path
    rank: int
    ranks: int

    def save(self, step: int, state: dict[str, Any], settings: dict[str, Any]) -> None:
        """Write this rank's ``state``; all ranks call this at the same step."""
        chosen = self.folder / f"step-{step:09d}"
        chosen.mkdir(parents=True, exist_ok=True)
        _replace(chosen / f"rank-{self.rank}.pt", lambda path: torch.save(state, path))
        dist.barrier()
        if self.rank == 0:
            note = json.dumps({"step": step, "ranks": self.ranks, "settings": settings})
            _replace(chosen / _MARKER, lambda path: path.write_text(note))
            self._prune()

    def exist(self) -> bool:
        """Whether there is a complete set to resume from."""
        return bool(self._complete())

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's state of the newest complete set, if it fits this run."""
        if not self.exist():
            raise RecipeError(
                f"--resume: no complete checkpoint in {self.folder}; start without --resume, "
                "with --checkpoint-every above 0"
            )
        chosen = self._complete()[-1]
        _check_fits(json.loads((chosen / _MARKER).read_text()), self.ranks, settings)
        return _read(chosen / f"rank-{self.rank}.pt")

    def _complete(self) -> list[Path]:
        return sorted(marker.parent for marker in self.folder.glob(f"step-*/{_MARKER}"))

    def _prune(self) -> None:
        oldest_kept = self._complete()[-_KEPT:][0].name
        for old in self.folder.glob("step-*"):
            # Newer ones stay, complete or not: another rank may be writing its next file already.
            if old.name < oldest_kept:
                # The marker goes first: a kill in between must not leave half a set that counts.
                (old / _MARKER).unlink(missing_ok=True)
                shutil.rmtree(old)


def _replace(path: Path, write: Any) -> None:
    unfinished = path.with_name(f".{path.name}")
    write(unfinished)
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _read(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever its unpickler stumbled over
        raise RecipeError(f"--resume: {path} cannot be read ({error})") from None
    return state


def _check_fits(note: dict[str, Any], ranks: int, settings: dict[str, Any]) -> None:
    if note["ranks"] != ranks:
        raise RecipeError(
            f"--resume: the checkpoint was written by {note['ranks']} ranks and this run has "
            f"{ranks}: every rank needs its own part, so start as many"
        )
    for name in sorted(note["settings"].keys() | settings.keys()):
        saved, given = note["settings"].get(name), settings.get(name)
        if saved != given:
            raise RecipeError(
                f"--resume: the checkpoint has {name} {saved!r} and this run has {given!r}; a "
                "resumed run must keep its configuration to end with the same weights"
            )
