"""What the scripts of this folder share: arguments, a small task, and the file with the results.

Each script trains for two epochs and saves a checkpoint after the first. --resume continues from
it, and ends with the same weights, bit for bit.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import torchcomp

FEATURES, CLASSES = 16, 4
RANKS = 2
BATCH = 16
EPOCHS = 2
SAMPLES = 512
TOTAL_STEPS = EPOCHS * SAMPLES // (BATCH * RANKS)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    method = parser.add_mutually_exclusive_group(required=True)
    method.add_argument("--compress", metavar="SPEC", help='compress gradients: "ef(topk(0.01))"')
    method.add_argument("--sync", metavar="SPEC", help='take local steps: "every(3)"')
    parser.add_argument("--out", type=Path, required=True, help="for checkpoints and results")
    parser.add_argument("--resume", action="store_true", help="continue after the first epoch")
    return parser.parse_args()


def dataset() -> TensorDataset:
    """Points of noisy clusters, with their clusters as labels."""
    noise = torch.Generator().manual_seed(0)
    centers = torch.randn(CLASSES, FEATURES, generator=noise)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=noise)
    return TensorDataset(centers[labels] + torch.randn(SAMPLES, FEATURES, generator=noise), labels)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.01)


def report(
    folder: Path, rank: int, model: nn.Module, losses: list[float], stats: torchcomp.Stats
) -> None:
    """Write this rank's losses, final weights and statistics to a file, and print a line."""
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    result = {"losses": losses, "weights": weights.tolist(), "stats": asdict(stats)}
    (folder / f"result-{rank}.json").write_text(json.dumps(result))
    if rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {stats}")
