"""A training run on the device, which can be saved, resumed and disturbed."""

import io
from typing import Any

import torch
from torch import Tensor, nn

import torchcomp
from tests.gpu.place import DEVICE, KIND, WIDTH
from tests.support.models import (
    SMALL_BUCKETS,
    Account,
    loss_of,
    mlp,
    optimizer_step,
    rows,
    wrap,
)
from tests.support.outcomes import flat

Snapshot = dict[str, Any]
PLAIN = "plain DDP"


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    return mlp(dtype, WIDTH)


class Run:
    """One rank's model, optimizer and handle. `spec` is a method or PLAIN."""

    def __init__(
        self,
        spec: str,
        *,
        dtype: torch.dtype = torch.float32,
        place: torch.device = DEVICE,
        module: nn.Module | None = None,
        scale: float | None = None,
        seed: int = 5,
        nodes: int | None = None,
        **ddp: Any,
    ) -> None:
        self.dtype, self.place = dtype, place
        options = {"bucket_cap_mb": SMALL_BUCKETS, **ddp}
        self.model = wrap((module or model_of(dtype)).to(place), **options)
        self.scaler = None if scale is None else torch.amp.GradScaler(KIND, init_scale=scale)
        self.handle = None
        if spec != PLAIN:
            own = {"seed": seed, "scaler": self.scaler, "nodes": nodes}
            self.handle = torchcomp.register(self.model, spec, **own)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.account = Account()

    def rows(self, step: int) -> Tensor:
        return rows(step, self.dtype, WIDTH).to(self.place)

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        # A mean, not a sum: the gradients of wide models stay in the range of float16.
        loss = loss_of(self.model(self.rows(step))) / WIDTH
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def optimizer_step(self) -> None:
        optimizer_step(self.optimizer, self.scaler)

    def train(self, start: int, stop: int) -> "Run":
        for step in range(start, stop):
            self.backward(step)
            self.optimizer_step()
        return self

    def weights(self) -> Tensor:
        return flat(self.model.module.parameters()).cpu()

    def residual(self) -> Tensor:
        slots = self.handle.state_dict()["slots"].values() if self.handle else ()
        tensors = [tensor for slot in slots for tensor in slot["tensors"].values()]
        return flat([torch.zeros(1), *(tensor.cpu() for tensor in tensors)])

    def save(self) -> bytes:
        file = io.BytesIO()
        parts = {"model": self.model.module, "optimizer": self.optimizer, "handle": self.handle}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        return file.getvalue()

    def load(self, saved: bytes) -> "Run":
        state = torch.load(io.BytesIO(saved), map_location=self.place, weights_only=True)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.handle.load_state_dict(state["handle"])
        return self

    def close(self) -> None:
        if self.handle is not None:
            self.handle.close()


def trained(spec: str, steps: int = 6, **options: Any) -> Tensor:
    """Train a new run; return its weights."""
    run = Run(spec, **options).train(0, steps)
    run.close()
    return run.weights()
