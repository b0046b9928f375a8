"""Checkpoints that survive a kill at any moment.

Every rank saves its own file. Between two synchronisations of local steps the ranks have different
weights, optimizer states and residuals, and their random generators always differ. A checkpoint is
complete when it has a marker file with a checksum of each rank's file. Rank 0 writes the marker
after all ranks have saved. A complete checkpoint that is damaged is skipped.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from recipes.errors import RecipeError

_MARKER = "complete.json"
_KEPT = 2

State = dict[str, Any]
Resized = Callable[[list[State]], State]


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

    def save(self, step: int, state: State, settings: State) -> str | None:
        """Save this rank's ``state``. All ranks must call this at the same step.

        Args:
            step: number of optimizer steps that the run has taken.
            state: everything that the rest of the run depends on.
            settings: those that a resumed run must keep; see :meth:`load`.

        Returns:
            None, or why a rank could not write, for example to a full disk. All ranks return the
            same. The checkpoints before this one are kept.
        """
        directory = self.folder / f"step-{step:09d}"
        own = directory / _file_of(self.rank)
        digest, problem = self._attempt(lambda: _save_state(own, state))
        # The marker must not exist before the last rank's file does.
        digests, problems = zip(*self._from_all((digest, problem)), strict=True)
        problem = _first(problems)
        if self.rank == 0 and problem is None:
            contents = {"step": step, "ranks": self.world_size, "sha256": digests}
            marker = json.dumps({**contents, "settings": settings}).encode()
            _, problem = self._attempt(
                lambda: _write_atomically(directory / _MARKER, lambda file: file.write(marker))
            )
        problem = self._from_rank_0(problem)
        if problem is not None:
            own.unlink(missing_ok=True)
        elif self.rank == 0:
            self._delete_old()
        return problem

    def newest(self) -> Path | None:
        """Return the folder of the newest complete checkpoint, or None.

        All ranks must call this. They get what rank 0 sees: a shared file system can show new files
        to some ranks later than to others.
        """
        complete = self._complete_on_rank_0()
        return complete[-1] if complete else None

    def load(self, settings: State, resized: Resized | None = None) -> State:
        """Return this rank's state from the newest complete checkpoint that is not damaged.

        All ranks must call this. Rank 0 prints a line for every damaged checkpoint.

        Args:
            settings: of this run.
            resized: makes the state of this rank from those of all ranks, in rank order, if another
                number of ranks has saved them.

        Raises:
            RecipeError: if there is no such checkpoint, or if it was written with other
                ``settings``, or, without ``resized``, with another number of ranks.
        """
        newest, marker = self._newest_intact()
        ranks = marker["ranks"]
        if ranks != self.world_size and resized is None:
            raise RecipeError(
                f"--resume: the checkpoint was written by {ranks} ranks and this run has "
                f"{self.world_size}: start {ranks} ranks, or add --elastic"
            )
        _check_settings(marker["settings"], settings)
        if ranks == self.world_size or resized is None:
            return _read(newest / _file_of(self.rank))
        return resized([_read(newest / _file_of(rank)) for rank in range(ranks)])

    def _newest_intact(self) -> tuple[Path, State]:
        """Return the folder and the marker of the newest checkpoint without damage."""
        complete = self._complete_on_rank_0()
        for directory in reversed(complete):
            problem = _first(self._from_all(self._damage(directory)))
            if problem is None:
                return directory, _read_marker(directory)
            if self.rank == 0:
                print(f"skipped a damaged checkpoint: {problem}", file=sys.stderr, flush=True)
        if complete:
            raise RecipeError(
                f"--resume: all checkpoints in {self.folder} are damaged; delete that folder to "
                "start again from the first step"
            )
        raise RecipeError(
            f"--resume: no complete checkpoint in {self.folder}; start without --resume, "
            "with --checkpoint-every above 0"
        )

    def _damage(self, directory: Path) -> str | None:
        """Return what is wrong with this rank's share of the files, or None."""
        try:
            marker = _read_marker(directory)
            for rank in range(self.rank, marker["ranks"], self.world_size):
                path = directory / _file_of(rank)
                if _sha256(path) != marker["sha256"][rank]:
                    return f"{path} differs from its checksum"
        except (OSError, ValueError, LookupError, TypeError) as error:
            return f"{directory} cannot be read ({error})"
        return None

    def _complete(self) -> list[Path]:
        # Steps are zero-padded, so the order of the names is the order of the steps.
        return sorted(marker.parent for marker in self.folder.glob(f"step-*/{_MARKER}"))

    def _complete_on_rank_0(self) -> list[Path]:
        return self._from_rank_0(self._complete() if self.rank == 0 else [])

    def _delete_old(self) -> None:
        oldest_kept = self._complete()[-_KEPT:][0].name
        for directory in self.folder.glob("step-*"):
            # Keep newer ones without a marker: another rank may already be writing its next file.
            if directory.name < oldest_kept:
                # First the marker: a kill between these two lines must not leave a partial
                # checkpoint that looks complete.
                (directory / _MARKER).unlink(missing_ok=True)
                shutil.rmtree(directory)

    def _attempt(self, write: Callable[[], str | None]) -> tuple[str | None, str | None]:
        """Return the result of a write, and what went wrong, if anything."""
        try:
            return write(), None
        except OSError as error:
            return None, f"rank {self.rank}: {error.strerror}"

    def _from_all(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def _from_rank_0(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]


def _file_of(rank: int) -> str:
    return f"rank-{rank}.pt"


def _first(problems: Any) -> str | None:
    return next((problem for problem in problems if problem is not None), None)


def _save_state(path: Path, state: State) -> str:
    """Write a state, and return its checksum."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_atomically(path, lambda file: torch.save(state, file))
    return _sha256(path)


def _write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    unfinished = path.with_name(f".{path.name}")
    try:
        # Given a path, torch.save() would raise other errors than OSError.
        with unfinished.open("wb") as file:
            write(file)
            # os.replace() is atomic, but it can reach the disk before the content does.
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except (OSError, RuntimeError) as error:
        # A full disk has no space for half a file.
        unfinished.unlink(missing_ok=True)
        # In the middle of a large tensor, torch.save() raises a RuntimeError about its position in
        # the file while it handles the error of the disk.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _sha256(path: Path) -> str:
    """Return the checksum of a file. torch.load() does not notice a wrong bit in a tensor."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _read_marker(directory: Path) -> State:
    marker: State = json.loads((directory / _MARKER).read_text())
    return marker


def _read(path: Path) -> State:
    state: State = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _check_settings(saved_settings: State, settings: State) -> None:
    for name in sorted(saved_settings.keys() | settings.keys()):
        saved, current = saved_settings.get(name), settings.get(name)
        if saved != current:
            raise RecipeError(
                f"--resume: the checkpoint has {name} {saved!r} and this run has {current!r}; "
                "resume with the settings of the checkpoint"
            )
