"""The marker of a checkpoint: the file that makes it complete."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recipes.atomic_files import write_atomically
from recipes.errors import RecipeError

MARKER = "complete.json"


@dataclass(frozen=True)
class Marker:
    """What a checkpoint consists of. The file also has a checksum of the marker itself.

    Attributes:
        sha256: of the files of all ranks, in rank order.
        settings: of the run, those that it must keep.
    """

    sha256: tuple[str, ...]
    settings: dict[str, Any]

    @property
    def ranks(self) -> int:
        """The number of ranks that have saved."""
        return len(self.sha256)

    def write(self, folder: Path) -> None:
        """Write the marker of the checkpoint in ``folder``."""
        contents = asdict(self)
        text = json.dumps({**contents, "checksum": _checksum(contents)})
        write_atomically(folder / MARKER, lambda file: file.write(text.encode()))

    @classmethod
    def read(cls, folder: Path) -> "Marker":
        """Return the marker of the checkpoint in ``folder``."""
        path = folder / MARKER
        try:
            contents = json.loads(path.read_bytes())
            if contents.pop("checksum") != _checksum(contents):
                raise RecipeError(f"{path} differs from its checksum")
            return cls(tuple(contents["sha256"]), contents["settings"])
        except (ValueError, LookupError, AttributeError, TypeError):
            raise RecipeError(f"{path} is damaged, or was written by another version") from None


def _checksum(contents: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
