"""Collect these tests only where there is a CUDA device, or in a rehearsal on the CPU."""

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.gpu.place import ACTIVE, NCCL
from tests.support.patience import PATIENCE

# With this, matrix products of cuBLAS are reproducible. The ranks inherit it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

collect_ignore_glob = [] if ACTIVE else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Compilers and drivers warn of things that say nothing about this project.
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one rank, in this process, over NCCL."""
    # No call of set_device: the tests show that training works without it.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        NCCL,
        init_method=f"file://{tmp_path_factory.mktemp('group')}/store",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=PATIENCE),
    )
    yield
    dist.destroy_process_group()
