"""Train in the paper's setting: large batches with linear scaling, warm-up and LARS.

    python -m recipes.jointspar.paper --config recipes/jointspar/configs/cifar10.yaml \\
        --dry-run --workers 16
    torchrun --nproc-per-node 4 -m recipes.jointspar.paper \\
        --config recipes/jointspar/configs/cifar10.yaml --data FOLDER

Every key of a configuration is a flag, and a flag overrides the file. ``--dry-run`` prints the
resolved configuration, the layers and what the run would send, and trains nothing. A run leaves
``metrics.jsonl``, a line a step, and ``summary.json`` in ``--out``.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import torchcomp
from recipes.errors import RecipeError
from recipes.jointspar.layer_training import train
from recipes.jointspar.paper_data import open_data
from recipes.jointspar.paper_plan import describe
from recipes.jointspar.paper_setting import Setting
from recipes.options import read_options, resolved
from recipes.ranks import count_in_environment, join, leave, place, rank_in_environment, threads_of
from recipes.result_files import make_folder
from recipes.settings import Settings


def main() -> None:
    """Run what the command line asks for; bad input ends in one line."""
    try:
        setting = read_options(Setting, sys.argv[1:])
        if setting.dry_run:
            plan(setting)
        else:
            run(setting)
    except (RecipeError, torchcomp.SpecError, torchcomp.UnsupportedModelError) as error:
        sys.exit(f"error (rank {rank_in_environment()}): {error}")


def plan(setting: Setting) -> None:
    """Print the plan, once, for the workers that are here or that --workers names."""
    if rank_in_environment() == 0:
        print(describe(setting, setting.workers or count_in_environment()))


def run(setting: Setting) -> None:
    """Join the other ranks, train, write the summary, and leave together."""
    out = Path(setting.out)
    make_folder(out)
    ranks = place(Settings())
    torch.set_num_threads(threads_of(Settings(), ranks))
    join(ranks)
    data = open_data(setting, ranks)
    torch.manual_seed(setting.seed)
    module = setting.module().to(ranks.device)
    course = setting.course(data.steps_per_epoch, ranks.count)
    outcome = train(module, data, setting.exchange, course, setting.seed, out / "metrics.jsonl")
    if ranks.leads:
        summary = {**resolved(setting), "workers": ranks.count, **asdict(outcome)}
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        print(f"test accuracy {outcome.test:.2f} %, {outcome.bytes_share:.1%} of dense DDP's bytes")
    leave()


if __name__ == "__main__":
    main()
