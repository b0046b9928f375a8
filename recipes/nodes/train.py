"""Train a small GPT on nodes with several ranks each, which exchange compressed gradients.

    torchrun --nproc-per-node 4 -m recipes.nodes.train --mode hsdp --compress "ef(topk(0.1))"

On one machine, this runs as two nodes with two ranks each. ``--mode`` is one of

- ``ddp``: DDP, all ranks exchange with all others. With ``--compress mean``, what plain DDP does.
- ``two-level``: DDP. The ranks of a node average first, uncompressed. The nodes then exchange.
- ``hsdp``: FSDP2. The ranks of a node share one copy of the model. The copies then exchange.

GPUs use NCCL, CPUs use gloo.
"""

import gc
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import torchcomp
from recipes.distributed import (
    cleanup_distributed,
    env_world_size,
    init_distributed,
    this_worker,
    threads_per_worker,
)
from recipes.errors import exit_on_user_error
from recipes.image_data.order import keyed_seed
from recipes.nodes import checkpoint
from recipes.nodes.corpus import open_corpus
from recipes.nodes.modes import Replica, replicate
from recipes.nodes.settings import Settings, read_settings
from recipes.settings import Settings as WorkerSettings
from recipes.small_gpt.corpus import Corpus
from recipes.small_gpt.model import SmallGPT
from recipes.small_gpt.training import SHAPE, draw, evaluate, new_optimizer, train_step


@dataclass(frozen=True)
class Outcome:
    loss: float
    between: int  # bytes that the ranks of a node sent to other nodes in the last step
    inside: int  # bytes that they sent to each other
    residual: int  # bytes of the residuals of this rank


@exit_on_user_error(torchcomp.CheckpointError, torchcomp.UnsupportedModelError)
def main() -> None:
    """Train as one of torchrun's processes."""
    settings = read_settings(sys.argv[1:], env_world_size())
    of_worker = WorkerSettings(device=settings.device)
    worker = this_worker(of_worker)
    torch.set_num_threads(threads_per_worker(of_worker, worker))
    init_distributed(worker)
    outcome = train(settings, worker.device)
    if worker.is_main:
        print(f"validation loss {outcome.loss:.4f}; residual {outcome.residual:,} bytes per rank")
    # DDP uses the process group until it is deleted, and reference cycles keep it alive.
    gc.collect()
    cleanup_distributed()


def train(settings: Settings, device: torch.device) -> Outcome:
    """Train once; all ranks of the default group call this."""
    corpus = _on(device, open_corpus())
    torch.manual_seed(settings.seed)  # FSDP2 does not copy the parameters of rank 0, as DDP does.
    model = SmallGPT(SHAPE).to(device)
    replica = replicate(model, settings.mode, settings.compress, settings.ranks_per_node, device)
    optimizer, lr_at = new_optimizer(replica.model, settings.lr, settings.steps)
    folder, first = Path(settings.out), 0
    if settings.resume:
        first = checkpoint.resume(folder, replica, optimizer, settings.task)
    for step in range(first, settings.steps):
        optimizer.param_groups[0]["lr"] = lr_at(step)
        batches = torch.Generator().manual_seed(keyed_seed(settings.seed, step))
        batch = draw(corpus.train, batches, settings.batch)
        loss = train_step(replica.model, optimizer, batch)
        done = step + 1
        if done % settings.log_every == 0:
            _print(done, loss, replica)
        if settings.checkpoint_every and done % settings.checkpoint_every == 0:
            checkpoint.save(folder, done, replica, optimizer, settings.task)
    loss_after = evaluate(replica.model, corpus)
    outcome = Outcome(loss_after, replica.between, replica.inside, replica.residual)
    replica.handle.close()
    return outcome


def _on(device: torch.device, corpus: Corpus) -> Corpus:
    return Corpus(corpus.train.to(device), corpus.validation.to(device), corpus.name)


def _print(step: int, loss: torch.Tensor, replica: Replica) -> None:
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(
            f"step {step}: loss {loss.item() / dist.get_world_size():.3f}; a node sent "
            f"{replica.between:,} bytes to others and {replica.inside:,} inside",
            flush=True,
        )


if __name__ == "__main__":
    main()
