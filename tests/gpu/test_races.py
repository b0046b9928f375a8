"""Races: the same seeds end in the same bits, however late a stream or the host is."""

import pytest
import torch
from torch import Tensor

from tests.gpu.place import NCCL, REHEARSAL, delayed, on_ranks
from tests.gpu.training import Run
from tests.support.models import THROUGH_DDP

STEPS = 4 if REHEARSAL else 10


def all_methods(stream: str) -> dict[str, Tensor]:
    """Train with every method while a stream lags behind; return weights and state."""
    found = {}
    for spec in THROUGH_DDP:
        run = Run(spec)
        with delayed(stream, run.model):
            run.train(0, STEPS)
        run.close()
        found[spec] = torch.cat([run.weights(), run.residual()])
    return found


@pytest.fixture(scope="module")
def plain() -> dict[str, Tensor]:
    return on_ranks(1, all_methods, "none", backend=NCCL)[0]


def assert_same_bits(found: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    differing = [spec for spec, values in found.items() if not torch.equal(values, plain[spec])]
    assert differing == []


@pytest.mark.parametrize("stream", ["none", "backward", "exchange"])
def test_a_late_stream_changes_no_bit(
    stream: str, plain: dict[str, Tensor], one_rank: None
) -> None:
    assert_same_bits(all_methods(stream), plain)


def test_a_host_that_waits_for_every_launch_changes_no_bit(
    plain: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    # CUDA reads this once, so the run needs a process of its own.
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert_same_bits(on_ranks(1, all_methods, "none", backend=NCCL)[0], plain)
