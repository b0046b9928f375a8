"""One training run on this rank: plain DDP, compressed gradients, or local steps."""

from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from recipes.small_gpt.corpus import VOCABULARY, Corpus, open_corpus, windows
from recipes.small_gpt.model import Shape, SmallGPT
from torchcomp.local_sgd.schedules import Schedule
from torchcomp.specs.learning_rates import decaying

DENSE = "dense"
SHAPE = Shape(VOCABULARY)
# Sequences per step, of all ranks together.
BATCH = 16
LR, BETA2, WEIGHT_DECAY, CLIP = 6e-3, 0.99, 0.1, 1.0
_WARMUP_SHARE = 0.1


@dataclass(frozen=True)
class Outcome:
    """The result of a run: the loss is in nats per character, bytes are those that a rank sent."""

    loss: str
    bytes: int
    dense_bytes: int


def train(run: tuple[str, int], steps: int, lr: float) -> Outcome:
    """Train once, and evaluate the model that the ranks share at the end; all ranks call this."""
    method, seed = run
    corpus = open_corpus()
    torch.manual_seed(seed)
    model = DistributedDataParallel(SmallGPT(SHAPE))
    optimizer, lr_at = new_optimizer(model, lr, steps)
    plan = torchcomp.explain("mean", model=model, world_size=dist.get_world_size())
    dense_bytes = steps * plan.dense_bytes_sent
    batches = torch.Generator().manual_seed(seed)
    handle = attach(model, optimizer, method, steps)
    with closing(handle) if handle else nullcontext():
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = lr_at(step)
            train_step(model, optimizer, draw(corpus.train, batches, BATCH))
        sent = handle.stats.total_bytes_sent if handle else dense_bytes
    return Outcome(f"{evaluate(model.module, corpus):.4f}", sent, dense_bytes)


def new_optimizer(
    model: nn.Module, lr: float, steps: int
) -> tuple[torch.optim.Optimizer, Callable[[int], float]]:
    """Return AdamW, and its learning rate by step: a warm-up to `lr`, then a cosine."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, BETA2), weight_decay=WEIGHT_DECAY, fused=True
    )
    warmup = _warmup_steps(steps)
    lr_at = decaying("cosine", peak=lr, final=lr / 10, total_steps=steps, warmup_steps=warmup)
    return optimizer, lr_at


def _warmup_steps(steps: int) -> int:
    return int(_WARMUP_SHARE * steps)


def attach(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, method: str, steps: int
) -> Any:
    """Attach the method to the model, and return its handle; None for plain DDP."""
    spec, options = split(method)
    if spec == DENSE:
        return None
    if isinstance(torchcomp.parse(spec), Schedule):
        lengths = {"total_steps": steps, "warmup_steps": _warmup_steps(steps)}
        return torchcomp.LocalSGD(model, optimizer, spec, **lengths, **options)
    return torchcomp.register(model, spec)


def split(method: str) -> tuple[str, dict[str, str]]:
    """Return the spec of a method, and the options of :class:`torchcomp.LocalSGD` after it."""
    spec, _, options = method.partition(" with ")
    compress, _, outer = options.partition("outer=")
    compress = compress.removeprefix("compress=").removesuffix(", ")
    named = {"compress": compress, "outer": outer}
    return spec, {name: value for name, value in named.items() if value}


def draw(text: Tensor, generator: torch.Generator, batch: int) -> tuple[Tensor, Tensor]:
    """Draw `batch` sequences for a step, and return this rank's share of them."""
    # Every rank draws the whole batch, so that it does not depend on the number of ranks.
    starts = torch.randint(len(text) - SHAPE.context, (batch,), generator=generator)
    return windows(text, starts[dist.get_rank() :: dist.get_world_size()], SHAPE.context)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> Tensor:
    """Take one step of this rank's optimizer, and return the loss of its batch."""
    inputs, targets = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate(model: nn.Module, corpus: Corpus) -> float:
    """Return the mean loss on the validation text, cut into windows."""
    text, total, count = corpus.validation, 0.0, 0
    starts = torch.arange(0, len(text) - SHAPE.context, SHAPE.context)
    for some in starts.split(64):
        inputs, targets = windows(text, some, SHAPE.context)
        logits = model(inputs).flatten(0, 1)
        total += float(cross_entropy(logits, targets.flatten(), reduction="sum"))
        count += targets.numel()
    return total / count
