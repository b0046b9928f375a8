"""Fixtures for the tests of the recipes: small data sets, and runs of the trainer."""

import gc
import importlib.util
import json
import os
import signal
import time
import traceback
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.image_data.beton import INSTALL_FFCV
from tests.recipes.forked_ranks import Launcher
from tests.support.patience import PATIENCE


@pytest.fixture
def needs_ffcv():
    if importlib.util.find_spec("ffcv") is None:
        pytest.skip(f"ffcv is not installed: {INSTALL_FFCV}")


@pytest.fixture
def digits_flags(tmp_path):
    """Flags of a short run on the digits."""
    return ["--threads", "1", "--out", str(tmp_path / "run")]


@pytest.fixture
def photo_folder(tmp_path):
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
def photo_flags(photo_folder, tmp_path):
    """Flags of a run of an epoch on the photographs, with a loader process."""
    flags = ["--dataset", "folder", "--data-path", str(photo_folder), "--loader", "torchvision"]
    flags += ["--threads", "1", "--workers", "1", "--epochs", "1", "--image-size", "32"]
    return [*flags, "--out", str(tmp_path / "run")]


@pytest.fixture
def train_here(monkeypatch):
    """Train as a single rank in this process, and return the summary."""
    from recipes import train
    from recipes.settings import read_settings

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    threads, cudnn = torch.get_num_threads(), torch.backends.cudnn

    def run(*flags):
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
def forked(tmp_path):
    """Starts runs on several ranks in milliseconds, and kills them after the test."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


def summary_in(folder):
    summary = json.loads((folder / "summary.json").read_text())
    return summary


def steps_and_losses(out):
    """Return what a run has logged: a pair for every line, of a step or of an epoch."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line.get("loss", line.get("train_loss"))) for line in lines]


def assert_equal_runs(one, other):
    """Require the same weights, traffic and losses, bit for bit."""
    ones, others = summary_in(one), summary_in(other)
    for name in ("weights_sha256", "bytes_sent", "synchronisations", "ranks"):
        assert ones[name] == others[name]
    assert ones["replicas_agree"]
    assert steps_and_losses(one) == steps_and_losses(other)


def wait_until(done, is_alive, printed):
    """Wait for something that a run does, and fail with what it ``printed`` if it ends before."""
    deadline = time.monotonic() + PATIENCE
    while not done():
        if not is_alive() or time.monotonic() > deadline:
            raise AssertionError(printed.read_text())
        time.sleep(0.01)


def kill_tree(pid):
    """Kill a process and its descendants with SIGKILL."""
    for found in [*descendants(pid), pid]:
        with suppress(ProcessLookupError):
            os.kill(found, signal.SIGKILL)


def descendants(pid):
    """Return the processes that a process has started, those that they have started, and so on."""
    with suppress(FileNotFoundError):  # the process has ended
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [found for child in text.split() for found in (int(child), *descendants(int(child)))]
    return []
