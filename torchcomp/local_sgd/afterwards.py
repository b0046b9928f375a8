"""Afterwards: what an optimizer that took local steps is told when it goes on without them."""

import logging
import weakref
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torchcomp.ddp.checks import OWNER, trained_parameters
from torchcomp.local_sgd.moments import held_of

_log = logging.getLogger(__package__)


def warn_of_local_moments(optimizer: torch.optim.Optimizer, model: DistributedDataParallel) -> None:
    """Log, should the optimizer step again under DDP, that its moments are this rank's own.

    DDP keeps equal replicas equal, and no others: with momentum that differs they drift apart.
    """
    held, warned = weakref.ref(model), False

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal warned
        model = held()
        # Local steps may follow local steps.
        if model is None or warned or str(getattr(model, OWNER, "")).startswith("torchcomp.Local"):
            return
        warned = True
        moments = held_of(dict(trained_parameters(model)), [optimizer])
        if moments:
            _log.warning(
                "an optimizer goes on after LocalSGD.close() with moments that its local steps "
                "have made (%s, for one), which differ between the ranks unless you have made "
                "them equal: DDP's replicas then drift apart. Go on with a new optimizer, or build "
                'LocalSGD(..., moments="average")',
                min(moments),
            )

    optimizer.register_step_pre_hook(before_step)
