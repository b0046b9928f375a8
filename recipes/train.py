"""Train an image classifier on several ranks: dense, with compressed gradients, or local steps.

    torchrun --nproc-per-node 2 -m recipes.train --config recipes/configs/digits.yaml \\
        --compress "ef(topk(0.01))"

torchcomp is two calls, in ``Trainer._attach``: ``torchcomp.register`` for compressed gradients and
``torchcomp.LocalSGD`` for local steps. The rest is an ordinary DistributedDataParallel script.
Every key of a configuration file is a flag and vice versa (``settings.py``). ``--dry-run`` prints
what a run would do.
"""

import copy
import gc
import itertools
import logging
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

import torchcomp
from recipes.checkpoints import Checkpoints
from recipes.errors import RecipeError
from recipes.evaluation import Meter, average_into, digest, replicas_agree
from recipes.image_data import open_batches
from recipes.image_data.order import NOISE, keyed_seed
from recipes.lr_schedules import rate_of
from recipes.models import build_model, check_model
from recipes.options import resolved
from recipes.plan import (
    averaging_method,
    check_micro_batches,
    check_specs,
    dense_bytes,
    describe,
    outer_step,
    total_steps,
)
from recipes.random_state import random_state, restore, seed_all
from recipes.ranks import (
    Ranks,
    count_in_environment,
    join,
    leave,
    place,
    rank_in_environment,
    threads_of,
)
from recipes.report import Report
from recipes.settings import Settings, read_settings
from recipes.shrink import shrunken

# What may differ between a run and its resumption without changing the weights that it ends with.
_FREE = {"out", "resume", "checkpoint_every", "log_every", "eval_every", "dry_run", "plan_ranks"}
_FREE |= {"data_path", "data_cache", "workers", "threads", "shrink"}

USER_ERRORS = (
    RecipeError,
    torchcomp.SpecError,
    torchcomp.ScheduleError,
    torchcomp.RankMismatchError,
    torchcomp.CheckpointError,
    torchcomp.NonFiniteError,
    torchcomp.UnsupportedModelError,
)


def main() -> None:
    """Run what the command line asks for; bad input ends in one line."""
    try:
        settings = read_settings(sys.argv[1:])
        if settings.dry_run:
            plan(settings)
        if settings.shrink:
            train_shrunken(settings)
        if not (settings.dry_run or settings.shrink):
            train(settings)
    except USER_ERRORS as error:
        sys.exit(f"error (rank {rank_in_environment()}): {error}")


def plan(settings: Settings) -> None:
    """Print the plan, once, for the ranks that are here or that --plan-ranks names."""
    if rank_in_environment() == 0:
        print(describe(settings, settings.plan_ranks or count_in_environment()))


def train_shrunken(settings: Settings) -> None:
    """Train a shrunken copy for a step or two, evaluate it, forget it."""
    with tempfile.TemporaryDirectory() as folder:
        copied = shrunken(settings, Path(folder))
        if rank_in_environment() == 0:
            print("\na shrunken copy", flush=True)
        # It would be said that a round is most of the run, which has a step or two.
        logging.getLogger("torchcomp").setLevel(logging.ERROR)
        train(copied)


def train(settings: Settings) -> None:
    """Join the other ranks, train, and leave together."""
    check_specs(settings)
    ranks = place(settings)
    check_micro_batches(settings, ranks.count)
    threads = threads_of(settings, ranks)
    torch.set_num_threads(threads)
    make_deterministic(settings)
    join(ranks)
    trainer = Trainer(settings, ranks, workers=settings.workers or threads)
    with trainer.report:
        trainer.fit()
    trainer.close()
    # DDP holds the process group until it is gone, and it is part of reference cycles.
    del trainer
    gc.collect()
    leave()


def make_deterministic(settings: Settings) -> None:
    """Have cuDNN choose the same algorithms every time; on a CPU there is nothing to choose."""
    torch.backends.cudnn.deterministic = settings.deterministic
    torch.backends.cudnn.benchmark = not settings.deterministic


