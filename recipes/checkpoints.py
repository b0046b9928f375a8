"""Checkpoints that survive a kill at any moment.

Every rank saves its own file. Between two synchronisations of local steps the ranks have different
weights, optimizer states and residuals, and their random generators always differ. A checkpoint is
complete when it has a marker file with a checksum of each rank's file. Rank 0 writes the marker
after all ranks have saved. A complete checkpoint that is damaged is skipped.
"""

import copy
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from recipes.errors import RecipeError
from recipes.files import write_atomically

MARKER = "complete.json"
_KEPT = 2
# Steps are zero-padded, so the order of the names is the order of the steps.
_ANY_STEP = "step-" + 9 * "[0-9]"

State = dict[str, Any]
Resized = Callable[[list[State]], State]
_Result = TypeVar("_Result")


class _File(NamedTuple):
    sha256: str
    size: int


@dataclass(frozen=True)
class Marker:
    """What a checkpoint consists of. The file also has a checksum of the marker itself."""

    sha256: tuple[str, ...]  # of the files of all ranks, in rank order
    settings: dict[str, Any]  # of the run, those that it must keep

    @property
    def ranks(self) -> int:
        return len(self.sha256)

    def write(self, folder: Path) -> None:
        contents = asdict(self)
        text = json.dumps({**contents, "checksum": _checksum(contents)})
        write_atomically(folder / MARKER, lambda file: file.write(text.encode()))

    @classmethod
    def read(cls, folder: Path) -> "Marker":
        path = folder / MARKER
        try:
            contents = json.loads(path.read_bytes())
            if contents.pop("checksum") != _checksum(contents):
                raise RecipeError(f"{path} differs from its checksum")
            return cls(tuple(contents["sha256"]), contents["settings"])
        except (ValueError, LookupError, AttributeError, TypeError):
            raise RecipeError(f"{path} is damaged, or was written by another version") from None


