"""Train a small GPT on nodes with several ranks each, which exchange compressed gradients.

    torchrun --nproc-per-node 4 -m recipes.nodes.train --mode hsdp --compress "ef(topk(0.1))"

On one machine, this runs as two nodes with two ranks each. With ``--mode ddp``, all ranks exchange
with all others. With ``two-level``, the ranks of a node average first, uncompressed. With ``hsdp``,
they share one copy of the model with FSDP2. GPUs use NCCL, CPUs use gloo.
"""

import gc
import sys
from dataclasses import dataclass
from functools import lru_cache
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
from recipes.errors import RecipeError, exit_on_user_error
from recipes.image_data.order import keyed_seed
from recipes.nodes import checkpoint
from recipes.nodes.modes import MODES, Replica, replicate
from recipes.options import check_limits, option, read_options
from recipes.settings import Settings as WorkerSettings
from recipes.small_gpt.corpus import Corpus
from recipes.small_gpt.model import SmallGPT
from recipes.small_gpt.training import BATCH, LR, SHAPE, draw, evaluate, new_optimizer, train_step
from torchcomp.specs.spec import parse_aggregator

# Three plays of Shakespeare. README.md names the source.
TEXT = Path(__file__).with_name("shakespeare.txt")


@dataclass(frozen=True)
class Settings:
    """The settings of a run. Its nodes are made of consecutive ranks, as torchrun starts them."""

    mode: str = option("hsdp", "how the model is replicated and sharded", choices=MODES)
    compress: str = option("ef(topk(0.1))", 'what nodes exchange: a spec; "mean" sends everything')
    ranks_per_node: int = option(2, "ranks that share a network card", min=1)
    steps: int = option(200, "optimizer steps", min=1)
    batch: int = option(BATCH, "sequences per step, of all ranks together", min=1)
    lr: float = option(LR, "peak learning rate of AdamW", above=0)
    seed: int = option(0, "of weights and batches", min=0)
    log_every: int = option(20, "steps between two lines", min=1)
    checkpoint_every: int = option(0, "steps between two checkpoints (0: none)", min=0)
    resume: bool = option(False, "continue from the newest checkpoint in --out, in any mode")
    out: str = option("runs/nodes", "folder of the checkpoints")
    device: str = option(
        "auto", "auto: a GPU per rank, or the CPU if there is none", choices=("auto", "cpu", "cuda")
    )

    @property
    def task(self) -> str:
        """What a resumed run must keep. The mode and the number of ranks can change."""
        return f"{self.steps} steps, batch {self.batch}, lr {self.lr:g}, seed {self.seed}"


def read_settings(argv: list[str], world_size: int) -> Settings:
    settings = read_options(Settings, argv)
    check_limits(settings)
    parse_aggregator(settings.compress)
    if world_size % settings.ranks_per_node:
        raise RecipeError(
            f"--ranks-per-node {settings.ranks_per_node}: {world_size} ranks cannot be divided "
            "into nodes of that size. Start as many ranks on each node"
        )
    if settings.batch % world_size:
        raise RecipeError(f"--batch {settings.batch} cannot be shared by {world_size} ranks")
    return settings


@lru_cache(maxsize=1)
def open_corpus() -> Corpus:
    """Return the text. Its paragraphs are speeches; every tenth is held out."""
    return Corpus.of(TEXT.read_text(), TEXT.name)


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
