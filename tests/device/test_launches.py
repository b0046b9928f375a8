"""The counter of launches and waits: every kind of wait, and what costs least."""

from typing import Any

import pytest
import torch

from tests.support.launches import counted, on_device
from torchcomp import InProcessExchange
from torchcomp.ddp.reordering import Reordering
from torchcomp.engine import host
from torchcomp.engine.bucket import Bucket, BucketShape
from torchcomp.engine.nonfinite import FiniteWatch

# Statements on x (8 floats), n (8 integers) and m (a mask) on the device, and h on the host.
WAIT = [
    *("x[0] = 5", "x[n] = 5", "x[torch.tensor([0, 1])]", "x[m]"),
    *("x[0].item()", "bool(x[0] > 1)", "int(n[1])", "x.cpu()", "h.copy_(x)", "x.copy_(h)"),
    "h.to(x.device, non_blocking=True)",
    *("torch.tensor([1.0, 2.0], device=x.device)", "x.new_tensor([1.0])"),
    *("x.nonzero()", "torch.where(m)", "n.bincount()", "torch.unique(n)", "torch.equal(x, x)"),
    "x.repeat_interleave(n)",
    *("torch.cuda.synchronize()", "torch.cuda.Event().synchronize()"),
]


@pytest.mark.parametrize(
    ("statement", "waits"),
    [
        *((statement, True) for statement in WAIT),
        ("x[:1] = 5", False),
        ("x[m] = 5", False),
        ("host.copy_to(h, x.device)", False),
        ("h[0].item(), h.tolist()", False),
    ],
)
def test_waits_are_counted(statement: str, waits: bool) -> None:
    with counted() as count:
        values = torch.arange(8.0)
        names: dict[str, Any] = {"x": on_device(values), "n": on_device(values.long()), "h": values}
        names |= {"m": on_device(values > 3), "torch": torch, "host": host}
        exec(statement, names)
    assert (count.waits > 0) == waits, count


def test_a_mean_is_checked_before_the_next_group_uses_its_memory() -> None:
    """Two groups of which DDP has the parameters in other buckets."""
    groups = [
        BucketShape((names[0], names[1]), ((4,), (4,)), torch.float32) for names in ("ab", "cd")
    ]
    watch = FiniteWatch(InProcessExchange.ranks(1)[0])
    with counted():
        reordering = Reordering(groups)
        reordering.begin()
        for names in ("ac", "bd"):
            shape = BucketShape((names[0], names[1]), ((4,), (4,)), torch.float32)
            for bucket in reordering.add(Bucket(shape, on_device(torch.ones(8)), lasts=True)):
                # The mean of the first one is not finite.
                bucket.flat.fill_(torch.nan if bucket.names == ("a", "b") else 1.0)
                watch.after(bucket)
        finite = watch.finite()
        assert finite is not None
        assert not host.copy_from(finite)().item()
