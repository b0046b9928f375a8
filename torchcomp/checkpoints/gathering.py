"""Gathering: the state dicts of all ranks as one, for checkpoints that a single rank writes."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from torchcomp.checkpoints import checkpoint
from torchcomp.checkpoints.redistribution import Place, gathered, own_state
from torchcomp.exchange import Exchange
from torchcomp.specs.errors import CheckpointError

State = dict[str, Any]


class Stateful(Protocol):
    """An object with a state dict, such as a model or an optimizer."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class Gatherable(ABC):
    """An object that has another state on each rank, such as a residual."""

    @property
    @abstractmethod
    def _gather_over(self) -> Exchange:
        """The ranks whose states belong together."""

    @property
    def _place(self) -> Place:
        """Where this rank is."""
        return Place.in_order(self._gather_over.rank)

    @property
    def _gathers(self) -> bool:
        """Whether this rank can be the one that gets the result."""
        return True

    @abstractmethod
    def state_dict(self) -> State:
        """Return the state of this rank."""

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Restore the state of this rank."""

    def gather_state_dict(self, dst: int | None = 0) -> State | None:
        """Return the states of all ranks as one state dict. Call this on all ranks.

        It contains a :meth:`state_dict` per rank, on the CPU, and loads with
        ``torch.load(..., weights_only=True)``. Rank `dst` needs memory for the states of all ranks.

        Args:
            dst: the rank that gets the result; the others get None. With None, every rank gets it.

        Raises:
            RankMismatchError: if the ranks are at different steps, or only some ranks fail.
            Exception: as :meth:`state_dict`, on every rank.
        """
        return _gather(self, self.state_dict, dst)

    def load_gathered(self, state: State) -> None:
        """Restore this rank's part of the result of :meth:`gather_state_dict`.

        Pass the same `state` on every rank. If it was saved by another number of ranks, it is
        converted with :func:`torchcomp.redistribute`. On error, nothing changes.

        Raises:
            CheckpointError: if the state is not a gathered one, and as :meth:`load_state_dict`.
        """
        self.load_state_dict(own_state(state, self._gather_over.world_size, self._place))


class Gathered:
    """State dicts that gather, for frameworks that call ``state_dict()`` on all ranks.

    Lightning Fabric and Accelerate do, and then write the result of rank 0. Pass this object in
    place of the handle: ``accelerator.register_for_checkpointing(torchcomp.Gathered(handle))``.

    With :class:`torchcomp.LocalSGD`, the optimizer's moments differ between ranks, and inside a
    round the weights do as well. A framework saves those of rank 0. Name both here to save those of
    every rank: ``torchcomp.Gathered(sync, model=model, optimizer=optimizer)``. They are loaded by a
    run with the same number of ranks. A run with another number loads rank 0's on every rank.

    Args:
        source: a handle of :func:`torchcomp.register`, a LocalSGD or a JointSpar.
        dst: the rank that writes, or None if a rank of every node does.
        others: further objects whose state differs between ranks, by a name for the checkpoint.
    """

    def __init__(self, source: Gatherable, *, dst: int | None = 0, **others: Stateful) -> None:
        self._source = source
        self._dst = dst
        self._others = others

    @property
    def exchange(self) -> Exchange:
        """The ranks whose states are gathered."""
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
                than `others`. The state of `source` is loaded first, and the others only if that
                succeeds.
        """
        own = own_state(state, self.exchange.world_size, self._source._place)
        saved = own.get("others", {})
        checkpoint.dict_of(lambda value, where: None)(saved, "others")
        if saved.keys() != self._others.keys():
            there, here = (checkpoint.listed(sorted(each)) for each in (saved, self._others))
            raise CheckpointError(
                f"the checkpoint has {there or 'no other objects'} beside the state of torchcomp, "
                f"but this Gathered was made with {here or 'no other objects'}: name the same "
                "objects as in the run that saved it"
            )
        self._source.load_state_dict(own)
        for name, each in self._others.items():
            each.load_state_dict(saved[name])


def _gather(source: Gatherable, own: Callable[[], State], dst: int | None) -> State | None:
    """Return every rank's `own()` as one state dict; see :meth:`Gatherable.gather_state_dict`."""

    def make() -> tuple[State, dict[str, Any]]:
        state = own()
        # "step" counts exchanges. Within a round of local steps, it stays the same.
        local = state.get("local_sgd", {}).get("step")
        return _on_cpu(state), {"step": state["step"], "local steps": local}

    exchange = source._gather_over
    # Inside build(), because an error on one rank alone would leave the others waiting.
    state = exchange.build("gather_state_dict", {"dst": dst}, make)
    states = exchange.gather_objects(state, dst)
    return gathered(states) if states and (dst is None or source._gathers) else None


def _on_cpu(value: Any) -> Any:
    """Return a copy of a state dict without views and tensors on devices.

    A view would be sent with its whole storage, and a tensor on the GPU to the sender's device.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_cpu(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_on_cpu, value))
    return value
