"""What ``--compress`` and ``--sync`` attach to a DDP model, behind one face."""

from typing import Any

from lr_schedules import Rate
from settings import Settings
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import torchcomp


class Method:
    """Dense, compressed or local-step training of one DDP model, with its traffic counted.

    This is the line that torchcomp adds to a script: `register`, or `LocalSGD`, or none.
    """

    def __init__(
        self,
        settings: Settings,
        model: DistributedDataParallel,
        optimizer: Optimizer,
        *,
        total_steps: int,
        ranks: int,
        scaler: GradScaler | None,
    ) -> None:
        self.averages_weights = settings.sync != "none"
        self._attached: Any = None
        if self.averages_weights:
            self._attached = torchcomp.LocalSGD(
                model,
                optimizer,
                settings.sync,
                total_steps=total_steps,
                warmup_steps=settings.warmup_steps,
                scaler=scaler,
            )
        elif settings.compress != "none":
            self._attached = torchcomp.register(
                model, settings.compress, seed=settings.seed, scaler=scaler
            )
        self._dense_bytes = dense_bytes(model, ranks)

    def bytes_sent(self, steps: int) -> int:
        """Return the bytes that this rank has sent in its first ``steps`` steps."""
        if self._attached is None:
            return steps * self._dense_bytes
        return int(self._attached.stats.total_bytes_sent)

    def dense_bytes_sent(self, steps: int) -> int:
        """Return the bytes that dense training would have sent."""
        return steps * self._dense_bytes

    def synchronisations(self, steps: int) -> int:
        """Return how often the ranks have exchanged gradients or weights."""
        return int(self._attached.stats.syncs) if self.averages_weights else steps

    def state_dict(self) -> dict[str, Any] | None:
        """Return this rank's error memory or local progress."""
        return None if self._attached is None else self._attached.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from a state of the same method and rank."""
        if self._attached is not None:
            self._attached.load_state_dict(state)

    def close(self) -> None:
        """Take every hook off the model again."""
        if self._attached is not None:
            self._attached.close()


def dense_bytes(model: nn.Module, ranks: int) -> int:
    """Return the bytes that a rank sends in one dense step."""
    return int(torchcomp.explain("mean", model=model, world_size=ranks).dense_bytes_sent)


def check_specs(settings: Settings) -> None:
    """Refuse a ``--compress`` or ``--sync`` that torchcomp cannot read."""
    if settings.compress != "none":
        torchcomp.parse(settings.compress)
    if settings.sync != "none":
        torchcomp.sync_steps(settings.sync, lr=lambda step: settings.lr, total_steps=1)


def planned(
    settings: Settings, model: nn.Module, *, rate: Rate, total_steps: int, ranks: int
) -> torchcomp.Plan:
    """Return what the method will send per rank and step, averaged over the run."""
    if settings.sync == "none":
        spec = "mean" if settings.compress == "none" else settings.compress
        return torchcomp.explain(spec, model=model, world_size=ranks)
    return torchcomp.explain(
        settings.sync,
        model=model,
        world_size=ranks,
        lr=rate,
        total_steps=total_steps,
        warmup_steps=settings.warmup_steps,
    )
