"""A stand-in of torchft's Manager, among threads. Ranks join, go and fail where a test chooses."""

import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.patience import PATIENCE

Fault = Callable[["Group", str], None]


class Cut(RuntimeError):
    """A collective that was cut off, as by a rank that died."""


class Board:
    """What the ranks of one quorum share."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._rounds: dict[int, dict[int, Any]] = {}
        self._changed, self._is_cut = threading.Condition(), False

    def cut(self) -> None:
        with self._changed:
            self._is_cut = True
            self._changed.notify_all()

    def share(self, call: int, rank: int, value: Any) -> list[Any]:
        """Return the values of all ranks in their call with this number."""
        with self._changed:
            values = self._rounds.setdefault(call, {})
            if not self._is_cut:
                values[rank] = value
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(values) == self._size or self._is_cut, PATIENCE)
            if len(values) < self._size:
                raise Cut("connection closed by peer")
            return [values[each] for each in range(self._size)]


class Group:
    """The process group of one rank in one quorum: a few collectives, in memory."""

    def __init__(self, board: Board, rank: int, manager: "Manager") -> None:
        self._board, self._rank, self.manager = board, rank, manager
        self.calls = self.of_step = 0
        self.cut = board.cut  # ends the connections of all ranks, as a rank that dies does

    def share(self, value: Any) -> list[Any]:
        self.calls += 1
        self.of_step += 1
        self.manager.fault(self, "send")
        values = self._board.share(self.calls, self._rank, value)
        self.manager.fault(self, "receive")
        return values

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        (values,) = tensors
        values.copy_(sum(self.share(values.clone())))
        return DONE

    def allgather_into_tensor_coalesced(
        self, received: list[Tensor], mine: list[Tensor], options: Any
    ) -> Any:
        received[0].copy_(torch.cat(self.share(mine[0].clone())))
        return DONE

    def alltoall_base(
        self, received: Tensor, outgoing: Tensor, arriving: list[int], sizes: list[int], _: Any
    ) -> Any:
        parts = self.share(torch.split(outgoing.clone(), sizes))
        mine = [sent[self._rank] for sent in parts]
        if [len(part) for part in mine] != list(arriving):
            raise Cut("the ranks run different collectives")
        received.copy_(torch.cat(mine))
        return DONE


DONE = SimpleNamespace(wait=lambda: True)


class Lighthouse:
    """Brings the ranks together that are to take part in a step."""

    def __init__(self, spans: Mapping[str, tuple[int, int]]) -> None:
        self._spans, self._changed = dict(spans), threading.Condition()
        self._waiting: dict[str, Manager] = {}
        self._formed: dict[str, SimpleNamespace] = {}
        self._members, self._quorum = list[str](), 0

    def gone(self, name: str) -> None:
        """Form the next quorum without this rank."""
        with self._changed:
            self._spans[name] = (0, 0)
            self._form()

    def quorum(self, manager: "Manager") -> SimpleNamespace:
        """Wait for the other ranks of this step."""
        with self._changed:
            self._waiting[manager.name] = manager
            self._form()
            formed = self._changed.wait_for(lambda: manager.name in self._formed, PATIENCE)
            assert formed, f"no quorum for {manager.name}"
            return self._formed.pop(manager.name)

    def _form(self) -> None:
        step = max((manager.current_step() for manager in self._waiting.values()), default=0)
        wanted = sorted(n for n, (first, end) in self._spans.items() if first <= step < end)
        if not wanted or not self._waiting.keys() >= set(wanted):
            return
        managers = [self._waiting[name] for name in wanted]
        if wanted != self._members or any(manager._commit_failures for manager in managers):
            self._quorum += 1
            self._members = wanted
        healthy = next(manager for manager in managers if manager.current_step() == step)
        healed = [m for m in managers if m.current_step() < step or (not step and m is not healthy)]
        state = healthy.saved() if healed else {}
        board = Board(len(wanted))
        for rank, manager in enumerate(managers):
            formed = SimpleNamespace(id=self._quorum, rank=rank, size=len(wanted), step=step)
            formed.board, formed.state = board, state if manager in healed else None
            self._formed[self._waiting.pop(manager.name).name] = formed
        self._changed.notify_all()


class Manager:
    """What torchcomp uses of torchft.Manager."""

    _use_async_quorum = False
    _replica_world_size_mode = SimpleNamespace(name="DYNAMIC")
    _group_world_size = 1

    def __init__(
        self, lighthouse: Lighthouse, name: str, fault: Fault = lambda group, point: None
    ) -> None:
        self.name, self.fault = name, fault
        self._lighthouse = lighthouse
        self._functions: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}
        self._quorum_id, self._commit_failures, self._step = -1, 0, 0
        self._pg: Any = None
        self._error: Exception | None = None
        self._rank = self._size = 0

    # Called by torchcomp.
    def register_state_dict_fn(
        self, key: str, load: Callable[[Any], None], save: Callable[[], Any]
    ) -> None:
        assert key not in self._functions
        self._functions[key] = load, save

    def wait_quorum(self) -> None: ...

    def errored(self) -> Exception | None:
        return self._error

    def report_error(self, error: Exception) -> None:
        self._error = error

    def current_step(self) -> int:
        return self._step

    def participating_rank(self) -> int:
        return self._rank

    def num_participants(self) -> int:
        return self._size

    # Called by the training loop.
    def start_quorum(self) -> None:
        if self._error is not None:
            self._pg.cut()  # torchft does so when it configures the group for the next quorum
        self._error = None
        quorum = self._lighthouse.quorum(self)
        self._rank, self._size = quorum.rank, quorum.size
        if quorum.id != self._quorum_id:
            self._quorum_id = quorum.id
            self._pg = Group(quorum.board, quorum.rank, self)
        self._pg.of_step = 0
        self._step = quorum.step
        for key, (load, _) in self._functions.items() if quorum.state is not None else ():
            load(quorum.state[key])

    def should_commit(self, vote: bool = True) -> bool:
        commits = vote and self._error is None
        self._step += commits
        self._commit_failures = 0 if commits else self._commit_failures + 1
        return commits

    def shutdown(self) -> None:
        # DDP's hook, in C++, knows the manager: the garbage collector does not see this cycle.
        self._functions.clear()

    def saved(self) -> dict[str, Any]:
        return {key: save() for key, (_, save) in self._functions.items()}


def alone() -> dist.ProcessGroup:
    """Return a process group of this rank alone, for DDP, as torchft's ProcessGroupDummy."""
    store = dist.HashStore()
    group, gloo = dist.ProcessGroup(store, 0, 1), dist.ProcessGroupGloo(store, 0, 1)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group
