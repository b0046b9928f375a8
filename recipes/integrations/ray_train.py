"""Ray Train with compressed gradients or local steps. Ray starts the ranks itself:

python -m recipes.integrations.ray_train --compress "ef(topk(0.01))" --out runs/ray
"""

import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import torchcomp
from recipes.integrations import common


def train(config: dict[str, Any]) -> None:
    args = config["args"]
    model = prepare_model(common.network())
    optimizer = common.adam(model)
    loader = prepare_data_loader(DataLoader(common.dataset(), common.BATCH, shuffle=True))

    # The line for torchcomp, after prepare_model(), and what a checkpoint must contain of every
    # rank.
    if args.compress:
        method = torchcomp.register(model, args.compress)
        ranks = torchcomp.Gathered(method)
    else:
        method = torchcomp.LocalSGD(model, optimizer, args.sync, total_steps=common.TOTAL_STEPS)
        ranks = torchcomp.Gathered(method, model=model, optimizer=optimizer)

    first = 0
    if args.resume:
        with Checkpoint(config["checkpoint"]).as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        ranks.load_state_dict(saved["ranks"])
        first = saved["epoch"]

    losses = []
    for epoch in range(first, common.EPOCHS):
        loader.sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if epoch == 0:
            state = {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "ranks": ranks.state_dict(),  # on all ranks
                "epoch": epoch + 1,
            }
            save(state, losses[-1])
    rank = ray.train.get_context().get_world_rank()
    common.report(args.out, rank, model, losses, method.stats)


def save(state: dict[str, Any], loss: float) -> None:
    """Report a checkpoint. All ranks report, and only rank 0 writes a file."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            torch.save(state, Path(folder) / "state.pt")
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({"loss": loss}, checkpoint=checkpoint)


def main() -> None:
    args = common.parse()
    args.out = args.out.resolve()  # workers have another working directory
    copy = str(args.out / "checkpoint")
    trainer = TorchTrainer(
        train,
        train_loop_config={"args": args, "checkpoint": copy},
        scaling_config=ScalingConfig(num_workers=common.RANKS),
        run_config=RunConfig(storage_path=str(args.out / "ray")),
    )
    result = trainer.fit()
    if result.checkpoint is not None:
        result.checkpoint.to_directory(copy)


if __name__ == "__main__":
    main()
