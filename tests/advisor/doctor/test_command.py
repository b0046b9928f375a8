"""The command: bad options, one rank, and two ranks that run a user's script."""

import json
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.commands import run
from torchcomp.advisor.command import main
from torchcomp.advisor.doctor import command, measures, training
from torchcomp.advisor.doctor.training import MODES, NO_EXCHANGE


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Run doctor for a moment, as the only rank, with a script. Return its status and output."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measures, "_SECONDS", 0.005)

    def examined(capsys, *given, script=""):
        (tmp_path / "train_alone.py").write_text(script)
        status = main(["doctor", "--seconds", "0.2", "--json", "-", *given])
        if dist.is_initialized():  # by a script that failed
            dist.destroy_process_group()
        printed = capsys.readouterr()
        return status, json.loads(printed.out), " ".join(printed.err.split())

    return examined


DDP = """
import torch, torchcomp
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DDP(torch.nn.Linear(5, 2))
"""
WITHOUT = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
while True:
    model(torch.ones(2)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("raise ValueError('no data')", ["ValueError", "no data"]),
        ("import sys; sys.exit(4)", ["exit status 4"]),
        ("pass", ["0 steps", "DistributedDataParallel"]),
        (WITHOUT, ["100 steps", "DistributedDataParallel"]),
        (f"{DDP}torchcomp.register(model, 'topk(0.5)')", ["train_alone.py", "without torchcomp"]),
    ],
)
def test_a_script_that_fails_is_named_and_exits_3(script, words, alone, capsys):
    status, values, printed = alone(capsys, "--script", "train_alone.py", script=script)
    assert (status, values["status"]) == (3, 3)
    assert [word for word in words if word not in values["error"]] == []
    assert values["error"] in printed
    # What was measured before it is there.
    assert (len(values["facts"]), len(values["speeds"]), values["rows"]) == (1, 1, [])


TRAINS = f"""{DDP}
import sys
assert sys.argv[1:] == ["--lr", "0.1"] and __name__ == "__main__"
print("stdout is for the JSON")
while True:
    try:
        model(torch.randn(4, 5)).sum().backward()
    except BaseException:  # of any kind, as some scripts do
        del model
        sys.exit(1)
"""


@pytest.mark.parametrize(
    "words",
    [
        ["--script", "train_alone.py", "--lr", "0.1"],
        ["--script", "-m", "train_alone", "--lr", "0.1"],
        ["--numel", "5000", "--step-ms", "60"],
    ],
    ids=" ".join,
)
def test_one_rank_runs_a_file_a_module_or_a_synthetic_model(words, alone, capsys, monkeypatch):
    monkeypatch.syspath_prepend(".")
    status, values, printed = alone(capsys, *words, script=TRAINS)
    assert not dist.is_initialized()
    assert ("stdout is for the JSON" in printed) == ("--script" in words)
    assert (status, values["verdict"], values["collectives"]) == (0, None, None)
    (row,) = values["rows"]
    # The synthetic model sleeps for that long at least.
    assert (row["method"], row["seconds"] > 0.059 * ("--numel" in words)) == (NO_EXCHANGE, True)


class TwoHeads(nn.Module):
    """A model with two outputs, a shared parameter and buffers, without values."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(3, 4), nn.Linear(3, 4), nn.BatchNorm1d(3)
        with torch.device("meta"):
            self.first.weight = self.second.weight = nn.Parameter(torch.empty(4, 3))

    def forward(self, images):
        assert self.first.weight is self.second.weight
        assert self.norm.running_var.shape == (3,)
        means = self.norm(images.mean((2, 3)))
        return self.first(means), self.second(means)


def test_a_named_model_is_trained_by_all_of_its_outputs(alone, capsys, monkeypatch):
    for module in (command, training):
        monkeypatch.setattr(module, "build_named", lambda name: TwoHeads())
    status, values, _ = alone(capsys, "--model", "timm/two_heads", "--batch", "2")
    assert (status, values["error"]) == (0, "")
    assert values["rows"][0]["seconds"] > 0
    assert values["workload"] == "timm/two_heads, batch 2 per rank"


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from helper import ACCUMULATED

def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(50, 20))
    optimizer = torch.optim.AdamW(model.parameters())
    micro_batches = 0
    try:
        while True:
            with model.no_sync():
                model(torch.randn(4, 50)).square().mean().backward()
            model(torch.randn(4, 50)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            micro_batches += ACCUMULATED
    except Exception:
        print("the end was caught")
    finally:
        print(sys.argv, micro_batches)
        dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


def test_two_ranks_run_a_script_under_torchrun(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("ACCUMULATED = 2\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    doctor = ["-m", "torchcomp", "doctor", "--seconds", "1", "--json", str(tmp_path / "out.json")]
    script = ["--script", str(tmp_path / "train.py"), "--lr", "0.1"]
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    words = [*torchrun, "--nproc-per-node", "2", *doctor, *script]
    done = run(words, check=False, **environment)
    assert (tmp_path / "out.json").exists(), done.stderr
    values = json.loads((tmp_path / "out.json").read_text())
    # A busy machine can have a slow rank, but nothing else.
    found = {finding["code"] for finding in values["findings"]}
    assert found <= {"slow-rank"}, done.stdout
    assert (values["status"], done.returncode) == ((1, 1) if found else (0, 0)), done.stderr
    assert [row["method"] for row in values["rows"]][:3] == list(MODES)
    assert len(values["verdict"]["rows"]) > 3
    assert (len(values["links"]), values["collectives"]["world_size"]) == (2, 2)
    assert str([str(tmp_path / "train.py"), "--lr", "0.1"]) in done.stdout
    assert "caught" not in done.stdout
    assert done.stdout.count("verdict: ") == 1
    assert "measuring collectives" in done.stderr
