"""Run a script of recipes/integrations/, uninterrupted and resumed, and compare the two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
METHODS = (("--compress", "ef(topk(0.05))"), ("--sync", "every(3)"))
"""With every(3), the checkpoint after 16 steps is inside a round."""

integrations = pytest.mark.integrations
both_methods = pytest.mark.parametrize("method", METHODS, ids=["compress", "sync"])


def check_resumes(name, folder, method, launcher=TORCHRUN):
    """Require that the script learns, sends less than DDP, and resumes bit for bit.

    Args:
        name: the module in recipes/integrations/.
        folder: an empty folder.
        method: the option that selects the method, and its value.
        launcher: arguments of Python before the name of the module.
    """
    command = [*launcher, f"recipes.integrations.{name}", *method, "--out", str(folder)]
    python(*command)
    whole = results(folder)
    python(*command, "--resume")
    resumed = results(folder)
    assert whole[0]["weights"] == whole[1]["weights"]
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours["weights"] == theirs["weights"]
        assert len(ours["losses"]) == len(theirs["losses"]) / 2 == 16
        assert ours["stats"] == theirs["stats"]
        stats = theirs["stats"]
        assert stats["steps"] == 32
        assert 0 < stats["total_bytes_sent"] < stats["total_dense_bytes_sent"] / 2
        assert sum(theirs["losses"][-4:]) < sum(theirs["losses"][:4]) / 2
    return whole


def results(folder):
    paths = [folder / f"result-{rank}.json" for rank in range(2)]
    found = [json.loads(path.read_text()) for path in paths]
    for path in paths:
        path.unlink()
    return found


def python(*arguments, check=True):
    """Run Python in the repository, and return the completed process."""
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    if check and done.returncode:
        pytest.fail(f"{arguments} exited {done.returncode}:\n{done.stdout}{done.stderr}")
    return done
