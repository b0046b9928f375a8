"""Weight: how many calls one bucket takes, in how many files, and how long the files are."""

import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.support.ranks import on_processes

PACKAGE = Path(torchcomp.__file__).parent
ANNEX = ("advisor/", "guard/", "integrations/")
"""Rooms that no limit of the core counts: issue O gives them limits of their own."""

ROOMS = {
    "advisor/": 2_300,
    "advisor/doctor/": 1_800,
    "advisor/auto.py": 350,
    "advisor/proposal.py": 110,
    "guard/": 1_000,
    "integrations/": 340,
}
"""The most lines of such a room."""

CALLS = {
    "mean": (70, 25),
    'cast("bf16")': (90, 25),
    "ef(topk(0.01))": (170, 30),
    "powersgd(rank=2)": (110, 25),
    "bidirectional(topk(0.01), topk(0.01))": (260, 34),
}
"""By method: the most calls of functions of torchcomp, and the most files that they are in."""

LINES = {"engine/averager.py": 550}
MOST_LINES = 450


def calls_of_a_step(spec):
    """Count the calls of torchcomp's functions in a step with one bucket, by file and function."""
    counts, counting = Counter(), [False]

    def note(frame, event, argument):
        path = frame.f_code.co_filename
        if counting[0] and event == "call" and path.startswith(str(PACKAGE)):
            counts[Path(path).relative_to(PACKAGE).as_posix(), frame.f_code.co_name] += 1

    model = DistributedDataParallel(torch.nn.Linear(256, 256, bias=False))
    threading.setprofile(note)  # for the thread of the exchange, which begins now
    handle = torchcomp.register(model, spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # After the third step, everything is prepared, and DDP has rebuilt its buckets.
    for step in range(5):
        optimizer.zero_grad()
        counting[0] = step == 4
        sys.setprofile(note if counting[0] else None)
        model(torch.ones(8, 256)).sum().backward()
        optimizer.step()
    sys.setprofile(None)
    threading.setprofile(None)
    handle.close()
    return counts


@pytest.mark.parametrize("spec", CALLS)
def test_a_bucket_takes_few_calls_in_few_files(spec):
    most, files = CALLS[spec]
    for counts in on_processes(2, calls_of_a_step, spec):
        assert 0 < counts.total() <= most, counts
        assert len({path for path, _ in counts}) <= files, counts


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_no_file_is_long(path):
    name = path.relative_to(PACKAGE).as_posix()
    if not name.startswith(ANNEX):
        assert len(path.read_text().splitlines()) <= LINES.get(name, MOST_LINES)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_of_the_annex_keeps_its_weight(room):
    files = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")]
    # A room counts without the rooms in it.
    inner = tuple(other for other in ROOMS if other != room and other.startswith(room))
    own = [name for name in files if name.startswith(room) and not name.startswith(inner)]
    assert 0 < sum(len((PACKAGE / name).read_text().splitlines()) for name in own) <= ROOMS[room]
