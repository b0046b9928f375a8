"""Train with any number of ranks, which can change whenever torchrun restarts them.

    torchrun --nnodes 2:4 --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m recipes.elastic.train --compress "ef(topk(0.01))"

A small network learns the answers of another one. Every rank saves its own state. The same number
of ranks continues bit for bit; another number divides the residuals again and loses nothing.
"""

import gc
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import torchcomp
from recipes.checkpoints import Checkpoints
from recipes.distributed import cleanup_distributed, env_world_size, init_process_group
from recipes.errors import TORCHCOMP_ERRORS, RecipeError, exit_on_user_error
from recipes.image_data.order import keyed_seed
from recipes.options import as_plain_dict, check_batch, check_limits, option, read_options
from torchcomp.specs.spec import parse_aggregator, parse_outer_step, parse_schedule

State = dict[str, Any]
_INPUTS, _HIDDEN, _CLASSES = 32, 128, 10
# What is drawn, as a part of the seed.
_STUDENT, _TEACHER, _BATCH = range(3)
# The number of ranks is not a setting: it can change. These do not affect the result.
_FREE = {"out", "checkpoint_every", "timeout"}


@dataclass(frozen=True)
class Settings:
    compress: str = option("ef(topk(0.01))", "how gradients or pseudo-gradients are averaged")
    sync: str = option("none", 'local steps, such as "every(8)"; none averages gradients')
    outer: str = option("none", 'the outer step of local steps, such as "nesterov()"')
    steps: int = option(2000, "optimizer steps", min=1)
    batch: int = option(60, "samples per step, of all ranks together", min=1)
    lr: float = option(0.2, "learning rate of SGD at the first step; it falls to 0", above=0)
    seed: int = option(0, "of weights and batches", min=0)
    checkpoint_every: int = option(50, "steps between two checkpoints", min=1)
    timeout: int = option(
        0,
        "seconds that a rank waits for another one, before all restart (0: PyTorch's, 1800)",
        min=0,
    )
    out: str = option("runs/elastic", "folder of the checkpoints")

    @property
    def to_match(self) -> State:
        """What a resumed run must keep."""
        return {name: value for name, value in as_plain_dict(self).items() if name not in _FREE}


def read_settings(argv: list[str], world_size: int) -> Settings:
    settings = read_options(Settings, argv)
    check_limits(settings)
    parse_aggregator(settings.compress)
    if settings.sync != "none":
        parse_schedule(settings.sync)
    if settings.outer != "none":
        parse_outer_step(settings.outer)
        if settings.sync == "none":
            raise RecipeError(f"--outer {settings.outer} needs local steps: add --sync")
    check_batch(settings.batch, world_size)
    return settings


@exit_on_user_error(*TORCHCOMP_ERRORS)
def main() -> None:
    """Train to the last step, from the newest checkpoint if there is one."""
    settings = read_settings(sys.argv[1:], env_world_size())
    torch.set_num_threads(1)
    init_process_group("gloo", settings.timeout)
    run = Run(settings)
    run.train()
    run.method.close()
    # DDP uses the process group until it is deleted, and reference cycles keep it alive.
    del run
    gc.collect()
    cleanup_distributed()


class Run:
    """One rank's training run. The default process group must exist."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.step = settings, 0
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.teacher = _network(_TEACHER, settings.seed).requires_grad_(False)
        self.model = DistributedDataParallel(_network(_STUDENT, settings.seed))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=settings.lr)
        # Half a cosine, down to 0.
        self.scheduler = LambdaLR(
            self.optimizer, lambda step: (1 + math.cos(math.pi * step / settings.steps)) / 2
        )
        self.method = attach_torchcomp(self.model, self.optimizer, settings)
        folder = Path(settings.out) / "checkpoints"
        self.checkpoints = Checkpoints(folder, self.rank, self.world_size)
        if self.checkpoints.newest() is not None:
            self.load(self.checkpoints.load(settings.to_match, self.resized))

    def train(self) -> None:
        """Take the remaining steps, and save the last one."""
        self.print(f"{self.world_size} ranks, from step {self.step} of {self.settings.steps}")
        due = False
        while self.step < self.settings.steps:
            self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1
            due |= self.step % self.settings.checkpoint_every == 0
            if (due or self.step == self.settings.steps) and self.replicas_are_equal():
                self.save()
                due = False
        self.print(f"step {self.step} is saved: the run in {self.settings.out} is complete")

    def backward(self) -> None:
        """Run the backward pass of a step, on this rank's share of its batch."""
        # The batch depends on the seed and the step alone, not on the number of ranks.
        draw = torch.Generator().manual_seed(keyed_seed(_BATCH, self.settings.seed, self.step))
        shape = (self.settings.batch, _INPUTS)
        inputs = torch.randn(shape, generator=draw, dtype=torch.float64)
        inputs = inputs[self.rank :: self.world_size]
        cross_entropy(self.model(inputs), self.teacher(inputs).argmax(1)).backward()

    def replicas_are_equal(self) -> bool:
        """Whether another number of ranks can continue here: not inside a round of local steps."""
        return not isinstance(self.method, torchcomp.LocalSGD) or self.method.next_sync is None

    def save(self) -> None:
        """Save a checkpoint. If a disk is full, the run goes on without it."""
        problem = self.checkpoints.save(self.step, self.state_dict(), self.settings.to_match)
        if problem is None:
            return
        if self.step == self.settings.steps:
            raise RecipeError(
                f"the last step, {self.step}, was not saved ({problem}). Solve that, and start "
                "the same command again: it continues from the checkpoint before"
            )
        self.print(f"step {self.step} was not saved ({problem})")

    def print(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)

    def state_dict(self) -> State:
        """Return everything on this rank that the rest of the run depends on."""
        return {
            "step": self.step,
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "method": self.method.state_dict(),
        }

    def resized(self, states: list[State]) -> State:
        """Return the state of this rank, from those of another number of ranks."""
        # The mean residual, and new shards of the server residual. All else is equal on all ranks.
        methods = [state["method"] for state in states]
        (method,) = torchcomp.redistribute(methods, self.world_size, rank=self.rank)
        return {**states[0], "method": method}

    def load(self, state: State) -> None:
        if self.settings.sync == "none":
            # DDP groups parameters anew after its first backward pass. To continue bit for bit, do
            # that before the state is loaded.
            self.backward()
            self.optimizer.zero_grad()
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.method.load_state_dict(state["method"])
        self.step = state["step"]


def attach_torchcomp(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, settings: Settings
) -> torchcomp.Handle | torchcomp.LocalSGD:
    """Attach the method of ``--sync`` or ``--compress`` to ``model``."""
    if settings.sync == "none":
        return torchcomp.register(model, settings.compress, lr_inside=optimizer)
    return torchcomp.LocalSGD(
        model,
        optimizer,
        settings.sync,
        total_steps=settings.steps,
        compress=settings.compress,
        outer=None if settings.outer == "none" else settings.outer,
    )


def _network(part: int, seed: int) -> nn.Module:
    # float64, so that nothing but rounding hides a lost gradient.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed_seed(part, seed))
        layers = nn.Linear(_INPUTS, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, _CLASSES)
        return nn.Sequential(*layers).double()


if __name__ == "__main__":
    main()