@dataclass(frozen=True)
class Checkpoints:
    folder: Path  # contains one sub-folder per checkpoint
    rank: int  # the rank that reads and writes
    world_size: int  # number of ranks of the run

    def save(self, step: int, state: State, settings: State) -> str | None:
        """Save this rank's state, on all ranks at the same step; return why it failed, if so."""
        directory = self.folder / f"step-{step:09d}"
        own = directory / _file_of(self.rank)
        written, problem = self._attempt(lambda: _save_state(own, state))
        # The marker must not exist before the last rank's file does.
        files, problems = zip(*self._from_all((written, problem)), strict=True)
        problem = _first(problems)
        if self.rank == 0 and problem is None:
            _, problem = self._attempt(lambda: _complete(directory, files, settings))
        problem = self._from_rank_0(problem)
        if problem is not None:
            with suppress(OSError):
                own.unlink()
        elif self.rank == 0:
            # The checkpoint is complete, whether or not the folder can be listed.
            with suppress(OSError):
                self._delete_old(directory)
        return problem

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint, or None. All ranks must call this."""
        # They get what rank 0 sees: a shared file system can show new files to some ranks later.
        complete = self._markers_on_rank_0()
        return complete[-1] if complete else None

    def load(self, settings: State, resized: Resized | None = None) -> State:
        """Return this rank's state from the newest intact checkpoint. All ranks must call this."""
        newest, marker = self._newest_intact()
        _check_settings(marker.settings, settings)
        if marker.ranks == self.world_size:
            state = _read(newest / _file_of(self.rank))
        elif resized is None:
            raise RecipeError(
                f"--resume: the checkpoint was written by {marker.ranks} ranks and this run has "
                f"{self.world_size}: start {marker.ranks} ranks, or add --elastic"
            )
        else:
            paths = [newest / _file_of(rank) for rank in range(marker.ranks)]
            # Mapped, not read: of most files, a rank needs a small part. Copied, because the run
            # deletes these files later.
            state = copy.deepcopy(resized([_read(path, mapped=True) for path in paths]))
        if self.rank == 0:
            self._discard_newer(newest)
        return state

    def _newest_intact(self) -> tuple[Path, Marker]:
        complete = self._markers_on_rank_0()
        for directory in reversed(complete):
            marker, problem = self._verified(directory)
            if marker is not None and problem is None:
                return directory, marker
            if self.rank == 0:
                skipped = f"skipped the damaged checkpoint {directory}"
                print(f"{skipped}: {problem}", file=sys.stderr, flush=True)
        if complete:
            raise RecipeError(
                f"--resume: all checkpoints in {self.folder} are damaged, or not all ranks can "
                "read them; if every machine sees that folder, choose another --out to start from "
                "the first step"
            )
        raise RecipeError(
            f"--resume: no complete checkpoint in {self.folder}; start without --resume, "
            "with --checkpoint-every above 0"
        )

    def _verified(self, directory: Path) -> tuple[Marker | None, str | None]:
        """Return the marker of a checkpoint, and what is wrong with its files, if anything."""
        found = self._attempt(lambda: Marker.read(directory)) if self.rank == 0 else None
        marker, problem = self._from_rank_0(found)
        if marker is not None:
            _, problem = self._attempt(lambda: self._verify_share(directory, marker))
        return marker, _first(self._from_all(problem))

    def _verify_share(self, directory: Path, marker: Marker) -> None:
        """Compare this rank's share of the files with their checksums."""
        for rank in range(self.rank, marker.ranks, self.world_size):
            path = directory / _file_of(rank)
            if _sha256(path) != marker.sha256[rank]:
                raise RecipeError(f"{path.name} differs from its checksum")

    def _markers(self) -> list[Path]:
        return sorted(marker.parent for marker in self.folder.glob(f"{_ANY_STEP}/{MARKER}"))

    def _markers_on_rank_0(self) -> list[Path]:
        found = self._attempt(self._markers) if self.rank == 0 else None
        markers, problem = self._from_rank_0(found)
        if problem is not None:
            raise RecipeError(f"cannot list {self.folder}: {problem}")
        return markers

    def _discard_newer(self, used: Path) -> None:
        """Remove the markers of newer checkpoints. They are damaged, and must not count as kept."""
        for directory in self._markers():
            if directory > used:
                with suppress(OSError):
                    (directory / MARKER).unlink()

    def _delete_old(self, saved: Path) -> None:
        # Another run in this folder can have removed all markers, also the one just written.
        oldest_kept = min(self._markers()[-_KEPT:], default=saved)
        for directory in self.folder.glob(_ANY_STEP):
            # Keep newer ones without a marker: another rank may already be writing its next file.
            # If another run writes to this folder as well, the saved one can be among the old ones.
            if directory < oldest_kept and directory != saved:
                # What cannot be deleted takes space, and does no other harm.
                with suppress(OSError):
                    # First the marker: a kill between these two lines must not leave a partial
                    # checkpoint that looks complete.
                    (directory / MARKER).unlink(missing_ok=True)
                    shutil.rmtree(directory)

    def _attempt(self, act: Callable[[], _Result]) -> tuple[_Result | None, str | None]:
        """Return a result, and what went wrong, if anything. The other ranks wait for both."""
        try:
            return act(), None
        except Exception as error:
            return None, f"rank {self.rank}: {_reason(error)}"

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


def _first(problems: Iterable[str | None]) -> str | None:
    return next((problem for problem in problems if problem is not None), None)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) if isinstance(error, RecipeError) else f"{type(error).__name__}: {error}"


def _save_state(path: Path, state: State) -> _File:
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = write_atomically(path, lambda file: torch.save(state, file))
    return _File(digest, path.stat().st_size)


def _complete(directory: Path, files: Iterable[_File], settings: State) -> None:
    """Write the marker, if this rank sees the files of all ranks."""
    for rank, file in enumerate(files):
        path = directory / _file_of(rank)
        if _size(path) != file.size:
            raise RecipeError(
                f"does not see {path} as rank {rank} has written it: all ranks need the same "
                "--out, on a file system that their machines share"
            )
    Marker(tuple(file.sha256 for file in files), settings).write(directory)


def _size(path: Path) -> int | None:
    # Opening a file on NFS asks the server. stat() alone can answer from a cache.
    with suppress(OSError), path.open("rb") as file:
        return file.seek(0, os.SEEK_END)
    return None


def _sha256(path: Path) -> str:
    """Return the checksum of a file. torch.load() does not notice a wrong bit in a tensor."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _read(path: Path, *, mapped: bool = False) -> State:
    state: State = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    return state


def _check_settings(saved_settings: State, settings: State) -> None:
    for name in sorted(saved_settings.keys() | settings.keys()):
        saved, current = saved_settings.get(name), settings.get(name)
        if saved != current:
            raise RecipeError(
                f"--resume: the checkpoint has {name} {saved!r} and this run has {current!r}; "
                "resume with the settings of the checkpoint"
            )


def _checksum(contents: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
