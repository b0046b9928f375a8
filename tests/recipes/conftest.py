"""Fixtures for the tests of the recipes: small data sets, and runs of the trainer."""

import gc
import importlib.util
import logging
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from recipes import train
from recipes.image_data.beton import INSTALL_FFCV
from recipes.settings import read_settings
from tests.recipes.runs import summary_in


@pytest.fixture
def needs_ffcv():
    if importlib.util.find_spec("ffcv") is None:
        pytest.skip(f"ffcv is not installed: {INSTALL_FFCV}")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def digits_flags(out):
    """Flags of a short run on the digits."""
    return ["--threads", "1", "--out", str(out)]


@pytest.fixture
def photo_folder(tmp_path):
    """An image folder with two classes: 12 training and 4 test JPEGs of different sizes."""
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
def photo_flags(photo_folder, digits_flags):
    """Flags of a run of an epoch on the photographs, with a loader process."""
    flags = ["--dataset", "folder", "--data-path", str(photo_folder), "--loader", "torchvision"]
    return [*digits_flags, *flags, "--workers", "1", "--epochs", "1", "--image-size", "32"]


@pytest.fixture
def train_here(monkeypatch):
    """Train as a single rank in this process, and return the summary."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    threads, cudnn = torch.get_num_threads(), torch.backends.cudnn
    level = (logger := logging.getLogger("torchcomp")).level

    def run(*flags):
        settings = read_settings(list(flags))
        try:
            (train.train_shrunken_copy if settings.shrink else train.train)(settings)
        except BaseException as error:
            # They hold the DDP model. gloo can hang if it ends before the model does.
            traceback.clear_frames(error.__traceback__)
            gc.collect()
            raise
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        return None if settings.shrink else summary_in(Path(settings.out))

    # train.py changes them. Setting them to their own values lets monkeypatch restore them.
    for flag in ("deterministic", "benchmark"):
        monkeypatch.setattr(cudnn, flag, getattr(cudnn, flag))
    yield run
    torch.set_num_threads(threads)
    logger.setLevel(level)
