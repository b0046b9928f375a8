"""PerRank: the state of every rank in one torch.distributed.checkpoint, under a name of its own."""

import json
import warnings
from collections.abc import Collection, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from torchcomp import checkpoint
from torchcomp.errors import CheckpointError
from torchcomp.gathering import Gatherable
from torchcomp.redistribution import Place, gathered, own_state

State = dict[str, Any]
_TENSOR = "torchcomp.tensor"
"""Key of the number of a tensor, in the text of a state."""
_PACKED = checkpoint.record(tensors=checkpoint.dict_of(checkpoint.tensor()), rest=checkpoint.text)


class PerRank:
    """A handle for torch.distributed.checkpoint, which stores plain tensors of one rank only.

    Every rank writes its own residual, and nobody gathers. Save and load it beside the model:

        state = {"model": model.state_dict(), "handle": torchcomp.PerRank(handle)}
        dcp.save(state, checkpoint_id=folder)
        dcp.load(state, checkpoint_id=folder)

    A run with another number of ranks, or with other replicas and shards, calls :meth:`load` after
    ``dcp.load``, with the handle left out of `state`.

    Args:
        source: a handle of :func:`torchcomp.register`, a LocalSGD or a JointSpar.
    """

    def __init__(self, source: Gatherable) -> None:
        self._source = source

    @property
    def _key(self) -> str:
        return f"rank{self._source._place.rank}"

    def state_dict(self) -> State:
        """Return the state of this rank under its name."""
        return {self._key: _packed(self._source.state_dict())}

    def load_state_dict(self, state: State) -> None:
        """Restore the state of this rank.

        Raises:
            CheckpointError: if the state is damaged, or of another model, method, rank or world
                size.
        """
        checkpoint.record(**{self._key: _PACKED})(state, "the state dict")
        self._source.load_state_dict(_unpacked(state[self._key]))

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
        metadata = FileSystemReader(checkpoint_id).read_metadata()
        paths = (metadata.planner_data or {}).values()
        ranks = {str(path[1]) for path in paths if len(path) > 1 and path[0] == key}
        if not ranks:
            raise CheckpointError(
                f"the checkpoint in {checkpoint_id} has no state of torchcomp.PerRank under {key!r}"
            )
        place, world_size = self._source._place, self._source._gather_over.world_size
        states = _read(checkpoint_id, metadata, key, {self._key} & ranks)
        if len(ranks) == world_size and Place.of(states[0]) == place:
            (own,) = states
        else:
            states = _read(checkpoint_id, metadata, key, ranks)
            own = own_state(gathered(states), world_size, place)
        self._source.load_state_dict(own)


def _read(
    checkpoint_id: str | PathLike[str], metadata: Any, key: str, ranks: Collection[str]
) -> list[State]:
    """Read the states of some ranks, in rank order."""
    flat: State = {}
    packed: dict[str, State] = {rank: {"tensors": {}} for rank in ranks}
    paths = [(name, path) for name, path in metadata.planner_data.items() if path[0] == key]
    wanted = [(name, path) for name, path in paths if path[1] in ranks]
    for name, _ in wanted:
        stored = metadata.state_dict_metadata[name]
        is_tensor = isinstance(stored, TensorStorageMetadata)
        flat[name] = torch.empty(stored.size, dtype=stored.properties.dtype) if is_tensor else None
    if flat:
        with warnings.catch_warnings():
            # On purpose: ranks can read different states.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(flat, checkpoint_id=checkpoint_id, no_dist=True)
    for name, (_, rank, part, *number) in wanted:
        if number:
            packed[rank][part][number[0]] = flat[name]
        else:
            packed[rank][part] = flat[name]
    return [_unpacked(packed[rank]) for rank in sorted(ranks, key=lambda rank: int(rank[4:]))]


# torch.distributed.checkpoint drops empty dicts. All that is not a tensor is therefore one text.


def _packed(state: State) -> State:
    tensors: list[Tensor] = []

    def pack(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return {_TENSOR: len(tensors) - 1}
        if isinstance(value, Mapping):
            return {name: pack(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [pack(each) for each in value]
        return value

    text = json.dumps(pack(state))
    return {"tensors": {str(number): each for number, each in enumerate(tensors)}, "rest": text}


def _unpacked(packed: State) -> State:
    def unpack(value: Any) -> Any:
        if isinstance(value, list):
            return [unpack(each) for each in value]
        if not isinstance(value, dict):
            return value
        if value.keys() == {_TENSOR}:
            number = str(value[_TENSOR])
            if number not in packed["tensors"]:
                # dcp.load reads what this run has as well, and no other tensors.
                raise CheckpointError(
                    f"tensor {number} of the state is not there: it was saved with another method, "
                    "as after auto has chosen one. Leave the handle out of dcp.load, and call "
                    "PerRank(handle).load(folder)"
                )
            return packed["tensors"][number]
        return {name: unpack(each) for name, each in value.items()}

    try:
        state: State = unpack(json.loads(packed["rest"]))
    except CheckpointError:  # a ValueError that already says what is missing
        raise
    # Text that is not JSON raises ValueError, and RecursionError if it is nested too deep.
    except (ValueError, RecursionError, KeyError) as error:
        raise CheckpointError(
            f"a damaged checkpoint: its values cannot be read ({error!r})"
        ) from None
    return state
