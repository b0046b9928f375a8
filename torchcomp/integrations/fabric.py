"""Lightning Fabric: the DDP model inside the module that ``fabric.setup`` returns."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchcomp.specs.errors import UnsupportedModelError


def ddp_model(module: nn.Module) -> DistributedDataParallel:
    """Return the DDP model of a module that ``fabric.setup`` returned.

    Pass it to torchcomp, and train the wrapped module as before:

        model, optimizer = fabric.setup(model, optimizer)
        handle = torchcomp.register(ddp_model(model), "ef(topk(0.01))")

    Raises:
        UnsupportedModelError: if `module` is not from ``fabric.setup``, or has no DDP model.
    """
    inner = getattr(module, "_forward_module", None)
    if not isinstance(inner, DistributedDataParallel):
        raise UnsupportedModelError(
            "expected a module of fabric.setup(...) with Fabric(strategy='ddp'), not "
            f"{type(module).__name__}"
        )
    return inner
