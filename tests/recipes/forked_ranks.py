"""Runs of recipes/train.py whose ranks are forked from one process that has imported it already.

A run starts in milliseconds, where torchrun's ranks each import torch for three seconds. What is
not the same: a rank ends without Python's own tear-down, so tests of that use torchrun.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.support.patience import PATIENCE

RECIPES = Path(__file__).parents[2] / "recipes"


@dataclass(frozen=True)
class Run:
    """The ranks of a run, the store that they meet at, and the file of what they print."""

    ranks: list[BaseProcess]
    store: TCPStore
    printed: Path

    def is_alive(self) -> bool:
        return all(rank.is_alive() for rank in self.ranks)

    def kill(self) -> None:
        """End every rank without notice."""
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.join(PATIENCE)

    def finish(self) -> str:
        """Wait for a run that must succeed; return what it printed."""
        deadline = time.monotonic() + PATIENCE
        for rank in self.ranks:
            rank.join(deadline - time.monotonic())
        said = self.printed.read_text()
        assert [rank.exitcode for rank in self.ranks] == [0] * len(self.ranks), said
        return said


class Launcher:
    """Starts runs, and ends what it started."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._started = folder, list[Run]()
        with _environment_of_the_server():
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload([__name__, "recipes.train", "sklearn.datasets"])
            forkserver.ensure_running()

    def start(self, *flags: str, ranks: int = 2) -> Run:
        """Start a run and return at once."""
        printed = self._folder / f"printed-{len(self._started)}"
        # Held here, as torchrun does: a port that is free now may be taken when rank 0 comes to it.
        store = TCPStore("127.0.0.1", port=0, is_master=True, wait_for_workers=False)
        processes = [
            self._context.Process(target=_rank_main, args=(flags, rank, ranks, store.port, printed))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        self._started.append(Run(processes, store, printed))
        return self._started[-1]

    def close(self) -> None:
        """End whatever still runs."""
        for run in self._started:
            run.kill()


@contextmanager
def _environment_of_the_server() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(RECIPES.parent))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("OMP_WAIT_POLICY", "passive")
        yield


def _rank_main(flags: tuple[str, ...], rank: int, ranks: int, port: int, printed: Path) -> None:
    """What a rank does: torchrun's environment, and then the script."""
    from recipes import train

    file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(True)
    # Not the fork server, which this process has inherited as the way to start its own.
    multiprocessing.set_start_method("fork", force=True)
    sys.argv = [str(RECIPES / "train.py"), *flags]
    train.main()
