"""Run recipes/train.py on ranks that are forked from a process that has already imported it.

A run starts in milliseconds. With torchrun, each rank imports torch, for three seconds. A forked
rank exits without Python's shutdown, so tests of the shutdown use torchrun.
"""

import multiprocessing
import os
import sys
import time
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
class ForkedRun:
    """The processes of a run, the store for their rendezvous, and the file with their output."""

    ranks: list[BaseProcess]
    store: TCPStore
    printed: Path

    def is_alive(self):
        return all(rank.is_alive() for rank in self.ranks)

    def kill(self):
        """Kill all ranks with SIGKILL."""
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.join(PATIENCE)

    def exit_codes(self):
        """Wait for the run, and return the exit codes of its ranks."""
        deadline = time.monotonic() + PATIENCE
        for rank in self.ranks:
            rank.join(deadline - time.monotonic())
        return [rank.exitcode for rank in self.ranks]

    def finish(self):
        """Wait for the run, require that it succeeds, and return its output."""
        codes, output = self.exit_codes(), self.printed.read_text()
        assert codes == [0] * len(self.ranks), output
        return output


class Launcher:
    """Starts runs, and kills those that have not ended."""

    def __init__(self, folder):
        self._folder, self._started = folder, list[ForkedRun]()
        with _server_environment():
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload([__name__, "recipes.train", "sklearn.datasets"])
            forkserver.ensure_running()

    def start(self, *flags, ranks=2):
        """Start a run and return at once."""
        printed = self._folder / f"printed-{len(self._started)}"
        # Created here, as torchrun does. If rank 0 created it, another process could take the port
        # between now and then.
        store = TCPStore("127.0.0.1", port=0, is_master=True, wait_for_workers=False)
        processes = [
            self._context.Process(target=_rank_main, args=(flags, rank, ranks, store.port, printed))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        self._started.append(ForkedRun(processes, store, printed))
        return self._started[-1]

    def close(self):
        """Kill the runs that have not ended."""
        for run in self._started:
            run.kill()


@contextmanager
def _server_environment():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(RECIPES.parent))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("OMP_WAIT_POLICY", "passive")
        yield


def _rank_main(flags, rank, ranks, port, printed):
    """Set torchrun's environment variables and call the script."""
    from recipes import train

    file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(True)
    # DataLoader starts its workers with the default method. This process has inherited the fork
    # server's, which cannot be used from here.
    multiprocessing.set_start_method("fork", force=True)
    sys.argv = [str(RECIPES / "train.py"), *flags]
    train.main()
