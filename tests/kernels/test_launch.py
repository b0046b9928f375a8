"""Prepared launches without a GPU: what the driver gets, and when Triton's own way is taken."""

import logging
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton", reason="sh tools/setup.sh --triton installs it")
launch = pytest.importorskip("torchcomp.kernels.launch")

METADATA, FUNCTION, STREAM = object(), 123, 77


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a CUDA device."""

    is_cuda = True
    device = torch.device("cuda", 0)


def tensor(dtype=torch.float32, shift=0):
    memory = torch.zeros(64, dtype=torch.uint8)
    assert memory.data_ptr() % 16 == 0
    return memory[shift : shift + 32].view(dtype).as_subclass(OnDevice)


@pytest.fixture
def recorded(monkeypatch):
    """Lists of what goes Triton's own way, and of what goes to the driver."""
    slow, quick = [], []
    compiled = SimpleNamespace(
        run=lambda *args: quick.append(args), function=FUNCTION, packed_metadata=METADATA
    )

    def plain(kernel, grid, arguments, options):
        slow.append((arguments, options))
        return compiled

    active = SimpleNamespace(get_current_stream=lambda index: STREAM)
    monkeypatch.setattr(launch, "plain", plain)
    monkeypatch.setattr(launch, "_TAKES_CONSTANTS", True)
    monkeypatch.setattr(launch._Quick, "on", True)
    monkeypatch.setattr(launch.triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return SimpleNamespace(slow=slow, quick=quick, compiled=compiled)


KERNEL = SimpleNamespace(arg_names=["x", "y", "weight", "table", "n", "FIRST", "SECOND"])


def prepared():
    table = tensor(torch.int64)
    return launch.Launch(KERNEL, (5, 2), table, 9, SECOND=2, FIRST=1, warps=8), table


def test_the_second_launch_goes_to_the_driver(recorded):
    run, table = prepared()
    x, y = tensor(), tensor(torch.uint8)
    run(x, y, 0.5)
    ((arguments, options),) = recorded.slow
    assert [a is b for a, b in zip(arguments, (x, y, 0.5, table, 9), strict=True)] == [True] * 5
    assert options == {"FIRST": 1, "SECOND": 2, "num_warps": 8, "enable_fp_fusion": False}
    other = tensor()
    run(other, y, 0.25)
    handles = 5, 2, 1, STREAM, FUNCTION, METADATA, None, None, None
    passed = other.data_ptr(), y.data_ptr(), 0.25, table.data_ptr(), 9, 1, 2
    assert recorded.quick == [(*handles, *passed)]
    assert len(recorded.slow) == 1


@pytest.mark.parametrize("other", [tensor(shift=4), tensor(torch.int32)], ids=["address", "dtype"])
def test_each_class_of_arguments_has_its_own_form(recorded, other):
    run, _ = prepared()
    for y in (tensor(), other, tensor(), other):
        run(tensor(), y, 0.5)
    assert len(recorded.slow) == len(recorded.quick) == 2


@pytest.mark.parametrize("reason", ["another device", "not compiled"])
def test_triton_s_own_way_is_taken(recorded, monkeypatch, reason):
    run, _ = prepared()
    if reason == "not compiled":
        monkeypatch.setattr(launch, "plain", lambda *args: recorded.slow.append(args))
    run(tensor(), tensor(), 0.5)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: int(reason == "another device"))
    run(tensor(), tensor(), 0.5)
    assert (len(recorded.slow), len(recorded.quick)) == (2, 0)


def test_a_driver_that_fails_is_not_asked_again(recorded, caplog):
    def fail(*args):
        recorded.quick.append(args)
        raise TypeError("other arguments")

    recorded.compiled.run = fail
    run, _ = prepared()
    with caplog.at_level(logging.DEBUG):
        for _ in range(4):
            run(tensor(), tensor(), 0.5)
    assert (len(recorded.slow), len(recorded.quick)) == (4, 1)
    records = [record for record in caplog.records if record.name == launch.__name__]
    assert [(r.levelno, "other arguments" in r.getMessage()) for r in records] == [
        (logging.DEBUG, True)
    ]
