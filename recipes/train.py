"""Train an image classifier with DistributedDataParallel (DDP) and torchcomp.

    torchrun --nproc-per-node 2 -m recipes.train --config recipes/configs/digits.yaml \\
        --compress "ef(topk(0.01))"

torchcomp is one call, in :func:`attach_torchcomp`. The rest is an ordinary DDP script, which also
runs without torchcomp. Every key of a configuration file is also a flag (see ``settings.py``), and
a flag overrides the file. ``--dry-run`` prints what a run would do, without training. SIGUSR1 and
SIGTERM end a run after a checkpoint, with exit code 75: see ``cluster/README.md``.
"""

import gc
import logging
import math
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

import torchcomp
from recipes.checkpoints import Checkpoints
from recipes.distributed import (
    Worker,
    cleanup_distributed,
    env_rank,
    env_world_size,
    init_distributed,
    this_worker,
    threads_per_worker,
)
from recipes.errors import TORCHCOMP_ERRORS, RecipeError, exit_on_user_error
from recipes.evaluation import Evaluator, Meter, parameters_are_equal, sha256_of
from recipes.image_data.batches import open_batches
from recipes.image_data.order import NOISE, keyed_seed
from recipes.interruption import Interruption, exit_for_requeue, ignore_signals
from recipes.models import build_model, check_model
from recipes.optimizers import autocast, build_optimizer, grad_scaler, lr_function
from recipes.options import as_plain_dict
from recipes.plan import (
    averaging_method,
    check_micro_batches,
    check_specs,
    dense_bytes,
    describe,
    outer_step,
    total_steps,
)
from recipes.random_state import random_state, seed_all, set_random_state
from recipes.report import Report
from recipes.resizing import resized
from recipes.settings import Settings, read_settings
from recipes.shrink import shrink
from recipes.signals import REQUEUE

# Settings that a resumed run can change. They do not affect its final weights.
_FREE_ON_RESUME = {"out", "resume", "auto_resume", "elastic", "checkpoint_every", "signal_every"}
_FREE_ON_RESUME |= {"log_every", "eval_every", "dry_run", "plan_ranks", "shrink"}
_FREE_ON_RESUME |= {"data_path", "workers", "threads", "timeout"}


def attach_torchcomp(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    settings: Settings,
    total_steps: int,
    on_alarm: Callable[[torchcomp.Alarm], object] | None = None,
) -> torchcomp.Handle | torchcomp.LocalSGD | None:
    """Attach the method of ``--sync`` or ``--compress`` to ``model``.

    `on_alarm` is called with what ``--guard`` finds.
    """
    # A GradScaler changes the scale of the gradients and skips steps. torchcomp follows both.
    scaler_or_none = scaler if scaler.is_enabled() else None

    if settings.sync != "none":
        # Local steps: the ranks train separately, and average their weights every few steps.
        # The schedule decides when. Steps without an average send nothing.
        # `compress` compresses what an average sends: the change of the weights since the last
        # average (the pseudo-gradient). `outer` turns the averaged change into the new weights.
        return torchcomp.LocalSGD(
            model,
            optimizer,
            settings.sync,
            total_steps=total_steps,
            warmup_steps=settings.warmup_steps,
            scaler=scaler_or_none,
            compress=averaging_method(settings),
            outer=outer_step(settings),
            seed=settings.seed,
        )
    if settings.compress != "none":
        # Compressed gradients: in every backward pass, DDP averages compressed gradients. This
        # replaces its all-reduce of dense ones. A guard compares both every few steps.
        every = settings.guard
        return torchcomp.register(
            model,
            settings.compress,
            seed=settings.seed,
            scaler=scaler_or_none,
            lr_inside=optimizer if settings.lr_inside else None,
            guard=torchcomp.Guard(every=every, callback=on_alarm) if every else False,
        )
    return None


def main() -> None:
    """Read the command line, then train or print the plan."""
    with exit_on_user_error(*TORCHCOMP_ERRORS):
        settings = read_settings(sys.argv[1:])
        if settings.dry_run:
            print_plan(settings)
        if settings.shrink:
            train_shrunken_copy(settings)
        if not (settings.dry_run or settings.shrink):
            train(settings)
            # The results are complete. A signal must not change the exit code any more.
            ignore_signals()


