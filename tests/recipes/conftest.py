"""Fixtures for the tests of the recipes: small data sets, and runs of the trainer."""

import gc
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.image_data.beton import INSTALL_FFCV
from tests.recipes.forked_ranks import ForkedRun, Launcher
from tests.support.patience import PATIENCE


@pytest.fixture
def needs_ffcv() -> None:
    """Skip the test if ffcv is not installed."""
    if importlib.util.find_spec("ffcv") is None:
        pytest.skip(f"ffcv is not installed: {INSTALL_FFCV}")


@pytest.fixture
def digits_flags(tmp_path: Path) -> list[str]:
    """Flags of a short run on the digits."""
    return ["--threads", "1", "--out", str(tmp_path / "run")]


@pytest.fixture
def photo_folder(tmp_path: Path) -> Path:
    """An image folder with two classes: 12 training and 4 test JPEGs of different sizes."""
    from PIL import Image

    rng = np.random.default_rng(0)
    root = tmp_path / "photos"
    for split, count in (("train", 6), ("val", 2)):
        for name in ("cat", "dog"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (40 + i, 50 - i, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.jpg")
    return root


@pytest.fixture
def train_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., dict[str, Any]]]:
    """Train as a single rank in this process, and return the summary."""
    from recipes import train
    from recipes.settings import read_settings

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    threads, cudnn = torch.get_num_threads(), torch.backends.cudnn

    def run(*flags: str) -> dict[str, Any]:
        settings = read_settings(list(flags))
        try:
            train.train(settings)
        except BaseException as error:
            # They hold the DDP model. gloo can hang if it ends before the model does.
            traceback.clear_frames(error.__traceback__)
            gc.collect()
            raise
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        return summary_in(Path(settings.out))

    # train.py changes them. Setting them to their own values lets monkeypatch restore them.
    for flag in ("deterministic", "benchmark"):
        monkeypatch.setattr(cudnn, flag, getattr(cudnn, flag))
    yield run
    torch.set_num_threads(threads)


@pytest.fixture
def shrink_here(
    train_here: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """Train a configuration's shrunken copy in this process, and return its output."""
    from recipes import train
    from recipes.settings import read_settings

    logger = logging.getLogger("torchcomp")
    level = logger.level

    def run(*flags: str) -> str:
        train.train_shrunken_copy(read_settings([*flags, "--dry-run", "--shrink"]))
        return capsys.readouterr().out

    yield run
    logger.setLevel(level)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class TorchRun:
    """Runs recipes/train.py on several gloo ranks with torchrun."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *flags: str, ranks: int = 2) -> "subprocess.Popen[str]":
        """Start a run and return at once."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "-m", "recipes.train", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        process = subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._started.append(process)
        return process

    def finish(self, process: "subprocess.Popen[str]") -> str:
        """Wait for a run, require that it succeeds, and return its output."""
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, output
        return output

    def kill(self, process: "subprocess.Popen[str]") -> None:
        """Kill all ranks and torchrun with SIGKILL."""
        kill_tree(process.pid)
        process.communicate(timeout=PATIENCE)

    def close(self) -> None:
        """Kill the runs that have not ended."""
        for process in self._started:
            if process.poll() is None:
                self.kill(process)


@pytest.fixture
def torchrun() -> Iterator[TorchRun]:
    """Start runs on several ranks. Those still running after the test are killed."""
    runs = TorchRun()
    yield runs
    runs.close()


@pytest.fixture
def forked(tmp_path: Path) -> Iterator[Launcher]:
    """Like ``torchrun``, but a run starts in milliseconds."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


def summary_in(folder: Path) -> dict[str, Any]:
    """Return the summary of a finished run."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def steps_and_losses(out: Path) -> list[tuple[int, float]]:
    """Return what a run has logged: a pair for every line, of a step or of an epoch."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line.get("loss", line.get("train_loss"))) for line in lines]


def wait_for_checkpoint(folder: Path, step: int, run: ForkedRun) -> None:
    """Wait until ``run`` has written a complete checkpoint of ``step`` or later."""
    wait_until(
        lambda: any(int(p.parent.name[5:]) >= step for p in folder.glob("step-*/complete.json")),
        run.is_alive,
        run.printed,
    )


def wait_until(done: Callable[[], bool], is_alive: Callable[[], bool], printed: Path) -> None:
    """Wait for something that a run does, and fail with what it ``printed`` if it ends before."""
    deadline = time.monotonic() + PATIENCE
    while not done():
        if not is_alive() or time.monotonic() > deadline:
            raise AssertionError(printed.read_text())
        time.sleep(0.01)


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants with SIGKILL."""
    for found in [*descendants(pid), pid]:
        with suppress(ProcessLookupError):
            os.kill(found, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, those that they have started, and so on."""
    with suppress(FileNotFoundError):  # the process has ended
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [found for child in text.split() for found in (int(child), *descendants(int(child)))]
    return []
