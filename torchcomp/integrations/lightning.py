"""Lightning: callbacks that compress gradients or take local steps, and save every rank's state.

They work with ``lightning`` and with ``pytorch_lightning``.
"""

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from torchcomp import Gathered, Handle, LocalSGD, register
from torchcomp.specs.component import Component
from torchcomp.specs.errors import UnsupportedModelError

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback


class _OnTrainStart(Callback):  # type: ignore[misc]
    """Installs torchcomp in `on_train_start`, once the model is wrapped and a checkpoint loaded."""

    def __init__(self, spec: str | Component, **options: Any) -> None:
        self.spec, self.options = spec, options
        self._gathered: Gathered | None = None
        self._loaded: dict[str, Any] | None = None

    def _install(self, trainer: Any, model: DistributedDataParallel) -> Gathered:
        raise NotImplementedError  # return what a checkpoint must contain

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._gathered = self._install(trainer, _ddp_model(trainer))
        if self._loaded is not None:
            self._gathered.load_state_dict(self._loaded)
            self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        # Lightning calls this on all ranks and writes what rank 0 returns.
        state = self._loaded if self._gathered is None else self._gathered.state_dict()
        return state or {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state


class Compression(_OnTrainStart):
    """Compress gradients: ``Trainer(strategy="ddp", callbacks=[Compression("ef(topk(0.01))")])``.

    Lightning's checkpoints then contain the residuals of all ranks. They resume with
    ``trainer.fit(..., ckpt_path=...)``, also with another number of ranks.

    Args:
        spec: the method, as for :func:`torchcomp.register`.
        options: further options of :func:`torchcomp.register`. Lightning's scaler is passed.

    Attributes:
        handle: the handle, from ``on_train_start`` on; None before.

    Raises:
        UnsupportedModelError: when training starts, if the strategy is not DDP or has a
            communication hook of its own; and as :func:`torchcomp.register`.
    """

    handle: Handle | None = None

    def _install(self, trainer: Any, model: DistributedDataParallel) -> Gathered:
        self.handle = register(model, self.spec, **{"scaler": _scaler(trainer), **self.options})
        return Gathered(self.handle)


class LocalSteps(_OnTrainStart):
    """Take local steps: ``Trainer(strategy="ddp", callbacks=[LocalSteps("every(8)")])``.

    Inside a round, every rank has its own weights: validate and save between rounds, or know that
    you validate a rank's own model. Checkpoints also contain every rank's weights and optimizer
    state, which rank 0 collects in its memory.

    Args:
        spec: the schedule, as for :class:`torchcomp.LocalSGD`.
        options: further options of :class:`torchcomp.LocalSGD`. By default, ``total_steps`` is
            ``trainer.estimated_stepping_batches``. Lightning's scaler is passed.

    Attributes:
        sync: the LocalSGD, from ``on_train_start`` on; None before.

    Raises:
        SpecError: when training starts, if the trainer does not know its number of steps.
        UnsupportedModelError: as for :class:`Compression`.
    """

    sync: LocalSGD | None = None

    def _install(self, trainer: Any, model: DistributedDataParallel) -> Gathered:
        scaler, steps = _scaler(trainer), trainer.estimated_stepping_batches
        options = {"scaler": scaler, "total_steps": steps, **self.options}
        self.sync = LocalSGD(model, trainer.optimizers, self.spec, **options)
        optimizers = {f"optimizer{i}": each for i, each in enumerate(trainer.optimizers)}
        return Gathered(self.sync, model=model.module, **optimizers)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        # The next fit() wraps the same module again, and only one LocalSGD can average it.
        if self.sync is not None:
            self.sync.close()


def _scaler(trainer: Any) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def _ddp_model(trainer: Any) -> DistributedDataParallel:
    """Return the DDP model of a trainer, or raise UnsupportedModelError."""
    strategy = trainer.strategy
    if not isinstance(strategy.model, DistributedDataParallel):
        problem = f"{type(strategy).__name__} does not wrap the model in DistributedDataParallel"
        raise UnsupportedModelError(f"{problem}: use Trainer(strategy='ddp')")
    # On CPU, Lightning ignores this hook, so that torchcomp.register does not find it.
    if getattr(strategy, "_ddp_comm_hook", None) is not None:
        raise UnsupportedModelError(
            "DDP takes one communication hook: build DDPStrategy without ddp_comm_hook, or leave "
            "this callback out"
        )
    return strategy.model
