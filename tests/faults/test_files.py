"""Checkpoints on a full disk, or killed, and a package that cannot be written."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, run

pytestmark = pytest.mark.soak
SAVING = """
import os, signal, sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist
from recipes.checkpoints import Checkpoints

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
folder, step, elements, fault = Path(sys.argv[1]), *map(int, sys.argv[2:4]), sys.argv[4]
checkpoints = Checkpoints(folder, rank=0, world_size=1)

def kill_while_writing():
    written = folder / f"step-{step:09d}" / ".rank-0.pt"
    while not (written.exists() and written.stat().st_size > 1 << 20):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)

if fault == "SIGKILL":
    threading.Thread(target=kill_while_writing, daemon=True).start()
problem = checkpoints.save(step, {"step": step, "w": torch.full((elements,), float(step))}, {})
print(problem, [path.name for path in (folder / f"step-{step:09d}").glob(".*")])
print("newest", checkpoints.load({})["step"])
"""

KERNEL = """
import logging, torch, torchcomp
logging.basicConfig()
tensors = {"w": torch.arange(1.0, 101.0)}
def step(exchange):
    torchcomp.Averager("ef(topk(0.1))", exchange, tensors).average_all(tensors)
torchcomp.run_in_process(1, step)
print(torchcomp.__file__, int(tensors["w"].count_nonzero()))
"""


def with_mount(mount: str, *command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """Run a command behind a mount, and return what it printed."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("mounts need root and unshare")
    script = f'{mount} && exec "$@" 2>&1'
    return run(["unshare", "-m", "sh", "-c", script, "sh", *command], cwd=cwd, **env).stdout


def save(folder: Path, step: int, elements: int, fault: str = "none") -> list[str | Path]:
    return [sys.executable, "-c", SAVING, folder, f"{step}", f"{elements}", fault]


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    both = 'mount -t tmpfs -o size=2m none "$FOLDER" && "$PYTHON" -c "$SAVING" "$FOLDER" 5 10 none'
    env = {"FOLDER": str(tmp_path), "PYTHON": sys.executable, "SAVING": SAVING}
    # Larger than what is buffered, so that the disk is full in the middle of a tensor.
    printed = with_mount(both, *save(tmp_path, 10, 1 << 20), **env).splitlines()
    assert printed[0::2] == ["None []", "rank 0: No space left on device []"]
    assert printed[1::2] == ["newest 5"] * 2


def test_a_kill_while_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    run(save(tmp_path, 5, 10))
    killed = run(save(tmp_path, 10, 1 << 27, "SIGKILL"), check=False)
    assert killed.returncode == -9
    assert not (tmp_path / "step-000000010" / "rank-0.pt").exists()
    assert run(save(tmp_path, 5, 10)).stdout.splitlines()[-1] == "newest 5"


def test_kernels_run_from_a_read_only_package_without_a_home(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "torchcomp", tmp_path / "torchcomp", ignore=shutil.ignore_patterns("__pycache__")
    )
    mount = f"mount --bind {tmp_path} {tmp_path} && mount -o remount,bind,ro {tmp_path}"
    # Root could create a home anywhere but in /proc.
    nowhere = {"HOME": "/proc/nonexistent", "XDG_CACHE_HOME": "/proc/nonexistent"}
    command = ["env", "-u", "NUMBA_CACHE_DIR", sys.executable, "-c", KERNEL]
    printed = with_mount(mount, *command, cwd=tmp_path, **nowhere)
    assert printed.count("NUMBA_CACHE_DIR") == 1
    assert printed.splitlines()[-1] == f"{tmp_path}/torchcomp/__init__.py 10"
