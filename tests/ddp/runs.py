"""One rank that trains a small DDP model with a method."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchcomp
from tests.support.models import Account, loss_of, mlp, optimizer_step, rows, weights, wrap

TOPK = "ef(topk(0.1))"


class Run:
    """A model, its handle and its optimizer; `options` are those of register."""

    def __init__(
        self,
        spec: str = TOPK,
        module: nn.Module | None = None,
        *,
        dtype: torch.dtype = torch.float64,
        ddp: dict[str, Any] | None = None,
        lr: float = 0.05,
        momentum: float = 0.0,
        **options: Any,
    ) -> None:
        self.dtype, self.scaler = dtype, options.get("scaler")
        self.model = wrap(mlp(dtype) if module is None else module, **(ddp or {}))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=momentum)
        self.handle = torchcomp.register(self.model, spec, **options)
        self.account = Account()

    def loss(self, step: int) -> Tensor:
        return loss_of(self.model(rows(step, self.dtype)))

    def backward(self, step: int, times: float = 1.0) -> None:
        loss = self.loss(step) * times
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, step: int, times: float = 1.0, account: bool = False) -> None:
        self.optimizer.zero_grad()
        self.backward(step, times)
        if account and self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if account:
            self.account.note(self.model, (rows(step, self.dtype),))
        optimizer_step(self.optimizer, self.scaler)

    def train(self, *steps: int, account: bool = False) -> "Run":
        for step in steps:
            self.step(step, account=account)
        return self

    def poison(self, value: float, rank: int = 1, layer: str = "4.weight") -> Any:
        """Spoil one entry of a gradient on one rank, until the returned hook is removed."""

        def spoil(gradient: Tensor) -> Tensor:
            spoilt = gradient.clone()
            spoilt[0, 0] = value
            return spoilt if dist.get_rank() == rank else gradient

        return dict(self.model.module.named_parameters())[layer].register_hook(spoil)

    @property
    def weights(self) -> Tensor:
        return weights(self.model.module)

    @property
    def state(self) -> Any:
        return self.handle.state_dict()

    def closed(self) -> Account:
        """Return the account with the residual at the end."""
        self.handle.close()
        return self.account.close(self.handle)


def without_traffic(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state without its counters: a step that is discarded has sent its bytes."""
    return {name: value for name, value in state.items() if name != "traffic"}
