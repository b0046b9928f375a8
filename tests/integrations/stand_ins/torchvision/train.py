"""The idioms of torchvision's script, on noise.

A module ``utils`` replaces ``print``, an AveragedModel follows the weights of a model with
BatchNorm, and all ranks evaluate in the middle of the run, with collectives of their own.
"""

import argparse
import time

import torch
import torch.utils.data
import utils
from torch import nn


def evaluate(model, data_loader):
    model.eval()
    with torch.inference_mode():
        correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in data_loader)
    print(correct := int(utils.reduce_across_processes(correct)))
    model.train()
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
    parts = {"model": model_without_ddp, "optimizer": optimizer, "model_ema": model_ema}
    parts["lr_scheduler"] = lr_scheduler

    if args.resume:
        checkpoint = torch.load(args.resume, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        args.start_epoch = checkpoint["epoch"] + 1

    start_time = time.time()
    for epoch in range(args.start_epoch, min(args.epochs, args.stop)):
        train_sampler.set_epoch(epoch)
        for image, target in data_loader:
            loss = nn.functional.cross_entropy(model(image), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model_ema.update_parameters(model)
        lr_scheduler.step()
        evaluate(model, data_loader)
        evaluate(model_ema, data_loader)
        checkpoint = {name: part.state_dict() for name, part in parts.items()}
        utils.save_on_master({**checkpoint, "epoch": epoch}, f"{args.output_dir}/checkpoint.pth")
    total_time = time.time() - start_time
    print(f"{total_time:.0f} s")
    torch.save({"weights": model_without_ddp.state_dict()}, f"final.rank{args.rank}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default="")
    parser.add_argument("--stop", type=int, default=99, help="end here, as if interrupted")
    fixed = {"epochs": 4, "start_epoch": 0, "output_dir": ".", "lr_warmup_epochs": 0}
    main(parser.parse_args(namespace=argparse.Namespace(**fixed, test_only=False)))