def print_plan(settings: Settings) -> None:
    """Print the plan on rank 0, for ``--plan-ranks`` ranks or the number of started ones."""
    if env_rank() == 0:
        print(describe(settings, settings.plan_ranks or env_world_size()))


def train_shrunken_copy(settings: Settings) -> None:
    """Train and evaluate a shrunken copy of the configuration in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        shrunken = shrink(settings, Path(folder))
        if env_rank() == 0:
            print("\na shrunken copy", flush=True)
        # torchcomp would warn that a round takes most of the run, which has a step or two.
        logging.getLogger("torchcomp").setLevel(logging.ERROR)
        train(shrunken)


def train(settings: Settings) -> None:
    # Check first what needs no process group: a rank that fails later leaves the others waiting.
    check_specs(settings)
    worker = this_worker(settings)
    check_micro_batches(settings, worker.world_size)
    threads = threads_per_worker(settings, worker)
    torch.set_num_threads(threads)
    configure_cudnn(settings)
    init_distributed(worker, settings.timeout)
    with Interruption(settings.signal_every, worker.device) as interruption:
        trainer = Trainer(settings, worker, settings.workers or threads, interruption)
        with trainer.report:
            finished = trainer.fit()
        trainer.close()
        # DDP uses the process group until it is deleted, and reference cycles keep it alive.
        del trainer
        gc.collect()
        cleanup_distributed()
    if not finished:
        exit_for_requeue()


def configure_cudnn(settings: Settings) -> None:
    """Choose between reproducible and fast cuDNN algorithms. Has no effect on a CPU."""
    torch.backends.cudnn.deterministic = settings.deterministic
    # The benchmark can select another algorithm in each run, which rounds differently.
    torch.backends.cudnn.benchmark = not settings.deterministic


class Speed:
    """The speed of one epoch's training steps, measured on this rank."""

    def __init__(self, method: torchcomp.Handle | torchcomp.LocalSGD | None) -> None:
        self._method = method
        self._started, self._waited = time.perf_counter(), self._seconds_waited()
        self.images = 0  # of all ranks, until now

    def measured(self) -> dict[str, float | None]:
        """Return images per second of all ranks, and the share of the time spent waiting."""
        seconds, waited = time.perf_counter() - self._started, self._seconds_waited()
        share = (waited - self._waited) / seconds if waited else None
        return {"images_per_second": self.images / seconds, "wait_share": share}

    def _seconds_waited(self) -> float:
        return 0.0 if self._method is None else self._method.seconds_waited


def waiting(share: float | None) -> str:
    return "" if share is None else f", {share:.0%} of the time waiting for other ranks"


