"""Run a script of recipes/integrations/, uninterrupted and resumed, and compare the two."""

import json
import sys

import pytest

from tests.support.commands import ROOT, run

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
METHODS = (("--compress", "ef(topk(0.05))"), ("--sync", "every(3)"))
"""With every(3), the checkpoint after 16 steps is inside a round."""

integrations = pytest.mark.integrations


def check_resumes(name, folder, method, launcher=TORCHRUN):
    """Require that a script of recipes/integrations/ learns, sends less, and resumes."""
    command = [*launcher, f"recipes.integrations.{name}", *method, "--out", str(folder)]
    python(*command)
    whole = results(folder)
    python(*command, "--resume")
    resumed = results(folder)
    assert whole[0]["weights"] == whole[1]["weights"]
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours["weights"] == theirs["weights"]
        assert len(ours["losses"]) == len(theirs["losses"]) / 2 == 16
        for each in (ours, theirs):  # a resumed run compares the ranks once more
            assert each["stats"].pop("total_control_bytes_sent") > 0
        assert ours["stats"] == theirs["stats"]
        stats = theirs["stats"]
        assert stats["steps"] == 32
        assert 0 < stats["total_bytes_sent"] < stats["total_dense_bytes_sent"] / 2
        assert sum(theirs["losses"][-4:]) < sum(theirs["losses"][:4]) / 2


def results(folder):
    paths = [folder / f"result-{rank}.json" for rank in range(2)]
    found = [json.loads(path.read_text()) for path in paths]
    for path in paths:
        path.unlink()
    return found


def python(*arguments, check=True):
    """Run Python in the repository, and return the completed process."""
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return run([sys.executable, *arguments], check=check, **environment)
