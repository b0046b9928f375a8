"""A step of JointSpar waits twice, at its end, and no kernel is launched for each parameter."""

import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn

import torchcomp
from tests.support.counting import counted
from tests.support.models import loss_of, rows, seeded, wrap
from tests.support.ranks import with_fake_ranks
from torchcomp.jointspar import LARS, JointSpar
from torchcomp.jointspar.skip import Clock

OPTIONS = {
    "shared": {},
    "per-rank": {"selection": "per-rank"},
    "zero": {"skipped": "zero"},
    "time": {"costs": "time"},
}


def deep(tensors):
    """Two layers that have a bias and some further vectors each."""
    return seeded(nn.Sequential(*[Layer(tensors) for _ in range(2)]))


class Layer(nn.Module):
    def __init__(self, tensors):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))
        self.more = nn.ParameterList(nn.Parameter(torch.ones(16)) for _ in range(tensors))

    def forward(self, x):
        return x @ self.weight + torch.stack(list(self.more)).sum(0)


def backward_pass(options, scaled=False, tensors=3):
    """What the last of some backward passes launches and waits for. None: without JointSpar."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    model = wrap(deep(tensors), bucket_cap_mb=25)
    if options is None:
        used = torchcomp.register(model, "mean")
    else:
        used = JointSpar(model, budget=1.0, scaler=scaler, **options)
    with used:
        for step in range(7):
            model.zero_grad()
            loss = loss_of(model(rows(step, torch.float32)))
            loss = loss if scaler is None else scaler.scale(loss)
            with counted() as counts:
                loss.backward()
    return counts


@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_waits_for_the_decision_and_for_all_norms_together(name):
    waits = with_fake_ranks(2, backward_pass, OPTIONS[name]).waits
    # With per-rank selection, the host also reads which layers the other ranks keep, by two calls.
    assert waits.total() <= (4 if name == "per-rank" else 2)


def test_the_loss_scale_is_read_once_in_a_step():
    plain, scaled = (with_fake_ranks(2, backward_pass, {}, each) for each in (False, True))
    # DDP's hook reads the scale at the beginning of a step. JointSpar uses the same number.
    assert scaled.waits.total() <= plain.waits.total() + 1
    # The gradient of scaler.scale(loss).
    assert scaled.launches.total() <= plain.launches.total() + 1


def test_norms_take_launches_that_do_not_grow_with_the_model():
    def grown(options):
        few, many = (with_fake_ranks(2, backward_pass, options, False, n) for n in (2, 9))
        return many.launches.total() - few.launches.total()

    assert grown({}) <= grown(None)


# --- LARS -----------------------------------------------------------------------------------------


class Half:
    """Samples every parameter with probability 1/2."""

    def probability(self, parameter):
        return 0.5

    def presence(self, parameter):
        return 0.5

    def norm(self, parameter):
        return 2.0


@pytest.mark.parametrize("sampled", [None, Half()], ids=["dense", "sampled"])
@pytest.mark.parametrize("exclude", [False, True])
def test_lars_waits_for_nothing_and_launches_equally_much_for_any_number_of_tensors(
    sampled, exclude
):
    found = []
    for tensors in (2, 9):
        module = deep(tensors)
        optimizer = LARS(
            module.parameters(), 0.1, weight_decay=0.1, exclude_vectors=exclude, sampled=sampled
        )
        for _ in range(2):
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
            with counted() as counts:
                optimizer.step()
        assert not counts.waits
        found.append(counts.launches.total())
    assert found[1] <= found[0]


# --- The clock on a GPU ---------------------------------------------------------------------------


class Event:
    """Stands in for torch.cuda.Event. The streams reach an event 2 ms after the one before."""

    recorded = 0
    waited = 0
    passed = False
    streams: ClassVar[set[str]] = set()
    alive: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    def __init__(self, enable_timing=False):
        assert enable_timing
        Event.alive.add(self)

    def record(self, stream=None):
        # Without a stream, torch records in the stream of the current device.
        self.stream = stream or "of the current device"
        Event.streams.add(self.stream)
        Event.recorded += 1
        self.time = 2.0 * Event.recorded

    def query(self):
        return Event.passed

    def synchronize(self):
        Event.waited += not Event.passed

    def elapsed_time(self, end):
        assert end.stream == self.stream
        return end.time - self.time


@pytest.fixture
def clock(monkeypatch):
    """A clock of the second GPU, while the first one is the current device."""

    def refuse(device=None):
        raise AssertionError("the host waits for a whole device")

    monkeypatch.setattr(Event, "recorded", 0)
    monkeypatch.setattr(Event, "waited", 0)
    monkeypatch.setattr(Event, "passed", False)
    monkeypatch.setattr(Event, "streams", set())
    monkeypatch.setattr(Event, "alive", weakref.WeakSet())
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device=None: f"stream of {device}")
    monkeypatch.setattr("torch.cuda.synchronize", refuse)
    return Clock(torch.device("cuda", 1))


def backward(clock, *names):
    clock.begin()
    for name in names:
        clock.arrived(name)
    clock.end()


def test_the_clock_times_the_stream_of_its_own_device_and_waits_only_when_it_is_read(clock):
    assert clock.backward_ms == 0.0
    clock.detailed = True
    backward(clock, "a", "b")
    backward(clock, "b")
    assert Event.waited == 0
    assert clock.take() == {"a": 0.002, "b": 0.004}
    assert Event.waited > 0
    assert clock.take() == {}
    assert clock.backward_ms == 4.0
    assert Event.streams == {"stream of cuda:1"}


def test_the_clock_keeps_the_events_of_one_step_only(clock):
    clock.detailed, Event.passed, alive = True, True, []
    for _ in range(5):
        backward(clock, "a", "b")
        alive.append(len(Event.alive))
    assert len(set(alive)) == 1
    assert clock.take() == pytest.approx({"a": 0.010, "b": 0.010})
    assert Event.waited == 0


def test_without_details_the_clock_records_two_events(clock):
    backward(clock, "a", "b")
    assert Event.recorded == 2
    assert clock.take() == {}
