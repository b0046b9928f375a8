"""The idioms of torchvision's script, on noise.

A module ``utils`` replaces ``print``, an AveragedModel follows the weights of a model with
BatchNorm, and all ranks evaluate in the middle of the run, with collectives of their own.
"""

import argparse
import os
import time

import torch
import torch.utils.data
import utils
from torch import nn


def train_one_epoch(model, criterion, optimizer, data_loader, model_ema):
    model.train()
    for image, target in data_loader:
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model_ema.update_parameters(model)


def evaluate(model, data_loader):
    model.eval()
    correct = 0
    with torch.inference_mode():
        for image, target in data_loader:
            correct += int((model(image).argmax(1) == target).sum())
    correct = int(utils.reduce_across_processes(correct))
    print(f"{correct} of {len(data_loader.dataset)}")
    return correct


def main(args):
    utils.init_distributed_mode(args)
    torch.manual_seed(0)
    labels = torch.arange(56) % 4
    images = 0.5 * torch.randn(56, 3, 6, 6) + labels.view(-1, 1, 1, 1)
    dataset = torch.utils.data.TensorDataset(images, labels)
    train_sampler = torch.utils.data.distributed.DistributedSampler(dataset)
    data_loader = torch.utils.data.DataLoader(dataset, 4, sampler=train_sampler)
    first = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*first, nn.Linear(8 * 16, 4))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scaler = None  # noqa: F841  (for the inserted line)

    model_without_ddp = model
    if args.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model)
        model_without_ddp = model.module
    ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    model_ema = torch.optim.swa_utils.AveragedModel(
        model_without_ddp, multi_avg_fn=ema, use_buffers=True
    )

    if args.resume:
        checkpoint = torch.load(args.resume, weights_only=True)
        model_without_ddp.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
        model_ema.load_state_dict(checkpoint["model_ema"])
        args.start_epoch = checkpoint["epoch"] + 1

    start_time = time.time()
    correct = []
    for epoch in range(args.start_epoch, min(args.epochs, args.stop)):
        train_sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, data_loader, model_ema)
        lr_scheduler.step()
        correct.append(evaluate(model, data_loader))
        evaluate(model_ema, data_loader)
        if args.output_dir:
            checkpoint = {
                "model": model_without_ddp.state_dict(),
                "optimizer": optimizer.state_dict(),
                "lr_scheduler": lr_scheduler.state_dict(),
                "model_ema": model_ema.state_dict(),
                "epoch": epoch,
            }
            utils.save_on_master(checkpoint, os.path.join(args.output_dir, "checkpoint.pth"))
    total_time = time.time() - start_time
    print(f"{total_time:.0f} s")
    final = {"weights": model_without_ddp.state_dict(), "ema": model_ema.state_dict()}
    torch.save({**final, "correct": correct}, f"final.rank{args.rank}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default="")
    parser.add_argument("--stop", type=int, default=99, help="end here, as if interrupted")
    fixed = {"epochs": 4, "start_epoch": 0, "output_dir": ".", "lr_warmup_epochs": 0}
    main(parser.parse_args(namespace=argparse.Namespace(**fixed, test_only=False)))
