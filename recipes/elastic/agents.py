"""Agents of torchrun on this machine, each of which stands for a node with one rank."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from recipes.errors import RecipeError

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # Otherwise ranks look for the store of a node that may be gone: see docs/elastic.md.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
_RENDEZVOUS = {
    # The store is in this process, so any agent can die.
    "is_host": 0,
    # Seconds to wait for more nodes than the minimum.
    "last_call_timeout": 1,
    # A node is lost after this many seconds, times this many.
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 3,
}
PATIENCE = 120
"""Seconds to wait for a process that makes no progress."""


class Agents:
    """The agents of a run, and what its ranks have logged.

    Used as a context manager, it ends all processes that it has started.

    Args:
        folder: of the run.
        nodes: smallest and largest number of nodes.
        flags: of the script.
        module: the script.

    Attributes:
        alive: the agents that were not killed.
    """

    def __init__(
        self,
        folder: Path,
        nodes: tuple[int, int],
        flags: Sequence[str],
        module: str = "recipes.elastic.train",
    ) -> None:
        self._folder, self._count, self._over = folder, 0, set[int]()
        self.alive: list[subprocess.Popen[bytes]] = []
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        settings = ",".join(f"{name}={value}" for name, value in _RENDEZVOUS.items())
        self._command = [sys.executable, "-m", "torch.distributed.run"]
        self._command += ["--nnodes", f"{nodes[0]}:{nodes[1]}", "--max-restarts", "1000"]
        self._command += ["--monitor-interval", "0.1", "--rdzv-backend", "c10d"]
        self._command += ["--rdzv-endpoint", f"127.0.0.1:{self._store.port}"]
        self._command += ["--rdzv-conf", settings, "--rdzv-id", "elastic"]
        self._command += ["--local-addr", "127.0.0.1", "-m", module]
        self._command += ["--out", str(folder), *flags]
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "Agents":
        return self

    def __exit__(self, *error: object) -> None:
        while self.alive:
            self.kill_node(self.alive[0])

    def start(self, count: int = 1) -> None:
        """Start agents, each of which starts a rank."""
        for _ in range(count):
            with (self._folder / f"agent-{self._count}.txt").open("wb") as output:
                process = subprocess.Popen(
                    self._command,
                    env=os.environ | _ENVIRONMENT,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            self.alive.append(process)
            self._count += 1

    def kill_node(self, agent: "subprocess.Popen[bytes]") -> None:
        """Kill an agent and its rank with SIGKILL."""
        ranks = _children(agent.pid)
        for pid in (agent.pid, *ranks):
            self.kill(pid)
        agent.wait()
        self.alive.remove(agent)

    def kill(self, pid: int) -> None:
        """Kill a process with SIGKILL, if there still is one."""
        # What these have logged is over.
        self._over |= {process for process, _ in self.steps()}
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def process_of(self, rank: int) -> int:
        """Return the process of a rank of the newest start."""
        found: list[int] = [start["pid"] for start in self.starts() if start["rank"] == rank]
        return found[-1]

    def starts(self) -> list[dict[str, int]]:
        """Return the lines of ``starts.jsonl``."""
        return [json.loads(line) for line in _lines(self._folder / "starts.jsonl")]

    def steps(self) -> list[tuple[int, int]]:
        """Return the process of rank 0 and the step, for all steps that were taken."""
        pairs = (line.split(",") for line in _lines(self._folder / "steps.csv"))
        return [(int(pid), int(step)) for pid, step in pairs]

    def wait_for_step(self, step: int) -> None:
        """Wait until a process that was started after the last kill has taken a step."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and all(each.poll() is None for each in self.alive):
            pid, newest = [(0, 0), *self.steps()][-1]
            if newest >= step and pid not in self._over:
                return
            time.sleep(0.01)
        raise RecipeError(f"the run did not reach step {step}; {self._last_words()}")

    def finish(self) -> None:
        """Wait until the run is complete."""
        with suppress(subprocess.TimeoutExpired):
            if not any(agent.wait(PATIENCE) for agent in self.alive):
                return
        raise RecipeError(f"the run did not finish; {self._last_words()}")

    def _last_words(self) -> str:
        newest = max(self._folder.glob("agent-*.txt"), key=lambda path: path.stat().st_mtime)
        return f"the end of {newest}:\n{newest.read_text()[-2000:]}"


def _children(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text().split()]


def _lines(path: Path) -> list[str]:
    # What follows the last line break is still being written.
    return path.read_text().split("\n")[:-1] if path.exists() else []
