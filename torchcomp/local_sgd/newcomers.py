"""Newcomers: parameters that begin to be trained after local steps have begun."""

import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchcomp.bucket import partition
from torchcomp.ddp.checks import bucket_caps, trained_parameters
from torchcomp.errors import UnsupportedModelError
from torchcomp.local_sgd.checks import check_values, held_by
from torchcomp.local_sgd.fragments import Fragment
from torchcomp.local_sgd.turns import Turns
from torchcomp.local_sgd.weights import Weights


class Newcomers:
    """Finds them at the beginning of a step, before their first change.

    Args:
        model: the DDP model.
        weights: all parameters that are averaged; newcomers are added.
        fragments: the same; a newcomer joins the last one of the optimizer that holds it.
        two_levels: whether DDP reduces gradients inside nodes.

    Attributes:
        described: what came since the caller last looked, for the comparison of the ranks.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        weights: Weights,
        fragments: Sequence[Fragment],
        two_levels: bool,
    ) -> None:
        self._model = weakref.ref(model)
        self._weights = weights
        self._fragments = fragments
        self._two_levels = two_levels
        self._reduced = {id(parameter) for _, parameter in trained_parameters(model)}
        named = model.module.named_parameters()
        ignored = {id(p) for name, p in named if name in model.parameters_to_ignore}
        self._known = ignored | {id(p) for p in weights.parameters.values()}
        self.described: list[str] = []

    def take_in(self, turns: Turns) -> None:
        """Average what the optimizers have begun to train of the model.

        Raises:
            UnsupportedModelError: if a newcomer cannot be averaged, or DDP, which does not know it,
                would have to reduce its gradients.
        """
        model = self._model()
        for place, optimizer in enumerate(turns):
            if model is not None and self._holds_unknown(optimizer):
                self._take_from(model, place, optimizer)

    def _holds_unknown(self, optimizer: torch.optim.Optimizer) -> bool:
        held = (p for group in optimizer.param_groups for p in group["params"])
        return any(p.requires_grad and id(p) not in self._known for p in held)

    def _take_from(
        self, model: DistributedDataParallel, place: int, optimizer: torch.optim.Optimizer
    ) -> None:
        unknown = {
            name.replace("_orig_mod.", ""): parameter
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and id(parameter) not in self._known
        }
        new = {name: unknown[name] for name in held_by(optimizer, unknown)}
        if not new:
            return
        strange = [name for name, parameter in new.items() if id(parameter) not in self._reduced]
        if strange and self._two_levels:
            raise UnsupportedModelError(
                f"parameter '{strange[0]}' was frozen or not in the model when "
                "DistributedDataParallel was built, which does not reduce its gradients inside the "
                "nodes: close(), build DistributedDataParallel anew, and LocalSGD after it"
            )
        check_values(model)
        self._add(model, place, new)

    def _add(
        self, model: DistributedDataParallel, place: int, new: dict[str, nn.Parameter]
    ) -> None:
        home = [fragment for fragment in self._fragments if place in fragment.part.owners][-1]
        home.weights.parameters |= new
        for group in partition(new.items(), bucket_caps(model)):
            home.averaging.add(group)
        self._weights.parameters |= new
        self._known |= {id(parameter) for parameter in new.values()}
        digest = Weights(new).digest() if home.averaging.needs_equal_start else 0
        self.described.append(f"{', '.join(new)} (checksum {digest})")
