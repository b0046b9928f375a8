"""The command: bad options, one rank, and two ranks that run a user's script."""

import json
import sys

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.commands import run
from torchcomp.__main__ import main
from torchcomp.doctor.phases import MODES
from torchcomp.doctor.workloads import materialized


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--numel", "1e6"], ["--numel", "--step-ms"]),
        (["--step-ms", "5"], ["--step-ms", "--numel"]),
        (["--batch", "5"], ["--batch", "--model"]),
        (["--model", "timm/x", "--numel", "5"], ["--model", "--numel"]),
        (["--model", "x"], ["'x'", "timm/NAME"]),
        (["--timeout", "0"], ["--timeout", " 0"]),
        (["--backend", "mpi"], ["--backend", "'mpi'"]),
        (["--json", "/no such/x.json"], ["--json", "/no such"]),
        (["--script"], ["--script", "-m"]),
        (["--script", "-m"], ["--script", "-m"]),
        (["--script", "none.py", "--flag"], ["none.py"]),
    ],
    ids=" ".join,
)
def test_bad_options_are_explained_on_stderr_and_exit_2(options, words, capsys):
    try:
        status = main(["doctor", *options])
    except SystemExit as error:
        status = error.code
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    message = printed.err.partition("error: ")[2] or printed.err
    assert [word for word in words if word not in " ".join(message.split())] == []
    assert max(map(len, printed.err.split("\n"))) <= 80


def test_help_names_the_exit_statuses_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", "--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.split("\n"))) <= 80
    assert "0 healthy, 1 something was found, 2 bad options, 3 a link" in " ".join(printed.split())


def test_a_model_gets_values_and_keeps_shared_parameters_and_buffers():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    with torch.device("meta"):
        model[0].weight = model[2].weight = nn.Parameter(torch.empty(3, 3))
    made = materialized(model, torch.device("cpu"))
    assert made[0].weight is made[2].weight
    assert all(not parameter.is_meta for parameter in made.parameters())
    assert made[1].running_var.tolist() == [1.0] * 3


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
        raise
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
    command = [*torchrun, "--nproc-per-node", "2", *doctor, *script]
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = run(command, check=False, **environment)
    assert (tmp_path / "out.json").exists(), done.stderr
    values = json.loads((tmp_path / "out.json").read_text())
    # A busy machine can have a slow rank, but nothing else.
    assert "findings" in values, f"{values}\n{done.stderr}"
    found = {finding["code"] for finding in values["findings"]}
    assert found <= {"slow-rank"}, done.stdout
    assert (values["status"], done.returncode) == ((1, 1) if found else (0, 0)), done.stderr
    assert [row["method"] for row in values["rows"]] == list(MODES)
    assert values["verdict"]["bound"]
    assert len(values["links"]) == 2
    assert values["collectives"]["world_size"] == 2
    assert str([str(tmp_path / "train.py"), "--lr", "0.1"]) in done.stdout
    assert "caught" not in done.stdout
    report = done.stdout[done.stdout.index("torchcomp doctor: ") :]
    assert all(len(line) <= 80 or " " not in line.strip() for line in report.split("\n"))
    assert report.count("verdict: ") == 1
    assert "measuring collectives" in done.stderr
    assert DistributedDataParallel.__init__.__qualname__ == "DistributedDataParallel.__init__"
