"""torchcomp: data-parallel training with less network traffic.

- ``torchcomp.register(model, "ef(topk(0.01))")`` compresses the gradients of a DDP model.
- ``torchcomp.LocalSGD(model, optimizer, "qsr(...)", total_steps=T)`` trains with local steps.
- ``torchcomp.JointSpar(model, budget=0.5)`` skips whole layers.
"""

import sys
from typing import TYPE_CHECKING, Any

from torchcomp import moved
from torchcomp._version import __version__
from torchcomp.auto import Auto
from torchcomp.averager import Averager
from torchcomp.batchnorm import reestimate_batchnorm
from torchcomp.ddp.handle import Handle
from torchcomp.errors import (
    CheckpointError,
    NonFiniteError,
    RankFailureError,
    RankMismatchError,
    ScheduleError,
    SpecError,
    UnsupportedModelError,
    WireError,
)
from torchcomp.exchange import Exchange, InProcessExchange, ProcessGroupExchange, run_in_process
from torchcomp.explain import explain, sync_steps
from torchcomp.gathering import Gathered
from torchcomp.jointspar import JointSpar
from torchcomp.local_sgd.local_sgd import LocalSGD
from torchcomp.per_rank import PerRank
from torchcomp.plan import Plan
from torchcomp.redistribution import redistribute
from torchcomp.register import register
from torchcomp.spec import parse
from torchcomp.stats import Stats

if TYPE_CHECKING:
    from torchcomp.advisor.auto import Choice
    from torchcomp.guard import Alarm, Guard, watch

__all__ = [
    "Alarm",
    "Auto",
    "Averager",
    "CheckpointError",
    "Choice",
    "Exchange",
    "Gathered",
    "Guard",
    "Handle",
    "InProcessExchange",
    "JointSpar",
    "LocalSGD",
    "NonFiniteError",
    "PerRank",
    "Plan",
    "ProcessGroupExchange",
    "RankFailureError",
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
    "reestimate_batchnorm",
    "register",
    "run_in_process",
    "sync_steps",
    "watch",
]


def __getattr__(name: str) -> Any:
    """Import what hangs on the core when it is asked for."""
    if name in ("Alarm", "Guard", "watch"):
        from torchcomp import guard

        return getattr(guard, name)
    if name == "Choice":
        from torchcomp.advisor.auto import Choice

        return Choice
    if name in moved.MODULES:
        return sys.modules[f"{__name__}.{name}"]
    if name in moved.NAMES:
        return moved.found(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
