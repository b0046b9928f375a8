"""Gathering: the states of all ranks, as one state dict or in one torch.distributed.checkpoint."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from io import BytesIO
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.utils._pytree import tree_map_only

from torchcomp.checkpoints import checkpoint
from torchcomp.checkpoints.redistribution import Place, gathered, own_state
from torchcomp.exchange import Exchange
from torchcomp.specs.errors import CheckpointError

State = dict[str, Any]


class Gatherable(ABC):
    """An object that has another state on each rank, such as a residual."""

    @property
    @abstractmethod
    def _gather_over(self) -> Exchange: ...

    @property
    def _place(self) -> Place:
        return Place.in_order(self._gather_over.rank)

    @property
    def _gathers(self) -> bool:
        return True  # whether this rank can be the one that gets the result

    @abstractmethod
    def state_dict(self) -> State: ...

    @abstractmethod
    def load_state_dict(self, state: State) -> None: ...

    def gather_state_dict(self, dst: int | None = 0) -> State | None:
        """Return the states of all ranks as one state dict, on the CPU. Call this on all ranks.

        Args:
            dst: the rank that gets the result; the others get None. With None, every rank gets it.

        Raises:
            RankMismatchError: if the ranks are at different steps, or only some ranks fail.
            Exception: as :meth:`state_dict`, on every rank.
        """
        return _gather(self, self.state_dict, dst)

    def load_gathered(self, state: State) -> None:
        """Restore this rank's part of the result of :meth:`gather_state_dict`.

        Pass the same `state` on every rank. That of another number of ranks is converted with
        :func:`torchcomp.redistribute`. On error, nothing changes.

        Raises:
            CheckpointError: if the state is not a gathered one, and as :meth:`load_state_dict`.
        """
        self.load_state_dict(own_state(state, self._gather_over.world_size, self._place))


class Gathered:
    """State dicts that gather, for frameworks that call ``state_dict()`` on all ranks.

    Lightning Fabric and Accelerate do, and then write the result of rank 0. Pass this object in
    place of the handle: ``accelerator.register_for_checkpointing(torchcomp.Gathered(handle))``.

    Args:
        source: a handle of :func:`torchcomp.register`, a LocalSGD or a JointSpar.
        dst: the rank that writes, or None if a rank of every node does.
        others: further objects whose state differs between ranks, by a name for the checkpoint.
            With LocalSGD: ``model=model, optimizer=optimizer``. Another number of ranks loads those
            of rank 0.
    """

    def __init__(self, source: Gatherable, *, dst: int | None = 0, **others: Any) -> None:
        self._source, self._dst, self._others = source, dst, others

    @property
    def exchange(self) -> Exchange:
        return self._source._gather_over

    def state_dict(self) -> State | None:
        """Return the states of all ranks on rank `dst`, and None on the others; a collective."""

        def own() -> State:
            others = {name: each.state_dict() for name, each in self._others.items()}
            return {**self._source.state_dict(), "others": others}

        return _gather(self._source, own, self._dst)

    def load_state_dict(self, state: State) -> None:
        """Restore this rank's part of :meth:`state_dict`, also with another number of ranks.

        Raises:
            CheckpointError: as :meth:`Gatherable.load_gathered`, or if the state has other names
                than `others`.
        """
        own = own_state(state, self.exchange.world_size, self._source._place)
        saved = own.get("others", {})
        checkpoint.dict_of(lambda value, where: None, self._others)(saved, "others")
        self._source.load_state_dict(own)
        for name, each in self._others.items():
            each.load_state_dict(saved[name])


def _gather(source: Gatherable, own: Callable[[], State], dst: int | None) -> State | None:
    def make() -> tuple[State, dict[str, Any]]:
        state = own()
        # "step" counts exchanges. Within a round of local steps, it stays the same.
        local = state.get("local_sgd", {}).get("step")
        # A view would be sent with its whole storage, a tensor on the GPU to the sender's device.
        copied = tree_map_only(Tensor, lambda x: x.detach().to("cpu", copy=True), state)
        return copied, {"step": state["step"], "local steps": local}

    exchange = source._gather_over
    # Inside build(), because an error on one rank alone would leave the others waiting.
    state = exchange.build("gather_state_dict", {"dst": dst}, make)
    states = exchange.gather_objects(state, dst)
    return gathered(states) if states and (dst is None or source._gathers) else None


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

    def state_dict(self) -> dict[str, bytes]:
        """Return the state of this rank under its name, as the bytes of a file of torch.save."""
        # Not as a dict: dcp.load would read only what this run has as well.
        file = BytesIO()
        torch.save(self._source.state_dict(), file)
        return {self._key: file.getvalue()}

    def load_state_dict(self, state: dict[str, bytes]) -> None:
        """Restore the state of this rank, or raise CheckpointError."""
        checkpoint.record(**{self._key: checkpoint.content})(state, "the state dict")
        self._source.load_state_dict(_opened(state[self._key]))

    def load(self, checkpoint_id: str | PathLike[str], key: str = "handle") -> None:
        """Restore the state from a checkpoint of any number of ranks, nodes, replicas and shards.

        If they are not those of this run, it reads the states of all ranks to the CPU, and converts
        them with :func:`torchcomp.redistribute`.

        Args:
            checkpoint_id: where ``dcp.save`` wrote the checkpoint: a folder.
            key: the name of this object in it.

        Raises:
            CheckpointError: if the checkpoint has no such state, or cannot be converted.
        """
        paths = (FileSystemReader(checkpoint_id).read_metadata().planner_data or {}).items()
        names = {str(path[1]): name for name, path in paths if len(path) > 1 and path[0] == key}
        if not names:
            raise CheckpointError(f"the checkpoint in {checkpoint_id} has no PerRank under {key!r}")

        def read(ranks: list[str]) -> list[State]:
            flat: dict[str, Any] = dict.fromkeys(names[rank] for rank in ranks)
            with warnings.catch_warnings():
                # On purpose: ranks can read different states.
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                load(flat, checkpoint_id=checkpoint_id, no_dist=True)
            return [_opened(content) for content in flat.values()]

        place, world_size = self._source._place, self._source._gather_over.world_size
        if len(names) == world_size and self._key in names:
            (own,) = read([self._key])
            if Place.of(own) == place:
                self._source.load_state_dict(own)
                return
        states = read(sorted(names, key=lambda rank: int(rank.removeprefix("rank"))))
        self._source.load_state_dict(own_state(gathered(states), world_size, place))


def _opened(content: bytes) -> State:
    try:
        state: State = torch.load(BytesIO(content), map_location="cpu", weights_only=True)
    # Damaged files end in errors of many types.
    except Exception as error:
        raise CheckpointError(f"a damaged checkpoint: it cannot be read ({error!r})") from None
    return state
