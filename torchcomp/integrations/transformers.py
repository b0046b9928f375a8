"""Transformers: callbacks for its Trainer, which save every rank's state into its checkpoints."""

from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from torchcomp import Gathered, Handle, LocalSGD, register
from torchcomp.specs.component import Component
from torchcomp.specs.errors import CheckpointError, UnsupportedModelError

FILE = "torchcomp.pt"
"""Name of the file with the states of all ranks, in the Trainer's checkpoint folder."""


class _OnTrainBegin(TrainerCallback):  # type: ignore[misc]
    """Installs torchcomp in `on_train_begin`. Only the Trainer has the wrapped model."""

    def __init__(
        self,
        trainer: Any,
        spec: str | Component,
        *,
        resume_from: str | Path | None = "auto",
        **options: Any,
    ) -> None:
        self.spec, self.options, self.resume_from = spec, options, resume_from
        self._trainer = trainer
        self._gathered: Gathered | None = None

    def _install(self, model: DistributedDataParallel, dst: int | None) -> Gathered:
        raise NotImplementedError  # return what a checkpoint must contain

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = self._trainer.model_wrapped
        if not isinstance(model, DistributedDataParallel):
            raise UnsupportedModelError(
                f"the Trainer has not wrapped {type(model).__name__} in DistributedDataParallel: "
                "start a process per device with torchrun or accelerate launch, without FSDP"
            )
        # With save_on_each_node, a rank of every node writes.
        self._gathered = self._install(model, None if args.save_on_each_node else 0)
        if state.global_step and self.resume_from is not None:
            # Inside build(): without a shared file system, only some ranks may find the file.
            ranks = self._gathered.exchange
            loaded = ranks.build("resume", {}, lambda: (self._load(_folder(args, state)), {}))
            self._gathered.load_state_dict(loaded)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._gathered is None or args.save_only_model:
            return
        gathered = self._gathered.state_dict()  # all ranks take part
        if args.should_save:
            torch.save(gathered, _folder(args, state) / FILE)

    def _load(self, folder: Path) -> Any:
        # The Trainer does not tell callbacks which checkpoint it resumes from.
        path = (folder if self.resume_from == "auto" else Path(str(self.resume_from))) / FILE
        if not path.exists():
            raise CheckpointError(
                f"there is no {path}: pass resume_from='the checkpoint folder' to the callback, or "
                "resume_from=None to resume a run that was trained without it"
            )
        return torch.load(path, map_location="cpu", weights_only=True)


class CompressionCallback(_OnTrainBegin):
    """Compress gradients: ``trainer.add_callback(CompressionCallback(trainer, "ef(topk(0.01))"))``.

    Args:
        trainer: the Trainer that the callback is added to.
        spec: the method, as for :func:`torchcomp.register`.
        resume_from: the checkpoint folder with this callback's file ``torchcomp.pt``, if the run
            resumes. "auto" is ``checkpoint-<step>`` in the Trainer's ``output_dir``, and None loads
            nothing.
        options: further options of :func:`torchcomp.register`. The Trainer's scaler is passed.

    Attributes:
        handle: the handle, from ``on_train_begin`` on; None before.

    Raises:
        UnsupportedModelError: when training begins, if the Trainer did not wrap its model in DDP;
            and as :func:`torchcomp.register`.
        CheckpointError: when training begins, if the file is missing or does not fit.
    """

    handle: Handle | None = None
    _registered: DistributedDataParallel | None = None

    def _install(self, model: DistributedDataParallel, dst: int | None) -> Gathered:
        # A second train() uses the same DDP model, whose hook stays.
        if self.handle is None or self._registered is not model:
            scaler = self._trainer.accelerator.scaler
            self.handle = register(model, self.spec, **{"scaler": scaler, **self.options})
            self._registered = model
        return Gathered(self.handle, dst=dst)


class LocalStepsCallback(_OnTrainBegin):
    """Take local steps: ``trainer.add_callback(LocalStepsCallback(trainer, "every(8)"))``.

    Inside a round, every rank has its own weights: let ``save_steps`` and ``eval_steps`` be
    multiples of the period, or know that the Trainer saves and evaluates rank 0's. Checkpoints also
    contain every rank's weights and optimizer state, which rank 0 collects in its memory.

    Args:
        trainer: the Trainer that the callback is added to.
        spec: the schedule, as for :class:`torchcomp.LocalSGD`.
        resume_from: see :class:`CompressionCallback`.
        options: further options of :class:`torchcomp.LocalSGD`. By default, ``total_steps`` is the
            Trainer's. Its scaler is passed.

    Attributes:
        sync: the LocalSGD, from ``on_train_begin`` on; None before.

    Raises:
        UnsupportedModelError, CheckpointError: as for :class:`CompressionCallback`.
    """

    sync: LocalSGD | None = None

    def _install(self, model: DistributedDataParallel, dst: int | None) -> Gathered:
        trainer = self._trainer
        optimizer = trainer.optimizer.optimizer  # inside Accelerate's
        scaler, total_steps = trainer.accelerator.scaler, trainer.state.max_steps
        options = {"scaler": scaler, "total_steps": total_steps, **self.options}
        self.sync = LocalSGD(model, optimizer, self.spec, **options)
        return Gathered(self.sync, dst=dst, model=model.module, optimizer=optimizer)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A second train() uses the same DDP model and another optimizer.
        if self.sync is not None:
            self.sync.close()


def _folder(args: Any, state: Any) -> Path:
    """Return the folder of the Trainer's checkpoint at the current step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
