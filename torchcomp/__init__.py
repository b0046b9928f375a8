"""torchcomp: data-parallel training that is cheap on the network.

``torchcomp.register(model, "ef(topk(0.01))")`` compresses a DDP model's gradients;
``torchcomp.LocalSGD(model, optimizer, "qsr(...)", total_steps=T)`` trains with local steps.
"""

from torchcomp._version import __version__
from torchcomp.checkpoint import redistribute
from torchcomp.ddp import Handle, register
from torchcomp.errors import (
    CheckpointError,
    NonFiniteError,
    RankMismatchError,
    ScheduleError,
    SpecError,
    UnsupportedModelError,
    WireError,
)
from torchcomp.explain import Plan, explain, sync_steps
from torchcomp.local_sgd import LocalSGD
from torchcomp.spec import parse
from torchcomp.stats import Stats

__all__ = [
    "CheckpointError",
    "Handle",
    "LocalSGD",
    "NonFiniteError",
    "Plan",
    "RankMismatchError",
    "ScheduleError",
    "SpecError",
    "Stats",
    "UnsupportedModelError",
    "WireError",
    "__version__",
    "explain",
    "parse",
    "redistribute",
    "register",
    "sync_steps",
]
