"""The idioms of timm's script, on noise.

A task object owns the DDP model, an EMA is a deepcopy, gradients accumulate under ``no_sync`` with
a shorter last update, the learning rate changes at every update, and rank 0 has a saver.
"""

import argparse
import copy
import os
from contextlib import nullcontext

import torch
import torch.nn as nn
import utils

BATCHES, ACCUMULATED, UPDATES = 8, 3, 3  # of an epoch, of an update, of an epoch


class Task:
    """Owns the model, its DDP wrapper and its EMA."""

    def __init__(self, model):
        self.trainable_module, self.ema = model, copy.deepcopy(model)

    def prepare_distributed(self, **options):
        self.trainable_module = nn.parallel.DistributedDataParallel(
            self.trainable_module, **options
        )

    def get_trainable_module(self):
        return self.trainable_module

    @torch.no_grad()
    def update_ema(self):
        new = utils.unwrap_model(self.trainable_module).state_dict()
        for name, value in self.ema.state_dict().items():
            value.lerp_(new[name], 0.1) if value.is_floating_point() else value.copy_(new[name])


def train_one_epoch(epoch, task, optimizer, args):
    model = task.get_trainable_module()
    for index in range(BATCHES):
        noise = torch.Generator().manual_seed(1000 * args.rank + BATCHES * epoch + index)
        need_update = index == BATCHES - 1 or (index + 1) % ACCUMULATED == 0
        with nullcontext() if need_update else model.no_sync():
            loss = model(torch.randn(4, 3, 6, 6, generator=noise)).square().mean()
            (loss / ACCUMULATED).backward()
        if need_update:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + epoch * UPDATES + index // ACCUMULATED)
            optimizer.step()
            optimizer.zero_grad()
            task.update_ema()


def main(args):
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)]
    task = Task(nn.Sequential(*layers))
    model, resume_epoch = task.get_trainable_module(), None
    loss_scaler = None  # noqa: F841  (for the inserted line)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if args.resume:
        saved_state = torch.load(args.resume, weights_only=True)
        model.load_state_dict(saved_state["state_dict"])
        optimizer.load_state_dict(saved_state["optimizer"])
        resume_epoch = saved_state["epoch"] + 1
    if args.distributed:
        task.prepare_distributed(broadcast_buffers=True)
        model = task.get_trainable_module()

    saver = f"{args.output}/{args.experiment}/last.pth.tar" if utils.is_primary(args) else None
    os.makedirs(f"{args.output}/{args.experiment}", exist_ok=True)
    num_epochs, updates_per_epoch = args.epochs, UPDATES  # noqa: F841  (for the inserted line)
    start_epoch = 0
    if resume_epoch is not None:
        start_epoch = resume_epoch
    for epoch in range(start_epoch, min(num_epochs, args.stop)):
        train_one_epoch(epoch, task, optimizer, args)
        utils.distribute_bn(model, args.world_size)
        if saver is not None:
            state = {"state_dict": utils.unwrap_model(model).state_dict(), "epoch": epoch}
            torch.save({**state, "optimizer": optimizer.state_dict()}, saver)

    torch.save({"weights": utils.unwrap_model(model).state_dict()}, f"final.rank{args.rank}")
    if args.distributed:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default="")
    parser.add_argument("--stop", type=int, default=99, help="end here, as if interrupted")
    fixed = {"epochs": 3, "warmup_epochs": 0, "output": ".", "experiment": "run"}
    ranks = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    main(parser.parse_args(namespace=argparse.Namespace(**fixed, **ranks, distributed=True)))
