"""How often the host waits for the device: at most as often as each method may."""

import pytest
import torch

from benchmarks.gpu.device import counted_waits
from benchmarks.gpu.methods import Steps
from tests.gpu.place import DEVICE, KIND, REHEARSAL
from tests.gpu.training import Run
from tests.support.budgets import BUDGETS

BUDGET = {
    # The other ranks only exist in name: their messages must be as long as this rank's. Only plain
    # torch waits more than twice, for the search of an exact downlink.
    spec.format(ratio=0.125): (min(2, budget.waits), budget.waits_per_step)
    for spec, budget in BUDGETS.items()
}


@pytest.mark.skipif(REHEARSAL, reason="the CPU never waits for itself")
def test_a_wait_is_counted_and_its_line_is_named() -> None:
    """The tests below can fail."""
    x = torch.ones(3, device=DEVICE)
    with counted_waits(KIND) as lines:
        x.sum().item()
        x.tolist()
        x.mul_(2.0)
    assert len(lines) == 2
    assert all(line.startswith(__file__) for line in lines)


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("spec", BUDGET)
def test_waits_of_one_bucket_and_one_step(spec: str, ranks: int) -> None:
    """Among ranks that exist only in name."""
    per_bucket, per_step = BUDGET[spec]
    steps = Steps(spec, ranks, DEVICE, 1 << 14, seed=0)
    for _ in range(3):  # compiles, and finds thresholds
        steps.begin()
        steps.average()
    steps.begin()
    with counted_waits(KIND) as of_bucket:
        steps.average()
    with counted_waits(KIND) as of_step:
        steps.finish()
    assert len(of_bucket) <= per_bucket, of_bucket
    assert len(of_step) <= per_step, of_step


@pytest.mark.parametrize("spec", BUDGET)
def test_waits_of_a_training_step(spec: str, one_rank: None) -> None:
    """Through DDP: the hook, the executor and the engine add no wait."""
    per_bucket, per_step = BUDGET[spec]
    run = Run(spec).train(0, 4)
    run.optimizer.zero_grad()
    loss = run.model(run.rows(4)).square().sum()
    with counted_waits(KIND) as lines:
        loss.backward()
    allowed = per_bucket * len(run.handle.averager.buckets) + per_step
    run.close()
    assert len(lines) <= allowed, lines
