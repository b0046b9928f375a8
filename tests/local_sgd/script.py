"""A small training script that the tests of local steps run on every rank."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import torchcomp
from tests.support.models import kept, optimizer_step, seeded
from tests.support.outcomes import equal_on_all, flat

sgd = partial(torch.optim.SGD, lr=1.0)
momentum = partial(torch.optim.SGD, lr=1.0, momentum=0.9, weight_decay=0.01)
adamw = partial(torch.optim.AdamW, lr=1.0, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.05)


def constant(step: int) -> float:
    return 0.05


def cosine(step: int, *, peak: float, warmup: int, total: int) -> float:
    """Linear warm-up from peak/1000, then a cosine to peak/1000 at `total`."""
    floor = peak / 1000
    if step < warmup:
        return floor + (peak - floor) * step / warmup
    done = (step - warmup) / (total - warmup)
    return floor + (peak - floor) * (1 + math.cos(math.pi * done)) / 2


def mlp(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)).double()


def float32_mlp() -> nn.Module:
    return mlp().float()


def convnet(channels: int = 4) -> nn.Module:
    """A network for inputs of 3 x 4 x 4."""
    first = [nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*first, nn.Linear(4 * channels, 3)).double()


def running_statistics(model: nn.Module) -> Tensor:
    """A copy of the statistics of `convnet`'s BatchNorm layer inside of DDP."""
    layer = model.module[1]
    return torch.cat([layer.running_mean, layer.running_var])


def batch(rank: int, step: int, shape: tuple[int, ...] = (6,)) -> tuple[Tensor, Tensor]:
    """The inputs and targets of `rank` in the step after `step` others."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(5, *shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(5, 3, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    dtype = next(model.parameters()).dtype
    return (model(inputs.to(dtype)) - targets.to(dtype)).square().mean()


def unsent(states: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The mean residual of all ranks plus the server residual, by parameter."""
    found, server = {}, [kept(state, "server_error") for state in states]
    for name in states[0]["parameters"]:
        errors = [kept(state, "error")[name].flatten().double() for state in states]
        shards = [shard[name] for shard in server if name in shard]
        mean = torch.stack(errors).mean(0)
        found[name] = mean + torch.cat(shards) if shards else mean
    return found


class Script:
    """A typical training script, on the calling rank; with plain DDP if `spec` is None.

    `local` has further options of LocalSGD. With `inside`, a method for gradients, and its options
    `register`, DDP compresses inside the nodes.
    """

    def __init__(
        self,
        spec: str | None = "every(3)",
        total_steps: int = 12,
        *,
        build: Callable[[], nn.Module] = mlp,
        optimizer: Callable[..., torch.optim.Optimizer] = momentum,
        lr: Callable[[int], float] = constant,
        warmup_steps: int = 0,
        scaler: torch.amp.GradScaler | None = None,
        shape: tuple[int, ...] = (6,),
        local: dict[str, Any] | None = None,
        inside: str | None = None,
        register: dict[str, Any] | None = None,
        **ddp: Any,
    ) -> None:
        self.rank = dist.get_rank()
        self.model = DistributedDataParallel(seeded(build()), **ddp)
        self.optimizer = optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.handle = inside and torchcomp.register(self.model, inside, **(register or {}))
        self.scheduler = LambdaLR(self.optimizer, lr)
        self.scaler, self.shape = scaler, shape
        options = {"total_steps": total_steps, "warmup_steps": warmup_steps, "scaler": scaler}
        options |= local or {}
        self.sync = spec and torchcomp.LocalSGD(self.model, self.optimizer, spec, **options)

    def backward(self, step: int, scale: float = 1.0) -> None:
        loss = loss_of(self.model, *batch(self.rank, step, self.shape)) * scale
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def optimizer_step(self) -> None:
        optimizer_step(self.optimizer, self.scaler)

    def step(self, step: int, scale: float = 1.0) -> Tensor:
        self.optimizer.zero_grad()
        self.backward(step, scale)
        self.optimizer_step()
        weights = self.weights()
        self.scheduler.step()
        return weights

    def train(self, start: int, stop: int) -> list[Tensor]:
        return [self.step(step) for step in range(start, stop)]

    def weights(self) -> Tensor:
        return flat(self.model.parameters())

    def buffers(self) -> Tensor:
        return flat(self.model.buffers())

    def _parts(self) -> dict[str, Any]:
        parts = {"model": self.model.module, "optimizer": self.optimizer}
        return parts | {"scheduler": self.scheduler, "sync": self.sync}

    def save(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load(self, saved: dict[str, Any]) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(saved[name])


def spied(make: Callable[..., torch.optim.Optimizer], look: Callable[[], None]) -> Any:
    """An optimizer that calls `look` after its local step and before any average."""

    def build(parameters: Any) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        optimizer.register_step_post_hook(lambda *_: look())
        return optimizer

    return build


def trained(steps: int, **options: Any) -> list[Tensor]:
    return Script(**options).train(0, steps)


def synchronised_steps(runs: list[list[Tensor]]) -> list[int]:
    """The steps, counted from 1, after which all ranks have the same weights."""
    steps = enumerate(zip(*runs, strict=True), 1)
    return [step for step, weights in steps if equal_on_all(weights)]
