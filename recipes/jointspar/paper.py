"""Train in the paper's setting: large batches with linear lr scaling, warm-up and LARS.

    python -m recipes.jointspar.paper --config recipes/jointspar/configs/cifar10.yaml \\
        --dry-run --workers 16
    torchrun --nproc-per-node 4 -m recipes.jointspar.paper \\
        --config recipes/jointspar/configs/cifar10.yaml --data FOLDER \\
        --optimizer sgd --method 'jointspar(0.6, selection="per-rank", rule=Literal(alpha=1e-8))'

Every key of a configuration is also a flag, and a flag overrides the file. ``--dry-run`` prints the
resolved configuration, the layers and the bytes that the run would send, without training. A run
writes ``metrics.jsonl``, with one line per step, and ``summary.json`` to ``--out``.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import torchcomp
from recipes.distributed import (
    cleanup_distributed,
    env_rank,
    env_world_size,
    init_distributed,
    this_worker,
    threads_per_worker,
)
from recipes.errors import exit_on_user_error
from recipes.jointspar.layer_training import train
from recipes.jointspar.paper_data import open_data
from recipes.jointspar.paper_plan import describe
from recipes.jointspar.paper_setting import Setting
from recipes.options import as_plain_dict, read_options
from recipes.result_files import make_folder
from recipes.settings import Settings


def main() -> None:
    """Train, or print the plan. Bad input ends in one line."""
    with exit_on_user_error(torchcomp.UnsupportedModelError):
        setting = read_options(Setting, sys.argv[1:])
        if setting.dry_run:
            print_plan(setting)
        else:
            run(setting)


def print_plan(setting: Setting) -> None:
    """Print the plan on rank 0, for the started workers or for the number in ``--workers``."""
    if env_rank() == 0:
        print(describe(setting, setting.workers or env_world_size()))


def run(setting: Setting) -> None:
    """Join the process group, train, write the summary, and leave the group."""
    out = Path(setting.out)
    make_folder(out)
    worker = this_worker(Settings())
    torch.set_num_threads(threads_per_worker(Settings(), worker))
    init_distributed(worker)
    data = open_data(setting, worker)
    # All ranks build the same weights.
    torch.manual_seed(setting.seed)
    module = setting.module().to(worker.device)
    hyperparameters = setting.hyperparameters(data.steps_per_epoch, worker.world_size)
    log = out / "metrics.jsonl"
    outcome = train(module, data, setting.exchange, hyperparameters, setting.seed, log)
    if worker.is_main:
        summary = {**as_plain_dict(setting), "workers": worker.world_size, **asdict(outcome)}
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        print(f"test accuracy {outcome.test:.2f} %, {outcome.bytes_share:.1%} of dense DDP's bytes")
    cleanup_distributed()


if __name__ == "__main__":
    main()
