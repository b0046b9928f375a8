"""What ``--compress`` and ``--sync`` attach to a DDP model, behind one face."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from settings import Settings
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import torchcomp
from torchcomp.learning_rates import LRFunction
from torchcomp.spec import parse_aggregator, parse_outer_step, parse_schedule


class Dense:
    """Plain DDP, and what the other methods share with it: steps, and the count of its traffic."""

    averages_weights = False
    """Whether the ranks' weights differ between two exchanges."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, ranks: int, scaler: GradScaler
    ) -> None:
        self._optimizer, self._scaler = optimizer, scaler
        self._dense_bytes = dense_bytes(model, ranks)

    def backward(self, compute: Callable[[], Tensor]) -> Tensor:
        """Add the gradients of a micro-batch, whose loss ``compute`` returns; return the loss."""
        loss = compute()
        self._scaler.scale(loss).backward()
        return loss.detach()

    def step(self, clip_norm: float) -> None:
        """Clip the gradient to ``clip_norm`` (0: do not) and take the optimizer's step."""
        if clip_norm:
            self._scaler.unscale_(self._optimizer)
            self._clip(clip_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def _clip(self, norm: float) -> None:
        clip_grad_norm_(
            [p for group in self._optimizer.param_groups for p in group["params"]], norm
        )

    def bytes_sent(self, steps: int) -> int:
        """Return the bytes that this rank has sent in its first ``steps`` steps."""
        return self.dense_bytes_sent(steps)

    def dense_bytes_sent(self, steps: int) -> int:
        """Return the bytes that dense training would have sent."""
        return steps * self._dense_bytes

    def synchronisations(self, steps: int) -> int:
        """Return how often the ranks have exchanged gradients or weights."""
        return steps

    def state_dict(self) -> dict[str, Any] | None:
        """Return this rank's residual or local progress."""
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from a state of the same method and rank."""

    def close(self) -> None:
        """Take every hook off the model again."""


class Compressed(Dense):
    """What ``torchcomp.register`` attaches."""

    def __init__(self, attached: Any, model: nn.Module, optimizer: Optimizer, **more: Any) -> None:
        super().__init__(model, optimizer, **more)
        self._attached = attached

    def bytes_sent(self, steps: int) -> int:
        return int(self._attached.stats.total_bytes_sent)

    def state_dict(self) -> dict[str, Any] | None:
        state: dict[str, Any] = self._attached.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self._attached.load_state_dict(state)

    def close(self) -> None:
        self._attached.close()


class LocalSteps(Compressed):
    """What ``torchcomp.LocalSGD`` attaches: ranks step on their own and average their weights."""

    averages_weights = True

    def synchronisations(self, steps: int) -> int:
        return int(self._attached.stats.syncs)


class Float16LocalSteps(LocalSteps):
    """Local steps in float16, where none may skip a step that the others take.

    A micro-batch that overflows is computed again at a lower scale, as in the paper.
    """

    def backward(self, compute: Callable[[], Tensor]) -> Tensor:
        loss: Tensor = self._attached.backward(compute)
        return loss.detach()

    def step(self, clip_norm: float) -> None:
        # Their gradients are not scaled.
        if clip_norm:
            self._clip(clip_norm)
        self._optimizer.step()


def attach(
    settings: Settings,
    model: DistributedDataParallel,
    optimizer: Optimizer,
    *,
    total_steps: int,
    ranks: int,
    scaler: GradScaler,
) -> Dense:
    """Attach what ``--compress`` and ``--sync`` ask for.

    This is the line that torchcomp adds to a script: `register`, or `LocalSGD`, or none.
    """
    handed = scaler if scaler.is_enabled() else None
    if settings.sync != "none":
        local = torchcomp.LocalSGD(
            model,
            optimizer,
            settings.sync,
            total_steps=total_steps,
            warmup_steps=settings.warmup_steps,
            scaler=handed,
            compress=averager(settings),
            outer=outer_step(settings),
            seed=settings.seed,
        )
        kind = LocalSteps if handed is None else Float16LocalSteps
        return kind(local, model, optimizer, ranks=ranks, scaler=scaler)
    if settings.compress != "none":
        handle = torchcomp.register(model, settings.compress, seed=settings.seed, scaler=handed)
        return Compressed(handle, model, optimizer, ranks=ranks, scaler=scaler)
    return Dense(model, optimizer, ranks=ranks, scaler=scaler)


def dense_bytes(model: nn.Module, ranks: int) -> int:
    """Return the bytes that a rank sends in one dense step."""
    return int(torchcomp.explain("mean", model=model, world_size=ranks).dense_bytes_sent)


def averager(settings: Settings) -> str:
    """Return the method by which gradients or, with ``--sync``, weights are averaged."""
    return "mean" if settings.compress == "none" else settings.compress


def outer_step(settings: Settings) -> str | None:
    """Return what follows an average of the weights, if anything does."""
    return None if settings.outer == "none" else settings.outer


def check_specs(settings: Settings) -> None:
    """Refuse a ``--compress``, ``--sync`` or ``--outer`` that torchcomp cannot read."""
    if settings.compress != "none":
        parse_aggregator(settings.compress)
    if settings.sync != "none":
        parse_schedule(settings.sync)
    if settings.outer != "none":
        parse_outer_step(settings.outer)


@dataclass(frozen=True)
class Cost:
    """What a run exchanges.

    Attributes:
        plan: bytes per rank and step, averaged over the run.
        exchanges: of gradients or of weights, in the whole run.
        bytes_in_all: that a rank sends in the whole run.
    """

    plan: torchcomp.Plan
    exchanges: int
    bytes_in_all: int


def planned(
    settings: Settings, model: nn.Module, *, rate: LRFunction, total_steps: int, ranks: int
) -> Cost:
    """Return what the method will send."""
    how = averager(settings)
    if settings.sync == "none":
        plan = torchcomp.explain(how, model=model, world_size=ranks)
        return Cost(plan, total_steps, total_steps * plan.bytes_sent)
    once = torchcomp.explain(
        "every(1)", model=model, world_size=ranks, total_steps=1, compress=how
    ).bytes_sent
    plan = torchcomp.explain(
        settings.sync,
        model=model,
        world_size=ranks,
        lr=rate,
        total_steps=total_steps,
        warmup_steps=settings.warmup_steps,
        compress=how,
        outer=outer_step(settings),
    )
    assert plan.syncs is not None, "a schedule's plan counts them"
    return Cost(plan, plan.syncs, plan.syncs * once)
