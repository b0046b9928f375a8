"""What a local step calls, launches and waits for: nothing. A synchronisation waits a few times."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import torchcomp
from tests.local_sgd.script import Script, mlp, sgd
from tests.support.cases import some
from tests.support.counting import counted
from tests.support.ranks import on_processes, with_fake_ranks

PACKAGE = str(Path(torchcomp.__file__).parent)
SMALL = 0.0002
"""A bucket_cap_mb at which every layer fills a bucket."""

LOCAL = [{}, {"overlap": True}, {"outer": "slowmo(beta=0.7)"}]

grouped = partial(torch.optim.SGD, lr=1.0, momentum=0.9, foreach=True)


def of_a_local_step():
    """The files of the calls of torchcomp in a step without a synchronisation."""
    script = Script("every(4)", total_steps=12, build=lambda: mlp(16), optimizer=sgd)
    script.train(0, 5)
    script.optimizer.zero_grad()
    script.backward(5)
    files = []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.append(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    sys.setprofile(note)
    try:
        script.optimizer.step()
    finally:
        sys.setprofile(None)
    return files


def test_a_local_step_makes_at_most_15_calls_in_a_file():
    # In processes of their own: hooks of DDP models, of other tests, would be counted as well.
    for files in on_processes(2, of_a_local_step):
        assert 0 < len(files) <= 15
        assert set(files) == {"local_sgd/local_steps.py"}


def deep(layers=4):
    hidden = [nn.Linear(8, 8) for _ in range(layers - 2)]
    return nn.Sequential(nn.Linear(6, 8), *hidden, nn.Linear(8, 3)).double()


def steps(layers=4, **options):
    """What each of 8 optimizer steps launches and waits for."""
    script = Script("every(4)", 16, build=partial(deep, layers), optimizer=grouped, **options)
    found = []
    for step in range(8):
        script.optimizer.zero_grad()
        script.backward(step)
        with counted() as counts:
            script.optimizer.step()
        found.append(counts)
        script.scheduler.step()
    script.sync.close()
    return found


@pytest.fixture(scope="module")
def optimizer_alone():
    module = deep()
    optimizer = grouped(module.parameters())
    for _ in range(2):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        with counted() as counts:
            optimizer.step()
    return counts


@pytest.mark.parametrize("options", LOCAL)
def test_a_local_step_launches_and_waits_for_nothing(options, optimizer_alone):
    found = with_fake_ranks(2, partial(steps, local=options))
    for step in (1, 2, 4, 5, 6):
        assert found[step].launches == optimizer_alone.launches
        assert not found[step].waits


@pytest.mark.parametrize("options", some(LOCAL, of=2))
def test_a_synchronisation_waits_and_launches_equally_often_for_any_number_of_layers(options):
    few, many = (with_fake_ranks(2, partial(steps, layers, local=options)) for layers in (4, 8))
    assert few[-1].launches == many[-1].launches
    # Also with several buckets.
    small = with_fake_ranks(2, partial(steps, 8, local=options, bucket_cap_mb=SMALL))
    for found in (few, many, small):
        assert found[-1].waits.total() == 2  # to compare the ranks, and to check the values


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_step_that_only_creates_state_is_found_with_one_wait(value):
    """torch.distributed.checkpoint's get_state_dict takes such a step of a new optimizer."""

    def created(layers):
        script = Script("every(4)", 16, build=partial(deep, layers), lr=lambda step: 0.0)
        for parameter in script.model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        with counted() as counts:
            script.optimizer.step(closure=None)
        steps = script.sync.stats.steps
        script.sync.close()
        return counts.waits.total(), steps

    waits, steps = with_fake_ranks(2, created, 8)
    assert steps == value
    assert waits == 1 or steps
