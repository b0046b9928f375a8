"""Train with any number of ranks, which can change whenever torchrun restarts them.

    torchrun --nnodes 2:4 --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m recipes.elastic.train --compress "ef(topk(0.01))"

Every rank saves its own state. A run with the same number of ranks continues bit for bit. A run
with another number divides the residuals again, in :meth:`Run.resized`, and loses nothing.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import torchcomp
from recipes.checkpoints import Checkpoints
from recipes.distributed import cleanup_distributed, env_world_size, init_process_group
from recipes.elastic.account import Account, mean
from recipes.elastic.settings import Settings, read_settings
from recipes.elastic.task import Samples, lr_factor, student
from recipes.errors import TORCHCOMP_ERRORS, RecipeError, exit_on_user_error
from recipes.log_file import LogFile
from recipes.result_files import make_folder

State = dict[str, Any]


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
    """One rank's training run.

    Args:
        settings: of the run. The default process group must exist.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings, self.step = settings, 0
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.samples = Samples(settings.seed, settings.batch)
        self.model = DistributedDataParallel(student(settings.seed))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=settings.lr)
        self.scheduler = LambdaLR(self.optimizer, lambda step: lr_factor(step, settings.steps))
        self.method = attach_torchcomp(self.model, self.optimizer, settings)
        self.account = Account(self.model.module, self.optimizer)
        folder = Path(settings.out)
        self.checkpoints = Checkpoints(folder / "checkpoints", self.rank, self.world_size)
        if self.checkpoints.newest() is not None:
            self.load(self.checkpoints.load(settings.to_match, self.resized))
        self.log = Log(folder, self)

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
            self.log.after_step(self.step)
            due |= self.step % self.settings.checkpoint_every == 0
            if (due or self.step == self.settings.steps) and self.replicas_are_equal():
                self.save()
                due = False
        self.print(f"step {self.step} is saved: the run in {self.settings.out} is complete")

    def backward(self) -> None:
        """Run the backward pass of a step."""
        inputs, targets = self.samples.share(self.step, self.rank, self.world_size)
        cross_entropy(self.model(inputs), targets).backward()

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
        """Print a line, on rank 0."""
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
            "account": self.account.state_dict(),
        }

    def resized(self, states: list[State]) -> State:
        """Return the state of this rank, from those of another number of ranks."""
        # The mean residual, and new shards of the server residual.
        methods = [state["method"] for state in states]
        (method,) = torchcomp.redistribute(methods, self.world_size, rank=self.rank)
        account = mean([state["account"] for state in states])
        # All else is equal on all ranks.
        return {**states[0], "method": method, "account": account}

    def load(self, state: State) -> None:
        """Continue from a state."""
        if self.settings.sync == "none":
            # DDP groups parameters anew after its first backward pass. To continue bit for bit, do
            # that before the state is loaded.
            self.backward()
            self.optimizer.zero_grad()
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.method.load_state_dict(state["method"])
        self.account.load(state["account"])
        self.step = state["step"]


def attach_torchcomp(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, settings: Settings
) -> torchcomp.Handle | torchcomp.LocalSGD:
    """Attach the method of ``--sync`` or ``--compress`` to ``model``."""
    if settings.sync == "none":
        # With lr inside the residual, the law of conservation has the learning rate of each step.
        return torchcomp.register(model, settings.compress, lr_inside=optimizer)
    return torchcomp.LocalSGD(
        model,
        optimizer,
        settings.sync,
        total_steps=settings.steps,
        compress=settings.compress,
        outer=None if settings.outer == "none" else settings.outer,
    )


class Log:
    """What happened: ``starts.jsonl`` has a line per started rank, and ``steps.csv`` one per step.

    Args:
        folder: of the run.
        run: it begins now.
    """

    def __init__(self, folder: Path, run: Run) -> None:
        make_folder(folder)
        start = {"rank": run.rank, "ranks": run.world_size, "pid": os.getpid(), "step": run.step}
        LogFile(folder / "starts.jsonl").write(json.dumps(start))
        self._steps = LogFile(folder / "steps.csv") if run.rank == 0 else None

    def after_step(self, step: int) -> None:
        """Write a line, on rank 0."""
        if self._steps is not None:
            self._steps.write(f"{os.getpid()},{step}")


if __name__ == "__main__":
    main()
