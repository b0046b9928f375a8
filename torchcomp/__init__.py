"""torchcomp: data-parallel training with less network traffic.

- ``torchcomp.register(model, "ef(topk(0.01))")`` compresses the gradients of a DDP model.
- ``torchcomp.LocalSGD(model, optimizer, "qsr(...)", total_steps=T)`` trains with local steps.
- ``torchcomp.JointSpar(model, budget=0.5)`` skips whole layers.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from torchcomp.checkpoints.gathering import Gathered, PerRank
from torchcomp.checkpoints.redistribution import redistribute
from torchcomp.ddp.entry import register
from torchcomp.ddp.handle import Handle
from torchcomp.engine.averager import Averager
from torchcomp.engine.stats import Stats
from torchcomp.exchange import Exchange, InProcessExchange, ProcessGroupExchange, run_in_process
from torchcomp.jointspar import JointSpar
from torchcomp.local_sgd.batchnorm import reestimate_batchnorm
from torchcomp.local_sgd.local_sgd import LocalSGD
from torchcomp.specs import moved
from torchcomp.specs.auto import Auto
from torchcomp.specs.errors import (
    CheckpointError,
    NonFiniteError,
    RankFailureError,
    RankMismatchError,
    ScheduleError,
    SpecError,
    UnsupportedModelError,
    WireError,
)
from torchcomp.specs.spec import parse
from torchcomp.specs.version import __version__

if TYPE_CHECKING:
    from torchcomp.advisor.auto import Choice
    from torchcomp.advisor.costs import Plan
    from torchcomp.advisor.explain import explain, sync_steps
    from torchcomp.guard import Alarm, Guard, watch

__all__ = ["Alarm", "Auto", "Averager", "CheckpointError", "Choice", "Exchange", "Gathered"]
__all__ += ["Guard", "Handle", "InProcessExchange", "JointSpar", "LocalSGD", "NonFiniteError"]
__all__ += ["PerRank", "Plan", "ProcessGroupExchange", "RankFailureError", "RankMismatchError"]
__all__ += ["ScheduleError", "SpecError", "Stats", "UnsupportedModelError", "WireError"]
__all__ += ["__version__", "explain", "parse", "redistribute", "reestimate_batchnorm", "register"]
__all__ += ["run_in_process", "sync_steps", "watch"]


_LATER = {
    **dict.fromkeys(("Alarm", "Guard", "watch"), "torchcomp.guard"),
    "Choice": "torchcomp.advisor.auto",
    "Plan": "torchcomp.advisor.costs",
    **dict.fromkeys(("explain", "sync_steps"), "torchcomp.advisor.explain"),
}
"""What hangs on the core, by name: imported when it is asked for."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    if name in moved.MODULES:
        return sys.modules[f"{__name__}.{name}"]
    if name in moved.NAMES:
        return moved.found(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
