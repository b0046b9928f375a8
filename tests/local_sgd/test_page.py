"""The code of docs/qsr.md runs as printed."""

import os
import re
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.support.models import seeded
from tests.support.outcomes import equal_on_all, flat
from tests.support.ranks import on_processes, on_threads

PAGE = (Path(__file__).parents[2] / "docs" / "qsr.md").read_text()
CODE = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
TWO_LEVELS = [block for block in CODE if "mesh" in block]
BLOCKS = [block for block in CODE if block not in TWO_LEVELS]
NAMES = {"dcp": dcp, "dist": dist, "init_device_mesh": init_device_mesh, "torch": torch}
NAMES |= {"DistributedDataParallel": DistributedDataParallel, "torchcomp": torchcomp}


def run_page(folder):
    """Run the code blocks in order, as one script; return the plan and the synchronisations."""
    os.chdir(folder)
    names = NAMES | {
        "loader": [(torch.randn(512, 8), torch.randint(3, (512,))) for _ in range(8)],
        "loss_of": nn.functional.cross_entropy,
        "model": nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
        "scaler": torch.amp.GradScaler("cpu"),
    }
    for block in BLOCKS:
        if "scaler=scaler" in block:
            names["sync"].close()
        exec(block, names)
    return str(names["plan"]), names["sync"].stats.syncs


def test_its_code_runs_and_prints_the_shown_output(tmp_path):
    for shown, syncs in on_processes(2, run_page, str(tmp_path)):
        assert f"```\n{shown}\n```" in PAGE
        assert syncs == 2
    assert len(BLOCKS) == 5


def two_levels():
    """Run the code about two levels, and train until the first average."""
    names = NAMES | {"net": seeded(nn.Linear(8, 3))}
    (block,) = TWO_LEVELS
    exec(block, names)
    for _ in range(8):
        names["model"](torch.randn(4, 8)).square().mean().backward()
        names["optimizer"].step()
    return flat(names["model"].parameters()), names["handle"].stats.syncs, names["sync"].stats.syncs


def test_its_code_for_two_levels_runs():
    weights, *syncs = zip(*on_threads(4, two_levels), strict=True)
    assert equal_on_all(weights)
    assert syncs == [(8,) * 4, (1,) * 4]
