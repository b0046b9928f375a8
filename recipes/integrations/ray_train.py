"""Ray Train with compressed gradients or local steps. Ray starts the ranks itself:

python -m recipes.integrations.ray_train --compress "ef(topk(0.01))" --folder runs/ray
"""

import argparse
import tempfile
from pathlib import Path

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import torchcomp
from recipes.integrations import common


def train(args: argparse.Namespace) -> None:
    """Train on one rank."""
    model = prepare_model(common.network())
    optimizer = common.adam(model)
    loader = prepare_data_loader(DataLoader(common.dataset(), common.BATCH, shuffle=True))

    # The line for torchcomp, after prepare_model(), and what a checkpoint must contain.
    if args.compress:
        method = torchcomp.register(model, args.compress)
        ranks = torchcomp.Gathered(method)
    else:
        method = torchcomp.LocalSGD(model, optimizer, args.sync, total_steps=common.TOTAL_STEPS)
        ranks = torchcomp.Gathered(method, model=model, optimizer=optimizer)

    first = 0
    if args.resume:
        saved = torch.load(args.folder / "checkpoint.pt", weights_only=True)
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
        save(args.folder, epoch + 1, loss.item(), model, optimizer, ranks)
    rank = ray.train.get_context().get_world_rank()
    common.report(args.folder, rank, model, losses, method.stats)
