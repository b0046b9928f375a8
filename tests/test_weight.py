"""Weight: how much there is to read, and how many calls one bucket takes, in how many files."""

import re
import subprocess
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
REPOSITORY = PACKAGE.parent
ANNEX = ("advisor", "guard", "integrations")

MOST_LINES = {
    # The core, room by room.
    "torchcomp/aggregators": 1_030,
    "torchcomp/checkpoints": 1_070,
    "torchcomp/compressors": 790,
    "torchcomp/ddp": 2_000,
    "torchcomp/engine": 1_690,
    "torchcomp/exchange": 1_130,
    "torchcomp/fsdp": 450,
    "torchcomp/jointspar": 1_015,
    "torchcomp/kernels": 3_430,
    "torchcomp/local_sgd": 1_805,
    "torchcomp/routes": 1_225,
    "torchcomp/specs": 610,
    "torchcomp/two_direction": 800,
    # What hangs on it.
    "torchcomp/advisor": 4_210,
    "torchcomp/advisor/doctor": 1_720,
    "torchcomp/advisor/auto.py": 350,
    "torchcomp/advisor/proposal.py": 90,
    "torchcomp/guard": 960,
    "torchcomp/integrations": 300,
    # All of it.
    "torchcomp": 23_000,
    "tests": 30_000,
    "recipes": 11_000,
    "benchmarks": 6_000,
}
"""Lines of Python, blank lines, comments and docstrings included."""

MOST_LINES_OF_THE_CORE = 17_500
MOST_WORDS = 35_000  # of README.md and docs/
MOST_DOORS = 20  # entries of torchcomp/

CALLS = {
    "mean": (70, 25),
    'cast("bf16")': (90, 25),
    "ef(topk(0.01))": (170, 30),
    "powersgd(rank=2)": (110, 25),
    "bidirectional(topk(0.01), topk(0.01))": (260, 34),
}
"""By method: the most calls of functions of torchcomp, and the most files that they are in."""


def files(place):
    """The tracked files of a folder, or the file itself."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "--", place]
    try:
        listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        names = [REPOSITORY / name for name in listed.stdout.splitlines()]
    except (subprocess.CalledProcessError, FileNotFoundError):  # not a clone
        names = [*(REPOSITORY / place).rglob("*"), REPOSITORY / place]
    return [path for path in names if path.is_file() and "__pycache__" not in path.parts]


def lines(place):
    return sum(len(p.read_text().splitlines()) for p in files(place) if p.suffix == ".py")


@pytest.mark.parametrize("place", MOST_LINES)
def test_lines(place):
    assert 0 < lines(place) <= MOST_LINES[place]


def test_lines_of_the_core():
    annex = sum(lines(f"torchcomp/{room}") for room in ANNEX)
    assert lines("torchcomp") - annex <= MOST_LINES_OF_THE_CORE


def test_words_of_the_pages():
    pages = [path for place in ("README.md", "docs") for path in files(place)]
    texts = [path.read_text() for path in pages if path.suffix == ".md"]
    assert 0 < sum(len(re.findall(r"\S+", text)) for text in texts) <= MOST_WORDS


def test_doors():
    entries = {path.relative_to(PACKAGE).parts[0] for path in files("torchcomp")}
    assert 0 < len(entries) <= MOST_DOORS, sorted(entries)


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
    most, most_files = CALLS[spec]
    for counts in on_processes(2, calls_of_a_step, spec):
        assert 0 < counts.total() <= most, counts
        assert len({path for path, _ in counts}) <= most_files, counts
