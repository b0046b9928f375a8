"""One training run on this rank: plain DDP, compressed gradients, or local steps."""

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
from torchcomp.learning_rates import decaying

SHAPE = Shape(VOCABULARY)
BATCH = 16
_WARMUP = 0.1
_CLIP = 1.0


@dataclass(frozen=True)
class Run:
    """The settings of a run.

    Attributes:
        method: "dense" for plain DDP, a spec string for :func:`torchcomp.register`, or a schedule
            with the options of :class:`torchcomp.LocalSGD`, as :func:`torchcomp.explain` prints
            them: ``every(8) with compress=quantize("int8"), outer=nesterov(lr=0.7)``.
        steps: optimizer steps.
        lr: peak learning rate of AdamW.
        beta2: decay of AdamW's second moment.
        seed: of weights and order.
    """

    method: str
    steps: int
    lr: float
    beta2: float
    seed: int


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        loss: mean cross-entropy on the validation text after the last step, in nats per character.
        nbytes: bytes that one rank sent.
        dense_bytes: bytes that plain DDP would have sent.
    """

    loss: float
    nbytes: int
    dense_bytes: int


def train(run: Run) -> Outcome:
    """Train once, and evaluate the model that all ranks share at the end; all ranks call this."""
    corpus = open_corpus()
    torch.manual_seed(run.seed)
    model = DistributedDataParallel(SmallGPT(SHAPE))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=run.lr, betas=(0.9, run.beta2), weight_decay=0.1, fused=True
    )
    lr_at = decaying(
        "cosine",
        peak=run.lr,
        final=run.lr / 10,
        total_steps=run.steps,
        warmup_steps=int(_WARMUP * run.steps),
    )
    attached = attach(model, optimizer, run)
    batches = torch.Generator().manual_seed(run.seed)
    with closing(attached) if attached else nullcontext():
        for step in range(run.steps):
            optimizer.param_groups[0]["lr"] = lr_at(step)
            train_step(model, optimizer, draw(corpus.train, batches))
        dense = run.steps * torchcomp.explain(
            "mean", model=model, world_size=dist.get_world_size()
        ).dense_bytes_sent
        sent = attached.stats.total_bytes_sent if attached else dense
    return Outcome(evaluate(model.module, corpus), sent, dense)


def attach(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, run: Run
) -> Any:
    """Return the handle of the method; None for plain DDP."""
    if run.method == "dense":
        return None
    spec, _, rest = run.method.partition(" with ")
    if isinstance(torchcomp.parse(spec), torchcomp.Schedule if hasattr(torchcomp, "Schedule") else object) and spec.startswith(("every", "qsr", "power", "post_local", "swap")):
        options = {}
        if rest:
            before, found, outer = rest.partition("outer=")
            if found:
                options["outer"] = outer
            compress = before.removeprefix("compress=").removesuffix(", ")
            if compress:
                options["compress"] = compress
        return torchcomp.LocalSGD(model, optimizer, spec, total_steps=run.steps, **options)
    return torchcomp.register(model, run.method)


def draw(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the batch of a step, and return this rank's share of it."""
    starts = torch.randint(len(text) - SHAPE.context, (BATCH,), generator=generator)
    return windows(text, starts[dist.get_rank() :: dist.get_world_size()], SHAPE.context)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> None:
    """Take one step of this rank's optimizer."""
    inputs, targets = batch
    optimizer.zero_grad()
    cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
    optimizer.step()


@torch.no_grad()
def evaluate(model: nn.Module, corpus: Corpus) -> float:
    """Return the mean loss on the validation text, cut into windows."""
    text = corpus.validation
    starts = torch.arange(0, len(text) - SHAPE.context - 1, SHAPE.context)
    losses = [
        cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
        for inputs, targets in (windows(text, s, SHAPE.context) for s in starts.split(64))
    ]
    return float(sum(losses)) / (len(starts) * SHAPE.context)
