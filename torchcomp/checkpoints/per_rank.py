"""PerRank: the state of every rank in one torch.distributed.checkpoint, under a name of its own."""

import warnings
from io import BytesIO
from os import PathLike
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from torchcomp.checkpoints import checkpoint
from torchcomp.checkpoints.gathering import Gatherable
from torchcomp.checkpoints.redistribution import Place, gathered, own_state
from torchcomp.specs.errors import CheckpointError

State = dict[str, Any]


class PerRank:
    """A handle for torch.distributed.checkpoint, which stores plain tensors of one rank only.

    Every rank writes its own residual, and nobody gathers. Save and load it beside the model:

        state = {"model": model.state_dict(), "handle": torchcomp.PerRank(handle)}
        dcp.save(state, checkpoint_id=folder)
        dcp.load(state, checkpoint_id=folder)

    A run with another number of ranks, or with other replicas and shards, calls :meth:`load` after
    ``dcp.load``, with the handle left out of `state`. A state is one file's bytes in memory while
    it is written or read.

    Args:
        source: a handle of :func:`torchcomp.register`, a LocalSGD or a JointSpar.
    """

    def __init__(self, source: Gatherable) -> None:
        self._source = source

    @property
    def _key(self) -> str:
        return f"rank{self._source._place.rank}"

    def state_dict(self) -> dict[str, bytes]:
        """Return the state of this rank under its name, as the bytes of a file of torch.save."""
        # Not as a dict: dcp.load would read only the tensors that this run has as well, and no
        # empty dicts.
        file = BytesIO()
        torch.save(self._source.state_dict(), file)
        return {self._key: file.getvalue()}

    def load_state_dict(self, state: dict[str, bytes]) -> None:
        """Restore the state of this rank.

        Raises:
            CheckpointError: if the state is damaged, or of another model, method, rank or world
                size.
        """
        checkpoint.record(**{self._key: _require_bytes})(state, "the state dict")
        self._source.load_state_dict(_opened(state[self._key]))

    def load(self, checkpoint_id: str | PathLike[str], key: str = "handle") -> None:
        """Restore the state from a checkpoint of any number of ranks, nodes, replicas and shards.

        If they are those of this run, this rank reads its own state. If not, it reads the states of
        all ranks to the CPU, and converts them with :func:`torchcomp.redistribute`.

        Args:
            checkpoint_id: where ``dcp.save`` wrote the checkpoint: a folder.
            key: the name of this object in it.

        Raises:
            CheckpointError: if the checkpoint has no such state, or cannot be converted.
        """
        paths = (FileSystemReader(checkpoint_id).read_metadata().planner_data or {}).items()
        names = {str(path[1]): name for name, path in paths if len(path) > 1 and path[0] == key}
        if not names:
            raise CheckpointError(
                f"the checkpoint in {checkpoint_id} has no state of torchcomp.PerRank under {key!r}"
            )
        place, world_size = self._source._place, self._source._gather_over.world_size
        if len(names) == world_size and self._key in names:
            (own,) = _read(checkpoint_id, [names[self._key]])
            if Place.of(own) == place:
                self._source.load_state_dict(own)
                return
        ordered = sorted(names, key=lambda rank: int(rank.removeprefix("rank")))
        states = _read(checkpoint_id, [names[rank] for rank in ordered])
        self._source.load_state_dict(own_state(gathered(states), world_size, place))


def _read(checkpoint_id: str | PathLike[str], names: list[str]) -> list[State]:
    """Read states by their names in the checkpoint."""
    flat: dict[str, Any] = dict.fromkeys(names)
    with warnings.catch_warnings():
        # On purpose: ranks can read different states.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(flat, checkpoint_id=checkpoint_id, no_dist=True)
    return [_opened(flat[name]) for name in names]


def _require_bytes(value: Any, where: str) -> None:
    checkpoint.require(type(value) is bytes, where, "bytes", value)


def _opened(content: bytes) -> State:
    try:
        state: State = torch.load(BytesIO(content), map_location="cpu", weights_only=True)
    # Damaged files end in errors of many types.
    except Exception as error:
        raise CheckpointError(f"a damaged checkpoint: it cannot be read ({error!r})") from None
    return state