def build_optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer at rate 1, which the schedule multiplies by the rate of each step."""
    decay = settings.weight_decay
    if settings.optimizer == "adamw":
        betas = (settings.beta1, settings.beta2)
        return torch.optim.AdamW(model.parameters(), lr=1.0, betas=betas, weight_decay=decay)
    return torch.optim.SGD(
        model.parameters(),
        lr=1.0,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=decay,
    )


class Trainer:
    """One rank's training run, from its settings to its summary."""

    def __init__(self, settings: Settings, ranks: Ranks, workers: int) -> None:
        self.settings, self.ranks, self.device = settings, ranks, ranks.device
        folder = Path(settings.out)
        self.checkpoints = Checkpoints(folder / "checkpoints", ranks.rank, ranks.count)
        self._check_out()
        self.batches = open_batches(settings, ranks.rank, ranks.count, ranks.device, workers)
        self.per_epoch = self.batches.order.steps_per_epoch
        self.total = total_steps(settings, self.per_epoch)
        self._build()
        self.step, self.seconds_before, self.meter = 0, 0.0, self._new_meter()
        if settings.resume:
            self._resume()
        self.report = Report(folder, total=self.total, done=self.step, speaks=ranks.leads)
        self.started = self.logged_at = time.perf_counter()
        self.logged_step = self.step
        self.last_test: float | None = None

    def _check_out(self) -> None:
        if self.checkpoints.exist() and not self.settings.resume:
            raise RecipeError(
                f"--out {self.settings.out} holds checkpoints of an earlier run: add --resume to "
                "go on with it, or name another folder"
            )
        # No rank may write a checkpoint before every rank has looked.
        dist.barrier()

    def _build(self) -> None:
        settings = self.settings
        seed_all(settings.seed)
        self.layout = torch.channels_last if settings.channels_last else torch.contiguous_format
        module = self._module().to(self.device, memory_format=self.layout)
        # Dropout and the like must differ between ranks; the weights must not.
        seed_all(keyed_seed(NOISE, settings.seed, self.ranks.rank))
        self.twin = copy.deepcopy(module)
        devices = [self.device] if self.device.type == "cuda" else None
        self.model = DistributedDataParallel(module, device_ids=devices)
        self.optimizer = build_optimizer(settings, self.model)
        self.rate = rate_of(settings, self.per_epoch)
        self.scheduler = LambdaLR(self.optimizer, self.rate)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=settings.amp == "fp16")
        self.loss_of = nn.CrossEntropyLoss(label_smoothing=settings.label_smoothing)
        self._attach()
        self.dense_bytes = dense_bytes(self.model, self.ranks.count)

    def _attach(self) -> None:
        """Attach torchcomp: this is all that it adds to a DDP script."""
        settings = self.settings
        scaler = self.scaler if self.scaler.is_enabled() else None
        self.compression: torchcomp.Handle | None = None
        self.local: torchcomp.LocalSGD | None = None
        if settings.sync != "none":
            self.local = torchcomp.LocalSGD(
                self.model,
                self.optimizer,
                settings.sync,
                total_steps=self.total,
                warmup_steps=settings.warmup_steps,
                scaler=scaler,
                compress=averaging_method(settings),
                outer=outer_step(settings),
                seed=settings.seed,
            )
        elif settings.compress != "none":
            self.compression = torchcomp.register(
                self.model, settings.compress, seed=settings.seed, scaler=scaler
            )

    @property
    def method(self) -> "torchcomp.Handle | torchcomp.LocalSGD | None":
        """What torchcomp attached to the model, if anything."""
        return self.local or self.compression

    def _module(self) -> nn.Module:
        settings, preset = self.settings, self.batches.preset
        module = build_model(
            settings.model,
            channels=preset.channels,
            classes=self.batches.classes,
            small_stem=settings.small_stem,
        )
        check_model(module, settings.model, channels=preset.channels, size=preset.size)
        return module

    def _announce(self) -> None:
        self.report.say(
            f"{self.settings.model} on {self.settings.dataset}: {self.ranks.count} ranks, "
            f"{self.total} steps ({self.per_epoch} an epoch)\n"
            f"compress {self.settings.compress}, sync {self.settings.sync}, "
            f"outer {self.settings.outer}"
        )
        if not self.batches.reproducible:
            self.report.say(
                "note: FFCV's random crops cannot be seeded, so this run cannot be repeated bit "
                "for bit; --loader torchvision can"
            )
        if self.step:
            self.report.say(f"resumed after step {self.step}")

    def fit(self) -> None:
        """Train to the last step, evaluate, save the weights and write the summary."""
        self._announce()
        while self.step < self.total:
            self._epoch(self.step // self.per_epoch, self.step % self.per_epoch)
        accuracy = self.last_test if self.last_test is not None else self.evaluate()[1]
        self._finish(accuracy)

    def _epoch(self, epoch: int, first_step: int) -> None:
        self.model.train()
        for images, targets in self.batches.train(epoch, first_step):
            loss = self._train_step(images.clone(memory_format=self.layout), targets)
            self.step += 1
            self.report.step()
            if self.step % self.settings.log_every == 0:
                self._log_step(epoch, loss)
            if self.step % self.per_epoch == 0:
                self._end_epoch(epoch)
            every = self.settings.checkpoint_every
            if every and self.step % every == 0:
                self.checkpoints.save(self.step, self.state_dict(), self._fixed_settings())

    def _train_step(self, images: Tensor, targets: Tensor) -> Tensor:
        """Take one optimizer step; DDP exchanges gradients after the last micro-batch only."""
        pieces = self.settings.accumulate
        loss = torch.zeros((), device=self.device)
        micro_batches = zip(images.chunk(pieces), targets.chunk(pieces), strict=True)
        for index, (inputs, labels) in enumerate(micro_batches):
            last = index == pieces - 1
            with nullcontext() if last else self.model.no_sync():
                loss += self._backward(inputs, labels)
        self._clip_and_step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss

    def _backward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Add the gradients of a micro-batch; return its part of the step's loss."""
        computed: list[tuple[Tensor, Tensor]] = []

        def compute() -> Tensor:
            with self._autocast():
                scores = self.model(images)
                loss: Tensor = self.loss_of(scores, targets)
            computed.append((loss, scores))
            return loss / self.settings.accumulate

        if self._repeats_overflows():
            part = self.local.backward(compute)
        else:
            part = compute()
            self.scaler.scale(part).backward()
        # A repeated micro-batch counts once: the last computation is the one that was used.
        self.meter.add(*computed[-1], targets)
        return part.detach()

    def _repeats_overflows(self) -> bool:
        """Whether a micro-batch that overflows float16 is computed again at a lower scale.

        The scaler would skip a step on one rank only, and local steps must stay in step.
        """
        return self.local is not None and self.scaler.is_enabled()

    def _clip_and_step(self) -> None:
        unscaled = self._repeats_overflows()
        if self.settings.clip_norm:
            if not unscaled:
                self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        if unscaled:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _autocast(self) -> torch.autocast:
        dtype = torch.float16 if self.settings.amp == "fp16" else torch.bfloat16
        enabled = self.settings.amp != "off"
        return torch.autocast(self.device.type, dtype=dtype, enabled=enabled)

    def _new_meter(self) -> Meter:
        return Meter(torch.zeros(3, dtype=torch.float64, device=self.device))

    def _log_step(self, epoch: int, loss: Tensor) -> None:
        now = time.perf_counter()
        steps = self.step - self.logged_step
        self.report.line(
            step=self.step,
            epoch=epoch,
            loss=loss.item(),
            lr=self.rate(self.step - 1),
            bytes_sent=self._bytes_sent(),
            synchronisations=self._synchronisations(),
            ms=1000 * (now - self.logged_at) / steps,
        )
        self.logged_at, self.logged_step = now, self.step

    def _bytes_sent(self) -> int:
        """The bytes that this rank has sent so far."""
        if self.method is None:
            return self.step * self.dense_bytes
        return self.method.stats.total_bytes_sent

    def _synchronisations(self) -> int:
        """How often the ranks have exchanged gradients or, with local steps, weights."""
        return self.step if self.local is None else self.local.stats.syncs

    def _end_epoch(self, epoch: int) -> None:
        loss, accuracy = self.meter.over_ranks()
        if not math.isfinite(loss):
            raise RecipeError(
                f"the run has diverged: the training loss of epoch {epoch + 1} is {loss}; lower "
                "--lr or lengthen --warmup-steps"
            )
        self.meter = self._new_meter()
        values: dict[str, Any] = {"train_loss": loss, "train_accuracy": accuracy}
        sent = self._bytes_sent()
        if (epoch + 1) % self.settings.eval_every == 0 or self.step == self.total:
            test_loss, self.last_test = self.evaluate()
            values |= {"test_loss": test_loss, "test_accuracy": self.last_test}
            self.report.say(
                f"epoch {epoch + 1:>3}/{self.settings.epochs}: loss {loss:.3f}, "
                f"test {self.last_test:.1%}, {sent / 1e6:,.3g} MB sent"
            )
        self.report.line(step=self.step, epoch=epoch, bytes_sent=sent, **values)

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Return the loss and accuracy of the ranks' average on the whole test set."""
        self._prepare_twin()
        self.twin.eval()
        meter = self._new_meter()
        for images, labels in self.batches.test():
            with self._autocast():
                scores = self.twin(images.clone(memory_format=self.layout))
            meter.add(nn.functional.cross_entropy(scores.float(), labels), scores, labels)
        return meter.over_ranks()

    def _prepare_twin(self) -> None:
        """Make the twin the model that is evaluated and saved."""
        average_into(self.twin, self.model.module, self.ranks.count)
        if self.local is None or not self.settings.bn_images:
            return
        if not any(isinstance(layer, _BatchNorm) for layer in self.twin.modules()):
            return
        # Dropout draws from generators whose state the rest of the run depends on.
        before = random_state()
        with self._autocast():
            images = self._micro_batches_from((self.step - 1) // self.per_epoch + 1)
            torchcomp.reestimate_batchnorm(self.twin, images, self.settings.bn_images)
        restore(before)

    def _micro_batches_from(self, epoch: int) -> Iterator[Tensor]:
        """This rank's training images, augmented, as the epochs from ``epoch`` on order them."""
        for later in itertools.count(epoch):
            for images, _ in self.batches.train(later, 0):
                yield from images.clone(memory_format=self.layout).chunk(self.settings.accumulate)

    def _finish(self, accuracy: float) -> None:
        self._prepare_twin()
        weights = self.twin.state_dict()
        agree = replicas_agree(self.model.module, self.ranks.count)
        if self.ranks.leads:
            torch.save(weights, Path(self.settings.out) / "weights.pt")
        summary = self._summary(accuracy, weights_sha256=digest(weights), replicas_agree=agree)
        self.report.summarise(summary)

    def _summary(self, accuracy: float, **more: Any) -> dict[str, Any]:
        sent, dense = self._bytes_sent(), self.step * self.dense_bytes
        return {
            "test_accuracy": accuracy,
            "steps": self.step,
            "ranks": self.ranks.count,
            "bytes_sent": sent,
            "bytes_per_step": sent / self.step,
            "dense_bytes_per_step": dense / self.step,
            "traffic_saved": dense / sent if sent else None,
            "synchronisations": self._synchronisations(),
            "seconds": self._seconds(),
            **more,
            "settings": resolved(self.settings),
        }

    def _seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.started

    def state_dict(self) -> dict[str, Any]:
        """Return everything of this rank that the rest of the run depends on."""
        return {
            "step": self.step,
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "method": self.method.state_dict() if self.method else None,
            "random": random_state(),
            "meter": self.meter.sums,
            "seconds": self._seconds(),
        }

    def _resume(self) -> None:
        state = self.checkpoints.load(self._fixed_settings())
        self._settle_buckets()
        # After DDP's constructor, which gives every rank the weights of rank 0: within a round of
        # local steps they differ.
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        if self.method is not None:
            self.method.load_state_dict(state["method"])
        self.meter.sums.copy_(state["meter"])
        self.step, self.seconds_before = state["step"], state["seconds"]
        restore(state["random"])

    def _settle_buckets(self) -> None:
        """Send one blank batch through the model, so that DDP arranges its buckets for good.

        DDP rebuilds its buckets after the first backward, and what shares a bucket decides the
        order of additions (with three ranks or more) and what is selected together. A run that
        goes on must find the arrangement that it left. All that this changes is loaded next.
        """
        if self.local is not None:
            return
        preset = self.batches.preset
        count = self.settings.batch_size // self.ranks.count // self.settings.accumulate
        shape = (count, preset.channels, preset.size, preset.size)
        blank = torch.zeros(shape, device=self.device).clone(memory_format=self.layout)
        with self._autocast():
            self.model(blank).sum().backward()
        self.optimizer.zero_grad()

    def _fixed_settings(self) -> dict[str, Any]:
        return {k: v for k, v in resolved(self.settings).items() if k not in _FREE}

    def close(self) -> None:
        """Remove torchcomp's hooks from the model."""
        if self.method is not None:
            self.method.close()


if __name__ == "__main__":
    main()
