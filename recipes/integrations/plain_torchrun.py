"""A whole script for torchrun: train, evaluate, save, and resume where it was interrupted.

    torchrun --nproc-per-node 2 -m recipes.integrations.plain_torchrun --compress "ef(topk(0.01))"
    torchrun --nproc-per-node 2 -m recipes.integrations.plain_torchrun --sync "every(4)"

Run the same command again to go on from the last checkpoint. Every rank writes its own file, since
every rank has its own residual and, inside a round of local steps, its own weights.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchcomp

STEPS = 100


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mini-batch that depends on step and rank only, so that a resumed run gets it too."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(32, 64, generator=generator)
    return inputs, inputs[:, :10].argmax(1)


def train(arguments: argparse.Namespace) -> float:
    """Train until the last step, and return the accuracy on new data."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    engine: torchcomp.Handle | torchcomp.LocalSGD
    if arguments.sync:
        engine = torchcomp.LocalSGD(model, optimizer, arguments.sync, total_steps=STEPS)
    else:
        engine = torchcomp.register(model, arguments.compress)

    parts = {"model": model.module, "optimizer": optimizer, "torchcomp": engine}
    file = Path(arguments.out, f"rank{dist.get_rank()}.pt")
    step = 0
    if file.exists():
        saved = torch.load(file, weights_only=True)
        step = saved["step"]
        # After DistributedDataParallel(...), which copies rank 0's weights to all ranks.
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    while step < min(STEPS, arguments.stop):
        inputs, labels = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        step += 1
        if step % 25 == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**states, "step": step}, file)
    if dist.get_rank() == 0:
        print(engine.stats)
    inputs, labels = batch(STEPS)
    with torch.no_grad():
        return (model(inputs).argmax(1) == labels).float().mean().item()


def main() -> None:
    """Join the process group, train, and leave it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    method = parser.add_mutually_exclusive_group()
    method.add_argument("--compress", default="ef(topk(0.01))", help="a method [ef(topk(0.01))]")
    method.add_argument("--sync", help="a schedule, in place of a method")
    parser.add_argument("--out", default="runs/plain_torchrun", help="folder of the checkpoints")
    parser.add_argument("--stop", type=int, default=STEPS, help="end here, to try resuming")
    arguments = parser.parse_args()
    Path(arguments.out).mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: accuracy {train(arguments):.2f}")
    # The DDP model is gone by now. Without the barrier, gloo sometimes aborts a rank here.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
