"""A plan of faults for a run, drawn from a seed, and what each of them does."""

import os
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from recipes.elastic.agents import PATIENCE, Agents
from recipes.errors import RecipeError

KINDS = {
    "rank": "SIGKILL of a rank",
    "node": "SIGKILL of an agent and its rank",
    "write": "SIGKILL of a rank that has written the first bytes of its checkpoint",
    "disk": "a full disk where a rank writes its checkpoint, then SIGKILL of another rank",
}
_FIRST_BYTES = 20_000
# Steps after the last fault, which can wait for the checkpoint after the next one.
_SPARE = 200


@dataclass(frozen=True)
class Fault:
    """A fault of a run.

    Attributes:
        kind: one of :data:`KINDS`.
        step: the first step after which it happens.
        nodes: number of nodes from then on.
    """

    kind: str
    step: int
    nodes: int


def plan(kills: int, steps: int, nodes: Sequence[int], seed: int) -> list[Fault]:
    """Draw the faults of a run, of which each is one SIGKILL."""
    draw = random.Random(seed)
    at = sorted(draw.sample(range(steps // 100, steps - _SPARE), kills))
    kinds = [*KINDS][:kills] + draw.choices(["rank", "node"], k=max(0, kills - len(KINDS)))
    draw.shuffle(kinds)
    return [Fault(kind, step, draw.choice(nodes)) for kind, step in zip(kinds, at, strict=True)]


class Saboteur:
    """Carries out faults.

    Args:
        agents: of the run.
        folder: of the run.
        every: steps between two checkpoints.
        seed: of the choice of ranks.
    """

    def __init__(self, agents: Agents, folder: Path, every: int, seed: int) -> None:
        self._agents, self._every, self._draw = agents, every, random.Random(seed)
        self._checkpoints = folder / "checkpoints"

    def strike(self, fault: Fault) -> None:
        """Wait for the fault's step, kill, and start or end nodes until there are ``nodes``."""
        agents = self._agents
        agents.wait_for_step(fault.step)
        # At any moment of a step, or between two.
        time.sleep(self._draw.uniform(0, 0.02))
        kinds = {"rank": self._rank, "node": self._node, "write": self._write, "disk": self._disk}
        kinds[fault.kind]()
        while len(agents.alive) > fault.nodes:
            self._node()
        agents.start(fault.nodes - len(agents.alive))

    def _rank(self) -> None:
        self._agents.kill(self._agents.process_of(self._any_rank()))

    def _node(self) -> None:
        self._agents.kill_node(self._draw.choice(self._agents.alive))

    def _write(self) -> None:
        """Let a rank write into a pipe, which takes only a part of its file, and kill it."""
        rank = self._any_rank()
        path, _ = self._next_file(rank)
        os.mkfifo(path)
        pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        written = _read(pipe, _FIRST_BYTES)
        self._agents.kill(self._agents.process_of(rank))
        os.close(pipe)
        # What a kill leaves of an ordinary file.
        path.unlink()
        path.write_bytes(written)

    def _disk(self) -> None:
        """Let a rank write to a device that is always full, and kill a rank some steps later."""
        path, step = self._next_file(self._any_rank())
        path.symlink_to("/dev/full")
        self._agents.wait_for_step(step + self._every // 4)
        if path.is_symlink() or (path.parent / "complete.json").exists():
            raise RecipeError(f"the full disk did not prevent the checkpoint in {path.parent}")
        self._rank()

    def _any_rank(self) -> int:
        return self._draw.randrange(self._agents.starts()[-1]["ranks"])

    def _next_file(self, rank: int) -> tuple[Path, int]:
        """Return the unfinished file of a rank at a coming checkpoint, and its step."""
        _, newest = self._agents.steps()[-1]
        # Not the next one: it can already be in progress.
        step = (newest // self._every + 2) * self._every
        folder = self._checkpoints / f"step-{step:09d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f".rank-{rank}.pt", step


def _read(pipe: int, count: int) -> bytes:
    """Read at least `count` bytes from a pipe that another process will open."""
    deadline = time.monotonic() + PATIENCE
    found = b""
    while len(found) < count and time.monotonic() < deadline:
        time.sleep(0.005)
        with suppress(BlockingIOError):
            found += os.read(pipe, count)
    if len(found) < count:
        raise RecipeError("no rank has begun to write the checkpoint with the pipe")
    return found
