"""Several seeds of a model as one module, which trains them all at once.

A step of a small model costs little but the calls and the wait for other ranks. Side by side, one
call computes all seeds, and one average of the parameters averages them all. The seeds stay
independent: the loss is the sum of theirs, and optimizers and averages treat every element on its
own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class EachInTurn(nn.Module):
    """S models of any kind, called one after another."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (N, S, ...) to scores (N, S, classes)."""
        each = zip(self.models, inputs.unbind(1), strict=True)
        return torch.stack([model(own) for model, own in each], dim=1)


class LinearStack(nn.Module):
    """S linear layers of the same shape as one batched product."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        weights = [layer.weight.detach().T for layer in layers]
        self.weight = nn.Parameter(torch.stack(weights).contiguous())
        self.bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in layers])[:, None])

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (N, S, in) to (N, S, out)."""
        return torch.baddbmm(self.bias, inputs.transpose(0, 1), self.weight).transpose(0, 1)


def stacked_mlp(models: Sequence[nn.Sequential]) -> nn.Sequential:
    """Return S multilayer perceptrons of the same shape as one, by :class:`LinearStack`."""
    layers: list[nn.Module] = [nn.Flatten(2)]
    for same in zip(*models, strict=True):
        if isinstance(same[0], nn.Linear):
            layers.append(LinearStack(same))
        elif isinstance(same[0], nn.ReLU):
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


@torch.no_grad()
def average_over_ranks(model: nn.Module, ranks: int, *, gradients: bool = False) -> None:
    """Average the parameters, or the gradients, of ranks that are side by side.

    Args:
        model: ranks * S models: the S models of the first rank, then those of the next.
        ranks: how many ranks they belong to.
        gradients: average gradients in place of parameters.
    """
    # The tensors of a model are the first dimension of a stack, or parameters of their own.
    models = model.models if isinstance(model, EachInTurn) else [model]
    for same in zip(*(each.parameters() for each in models), strict=True):
        tensors = [_gradient(tensor) if gradients else tensor.detach() for tensor in same]
        whole = tensors[0] if len(tensors) == 1 else torch.stack(tensors)
        by_rank = whole.unflatten(0, (ranks, -1))
        by_rank.copy_(by_rank.sum(0) / ranks)
        if len(tensors) > 1:
            for tensor, own in zip(tensors, whole, strict=True):
                tensor.copy_(own)


def first_models(model: nn.Module, count: int) -> nn.Module:
    """Return the first models of some that are side by side. A stack loses the others."""
    if isinstance(model, EachInTurn):
        return EachInTurn([*model.models[:count]])
    for parameter in model.parameters():
        parameter.data = parameter.data[:count]
    return model


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
