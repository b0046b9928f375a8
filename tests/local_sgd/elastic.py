"""A script for torchrun: it saves after every synchronisation and resumes from the latest save.

Arguments: the folder of checkpoints, and the step in which rank 1 is killed (0: never).
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.local_sgd.script import batch, constant, loss_of, mlp, momentum
from tests.support.models import seeded
from tests.support.outcomes import flat

TOTAL, SPEC = 18, "every(3)"


def main(folder: Path, fatal: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(seeded(mlp()))
    optimizer = momentum(model.parameters(), lr=constant(0))
    with torchcomp.LocalSGD(model, optimizer, SPEC, total_steps=TOTAL) as sync:
        load_latest(folder, model, optimizer, sync)
        for step in range(sync.stats.steps, TOTAL):
            optimizer.zero_grad()
            loss_of(model, *batch(rank, step)).backward()
            if (rank, step + 1) == (1, fatal):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            if sync.next_sync is None:
                save(folder / f"{step + 1}", model, optimizer, sync)
    dist.barrier()
    del model, optimizer, sync
    dist.destroy_process_group()


def save(folder, model, optimizer, sync):
    folder.mkdir(parents=True, exist_ok=True)
    saved = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "sync": sync.state_dict(),
        "weights": flat(model.parameters()),
    }
    torch.save(saved, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "complete").touch()
    dist.barrier()


def load_latest(folder, model, optimizer, sync):
    complete = [int(path.parent.name) for path in folder.glob("*/complete")]
    if not complete:
        return
    rank, world_size = dist.get_rank(), dist.get_world_size()
    paths = sorted((folder / f"{max(complete)}").glob("*.pt"))
    saved = [torch.load(path, weights_only=True) for path in paths]
    states = torchcomp.redistribute([each["sync"] for each in saved], world_size)
    mine = saved[rank % len(saved)]
    model.module.load_state_dict(mine["model"])
    optimizer.load_state_dict(mine["optimizer"])
    sync.load_state_dict(states[rank])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