class Trainer:
    """One rank's training run."""

    def __init__(
        self, settings: Settings, worker: Worker, workers: int, interruption: Interruption
    ) -> None:
        self.settings, self.worker, self.device = settings, worker, worker.device
        self.interruption, self.interrupted = interruption, False
        self.save_is_due = False
        folder = Path(settings.out)
        self.checkpoints = Checkpoints(folder / "checkpoints", worker.rank, worker.world_size)
        resume = self._is_resumed()
        self.batches = open_batches(
            settings, worker.rank, worker.world_size, worker.device, workers
        )
        self.steps_per_epoch = self.batches.order.steps_per_epoch
        self.total_steps = total_steps(settings, self.steps_per_epoch)
        self._build()
        self.step, self.seconds_before = 0, 0.0
        self.meter = Meter.zeros(self.device)
        if resume:
            self._resume()
        self.report = Report(folder, total=self.total_steps, done=self.step, is_main=worker.is_main)
        self.started = self.logged_at = time.perf_counter()
        self.logged_step, self.alarms = self.step, 0
        self.test_accuracy: float | None = None

    def _is_resumed(self) -> bool:
        if self.settings.resume:
            return True
        started = self.checkpoints.newest() is not None
        if started and not self.settings.auto_resume:
            raise RecipeError(
                f"--out {self.settings.out} already has checkpoints; add --resume to continue that "
                "run, or choose another folder"
            )
        return started

    def _build(self) -> None:
        """Build model, optimizer, learning rate and loss, and attach torchcomp."""
        settings, worker = self.settings, self.worker
        seed_all(settings.seed)
        self.memory_format = (
            torch.channels_last if settings.channels_last else torch.contiguous_format
        )
        module = self._build_module().to(self.device, memory_format=self.memory_format)
        # From here on, a different seed on each rank: dropout must differ between ranks. The
        # weights, which were drawn above, must not.
        seed_all(keyed_seed(NOISE, settings.seed, worker.rank))
        self.evaluator = Evaluator(
            settings,
            self.batches,
            module,
            memory_format=self.memory_format,
            device=self.device,
            world_size=worker.world_size,
        )
        device_ids = [self.device] if self.device.type == "cuda" else None
        self.model = DistributedDataParallel(module, device_ids=device_ids)
        self.optimizer = build_optimizer(settings, self.model)
        self.lr_at = lr_function(settings, self.steps_per_epoch)
        # QSR reads the learning rate from the optimizer, where LambdaLR writes it.
        self.scheduler = LambdaLR(self.optimizer, self.lr_at)
        self.scaler = grad_scaler(settings, self.device)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=settings.label_smoothing)
        self.method = attach_torchcomp(
            self.model,
            self.optimizer,
            self.scaler,
            settings,
            self.total_steps,
            on_alarm=self._on_alarm,
        )
        self.local = self.method if isinstance(self.method, torchcomp.LocalSGD) else None
        self.dense_bytes = dense_bytes(self.model, worker.world_size)

    def _build_module(self) -> nn.Module:
        settings, preset = self.settings, self.batches.preset
        module = build_model(
            settings.model,
            channels=preset.channels,
            classes=self.batches.classes,
            small_stem=settings.small_stem,
        )
        check_model(module, settings.model, channels=preset.channels, size=preset.size)
        return module

    # --- Training ---------------------------------------------------------------------------------

    def fit(self) -> bool:
        """Train to the last step and write all results; return False if a signal ended the run."""
        self._print_header()
        while self.step < self.total_steps:
            # After a resumption, the first epoch begins in the middle.
            self._train_epoch(self.step // self.steps_per_epoch, self.step % self.steps_per_epoch)
            if self.interrupted and self.step < self.total_steps:
                self.report.print(f"interrupted by a signal: exit with {REQUEUE}")
                return False
        # None if the run was already complete when it was resumed.
        accuracy = self.evaluate()[1] if self.test_accuracy is None else self.test_accuracy
        self._save_results(accuracy)
        return True

    def _print_header(self) -> None:
        settings = self.settings
        self.report.print(
            f"{settings.model} on {settings.dataset}: {self.worker.world_size} ranks, "
            f"{self.total_steps} steps ({self.steps_per_epoch} an epoch)\n"
            f"compress {settings.compress}, sync {settings.sync}, outer {settings.outer}"
        )
        if not self.batches.reproducible:
            self.report.print(
                "note: FFCV's random crops cannot be seeded, so this run is not reproducible bit "
                "for bit; with --loader torchvision it is"
            )
        if self.step:
            self.report.print(f"resumed after step {self.step}")

    def _train_epoch(self, epoch: int, first_step: int) -> None:
        self.model.train()
        self.speed = Speed(self.method)
        for images, targets in self.batches.train(epoch, first_step):
            loss = self._train_step(images.clone(memory_format=self.memory_format), targets)
            self.step += 1
            self.speed.images += self.settings.batch_size
            self.report.advance()
            if self.step % self.settings.log_every == 0:
                self._log_step(epoch, loss)
            if self.step % self.steps_per_epoch == 0:
                self._end_epoch(epoch)
            if self._end_step():
                return

    def _end_step(self) -> bool:
        """Save a checkpoint if it is time, and return whether a signal ends the run here."""
        every = self.settings.checkpoint_every
        self.save_is_due |= bool(every and self.step % every == 0)
        asked_to_stop = self.interruption.after_step(self.step)
        self.interrupted |= asked_to_stop and self.step < self.total_steps
        if not (self.save_is_due or self.interrupted) or not self._can_save():
            return False
        self._save_checkpoint()
        self.save_is_due = False
        return self.interrupted

    def _can_save(self) -> bool:
        """Whether a checkpoint of this step has what ``--elastic`` needs: equal weights."""
        inside_round = self.local is not None and self.local.next_sync is not None
        return not (self.settings.elastic and inside_round)

    def _train_step(self, images: Tensor, targets: Tensor) -> Tensor:
        count = self.settings.accumulate
        loss = torch.zeros((), device=self.device)
        micro_batches = zip(images.chunk(count), targets.chunk(count), strict=True)
        for index, (inputs, labels) in enumerate(micro_batches):
            # DDP exchanges the accumulated gradients once, in the last backward pass.
            is_last = index == count - 1
            with nullcontext() if is_last else self.model.no_sync():
                loss += self._backward(inputs, labels)
        self._clip_and_step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss

    def _backward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Accumulate the gradients of a micro-batch and return its share of the step's loss."""
        results: list[tuple[Tensor, Tensor]] = []

        def compute_loss() -> Tensor:
            with autocast(self.settings, self.device):
                scores = self.model(images)
                loss: Tensor = self.criterion(scores, targets)
            results.append((loss, scores))
            return loss / self.settings.accumulate

        if self._local_steps_in_fp16():
            # A GradScaler would skip the optimizer step only on the rank that overflows. Instead,
            # LocalSGD repeats the micro-batch at a lower scale, and unscales its gradients.
            loss = self.local.backward(compute_loss)
        else:
            loss = compute_loss()
            self.scaler.scale(loss).backward()
        # The last result is the one whose gradients are used. Repeated ones do not count.
        self.meter.add(*results[-1], targets)
        return loss.detach()

    def _local_steps_in_fp16(self) -> bool:
        return self.local is not None and self.scaler.is_enabled()

    def _clip_and_step(self) -> None:
        already_unscaled = self._local_steps_in_fp16()
        if self.settings.clip_norm:
            if not already_unscaled:
                self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        if already_unscaled:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    # --- Metrics and evaluation -------------------------------------------------------------------

    def _log_step(self, epoch: int, loss: Tensor) -> None:
        now = time.perf_counter()
        steps = self.step - self.logged_step
        self.report.log_metrics(
            step=self.step,
            epoch=epoch,
            loss=loss.item(),
            # The learning rate of the step just taken; `self.step` already counts it.
            lr=self.lr_at(self.step - 1),
            bytes_sent=self._bytes_sent(),
            synchronisations=self._synchronisations(),
            ms=1000 * (now - self.logged_at) / steps,
        )
        self.logged_at, self.logged_step = now, self.step

    def _on_alarm(self, alarm: torchcomp.Alarm) -> None:
        self.alarms += 1
        self.report.print(str(alarm))
        self.report.log_metrics(step=alarm.step, alarm=alarm.kind, message=alarm.message)

    def _bytes_sent(self) -> int:
        if self.method is None:
            return self.step * self.dense_bytes
        return self.method.stats.total_bytes_sent

    def _synchronisations(self) -> int:
        return self.step if self.local is None else self.local.stats.syncs

    def _end_epoch(self, epoch: int) -> None:
        loss, accuracy = self.meter.all_reduce()
        if not math.isfinite(loss):
            raise RecipeError(
                f"the training loss of epoch {epoch + 1} is {loss}: the run has diverged; lower "
                "--lr or raise --warmup-steps"
            )
        self.meter = Meter.zeros(self.device)
        # After the all-reduce of the meter, which waits for the device.
        speed = self.speed.measured()
        values: dict[str, Any] = {"train_loss": loss, "train_accuracy": accuracy, **speed}
        sent = self._bytes_sent()
        if (epoch + 1) % self.settings.eval_every == 0 or self.step == self.total_steps:
            test_loss, self.test_accuracy = self.evaluate()
            values |= {"test_loss": test_loss, "test_accuracy": self.test_accuracy}
            self.report.print(
                f"epoch {epoch + 1:>3}/{self.settings.epochs}: loss {loss:.3f}, "
                f"test {self.test_accuracy:.1%}, {sent / 1e6:,.3g} MB sent, "
                f"{speed['images_per_second']:,.0f} images/s{waiting(speed['wait_share'])}"
            )
        self.report.log_metrics(step=self.step, epoch=epoch, bytes_sent=sent, **values)

    def evaluate(self) -> tuple[float, float]:
        """Return the loss and accuracy of the averaged model on the whole test set."""
        next_epoch = (self.step - 1) // self.steps_per_epoch + 1
        return self.evaluator.evaluate(self.model.module, next_epoch)

    def _save_results(self, accuracy: float) -> None:
        # The model as it was evaluated after the last step.
        weights = self.evaluator.averaged.state_dict()
        equal = parameters_are_equal(self.model.module, self.worker.world_size)
        self.report.write_result("weights.pt", lambda file: torch.save(weights, file))
        summary = self._summary(accuracy, weights_sha256=sha256_of(weights), replicas_agree=equal)
        self.report.write_summary(summary)

    def _summary(self, accuracy: float, **more: Any) -> dict[str, Any]:
        sent, dense = self._bytes_sent(), self.step * self.dense_bytes
        control = 0 if self.method is None else self.method.stats.total_control_bytes_sent
        return {
            "test_accuracy": accuracy,
            "steps": self.step,
            "ranks": self.worker.world_size,
            "bytes_sent": sent,
            "control_bytes_sent": control,
            "bytes_per_step": sent / self.step,
            "dense_bytes_per_step": dense / self.step,
            # A single rank sends nothing.
            "traffic_saved": dense / sent if sent else None,
            "synchronisations": self._synchronisations(),
            "alarms": self.alarms,
            "seconds": self._seconds(),
            **more,
            "settings": as_plain_dict(self.settings),
        }

    def _seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.started

    # --- Checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything on this rank that the rest of the run depends on."""
        return {
            "step": self.step,
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            # torchcomp's state: residuals, or the weights at the last average.
            "method": self.method.state_dict() if self.method else None,
            "random": random_state(),
            "meter": self.meter.sums,
            "seconds": self._seconds(),
        }

    def _save_checkpoint(self) -> None:
        state, settings = self.state_dict(), self._settings_to_match()
        problem = self.checkpoints.save(self.step, state, settings)
        if problem is not None and self.interrupted:
            raise RecipeError(
                f"interrupted by a signal, and step {self.step} was not saved ({problem}). Solve "
                "that, and start the run again with --auto-resume: the checkpoint before is kept"
            )
        if problem is not None:
            # The disk may have space again at the next checkpoint.
            self.report.print(f"step {self.step} was not saved ({problem})")
        elif self.interrupted:
            self.report.print(f"saved step {self.step}")

    def _resume(self) -> None:
        make = self._resized if self.settings.elastic else None
        state = self.checkpoints.load(self._settings_to_match(), make)
        self._rebuild_ddp_buckets()
        # Only now, because DDP's constructor broadcasts the weights of rank 0. Between two
        # averages of local steps the weights differ between ranks.
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        if self.method is not None:
            self.method.load_state_dict(state["method"])
        self.meter.sums.copy_(state["meter"])
        self.step, self.seconds_before = state["step"], state["seconds"]
        set_random_state(state["random"])

    def _resized(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        rank, world_size = self.worker.rank, self.worker.world_size
        seed = keyed_seed(NOISE, self.settings.seed, rank, states[0]["step"])
        return resized(states, rank, world_size, seed)

    def _rebuild_ddp_buckets(self) -> None:
        """Run one blank batch, after which DDP rebuilds its buckets.

        DDP does this after the first backward pass of every process. The buckets decide in which
        order gradients are added (which matters from three ranks on), and which values compete
        for selection. To continue bit for bit, a resumed run needs the rebuilt buckets from its
        first step. The blank batch also changes BatchNorm's statistics and the residuals, so load
        the checkpoint afterwards.
        """
        # LocalSGD sends no gradients through DDP.
        if self.local is not None:
            return
        preset = self.batches.preset
        count = self.settings.batch_size // self.worker.world_size // self.settings.accumulate
        shape = (count, preset.channels, preset.size, preset.size)
        images = torch.zeros(shape, device=self.device).clone(memory_format=self.memory_format)
        with autocast(self.settings, self.device):
            self.model(images).sum().backward()
        self.optimizer.zero_grad()

    def _settings_to_match(self) -> dict[str, Any]:
        return {k: v for k, v in as_plain_dict(self.settings).items() if k not in _FREE_ON_RESUME}

    def close(self) -> None:
        """Remove torchcomp's hooks from the model, and leave no collective unfinished."""
        if self.method is not None:
            self.method.close()
        self.interruption.finish()


if __name__ == "__main__":
    main()
