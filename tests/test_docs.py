"""The code in the documentation runs as printed there."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import DEFAULT, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.fsdp.runs import NEEDS_HOOK
from tests.support.cases import thorough
from tests.support.outcomes import assert_replicas_equal, flat, same
from tests.support.patience import PATIENCE
from tests.support.ranks import on_processes, on_threads
from torchcomp import Averager
from torchcomp.specs import spec

ROOT = Path(__file__).parent.parent
SCRIPT_ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
README = (ROOT / "README.md").read_text()
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
USAGE = (ROOT / "docs" / "usage.md").read_text()
PLAN = (ROOT / "docs" / "plan.md").read_text()
FSDP = (ROOT / "docs" / "fsdp.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def after(diff: str) -> str:
    return "".join(line[1:] for line in diff.splitlines(keepends=True))


def readme_script(method: str) -> str:
    """Return the README's first script with `register` or with `LocalSGD`, or that with nodes."""
    if method == "nodes":
        return blocks(README, "python")[0]
    whole, local = blocks(README, "diff")
    assert whole.count("\n+") == 2, "an import and one line"
    if method == "register":
        return after(whole)
    without = "".join(line for line in whole.splitlines(keepends=True) if "register" not in line)
    context, added = local.splitlines(keepends=True)
    assert context in without
    assert added.startswith("+")
    return after(without.replace(context, local))


@pytest.mark.parametrize("method", ["register", *thorough(["LocalSGD", "nodes"])])
def test_readme_script_trains_with_the_added_line(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    # The exit code is not checked: gloo aborts some processes at exit, also with plain DDP (see
    # docs/assumptions.md).
    text, ranks = readme_script(method), 4 if method == "nodes" else 2
    call = "LocalSGD" if method == "LocalSGD" else "register"
    assert text.count(f"torchcomp.{call}(") == 1
    script.write_text(f'{text}\nprint("trained")\n')
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [*launcher, "--nproc-per-node", str(ranks), str(script)],
        env={**os.environ, **SCRIPT_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert run.stdout.count("trained") == ranks, run.stderr


def run_readme() -> tuple[int, int]:
    """Run the README's script with nodes, and its lines for FSDP2; return the steps of both."""
    nodes, sharding = blocks(README, "python")
    handles: list[torchcomp.Handle] = []
    register = torchcomp.register

    def registered(*args: Any, **options: Any) -> torchcomp.Handle:
        handles.append(register(*args, **options))
        return handles[-1]

    def mesh_of_four(*_: Any, **options: Any) -> DeviceMesh:
        return init_device_mesh("cpu", (2, 2), **options)

    with (
        patch.object(dist, "init_process_group"),
        patch.object(torchcomp, "register", registered),
    ):
        exec(nodes, {})
        torch.manual_seed(0)
        model = nn.Linear(8, 3)
        names = {"fully_shard": fully_shard, "init_device_mesh": mesh_of_four, "model": model}
        exec(sharding, {**names, "torchcomp": torchcomp})
    model(torch.ones(2, 8)).sum().backward()
    of_nodes, of_fsdp = handles
    return of_nodes.stats.steps, of_fsdp.stats.steps


@NEEDS_HOOK
def test_readme_trains_with_nodes_and_with_fsdp() -> None:
    assert on_processes(4, run_readme) == [(20, 1)] * 4


def run_usage(folder: str) -> int:
    os.chdir(folder)
    torch.manual_seed(0)  # Unlike DDP, Averager does not broadcast the weights of rank 0.
    model = DistributedDataParallel(nn.Linear(8, 3))
    data = [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(3)]
    names = {
        "dist": dist,
        "loader": data,
        "loss_of": nn.functional.cross_entropy,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "torch": torch,
    }
    for block in blocks(USAGE, "python"):
        exec(block, names)
    return int(names["handle"].stats.steps)


def test_usage_runs(tmp_path: Path) -> None:
    assert on_processes(2, run_usage, str(tmp_path)) == [3, 3]


def test_the_page_of_plan_runs_and_shows_the_printed_plan() -> None:
    names: dict[str, Any] = {}
    for block in blocks(PLAN, "python"):
        exec(block, names)
    assert f"```\n{names['plan']}\n```" in PLAN
    assert names["training"].hours > 0


def run_tutorial(folder: Path, *options: str) -> list[str]:
    """Run the tutorial's script on two ranks; return the lines that it prints."""
    (script,) = blocks(TUTORIAL, "python")
    (folder / "tutorial.py").write_text(script)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [*launcher, "--nproc-per-node", "2", "tutorial.py", *options],
        cwd=folder,
        env={**os.environ, **SCRIPT_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    return run.stdout.splitlines()


def test_the_tutorial_prints_what_it_shows_and_resumes(tmp_path: Path) -> None:
    shown = [line for line in TUTORIAL.splitlines() if line.endswith("MB sent")]
    assert len(run_tutorial(tmp_path, "--epochs", "1")) == len(shown) == 3
    # The last eleven of twelve epochs. The bytes are exact, and the accuracy is nearly the same.
    for line, printed in zip(shown, run_tutorial(tmp_path), strict=True):
        (accuracy, sent), (expected, megabytes) = (
            re.findall(r"([\d.]+)%? (?:correct|MB)", each) for each in (printed, line)
        )
        assert printed.split(": ")[0] == line.split(": ")[0]
        assert float(accuracy) == pytest.approx(float(expected), abs=3)
        assert sent == megabytes
    assert (tmp_path / "runs" / "tutorial" / "accuracy.png").stat().st_size > 10_000


def run_fsdp(folder: str) -> tuple[int, list[Path]]:
    os.chdir(folder)
    names: dict[str, Any] = {}
    # These processes have a group, which the page's later blocks use after the script's end.
    with patch.multiple(dist, init_process_group=DEFAULT, destroy_process_group=DEFAULT):
        for block in blocks(FSDP, "python"):
            exec(block, names)
    return names["handle"].stats.steps, sorted(Path("checkpoint").iterdir())


@NEEDS_HOOK
def test_fsdp_runs(tmp_path: Path) -> None:
    for steps, files in on_processes(4, run_fsdp, str(tmp_path)):
        assert steps == 21
        assert files


def test_readme_fits_a_hundred_columns() -> None:
    assert max(map(len, README.splitlines())) <= 100


def contributed(block: int, name: str) -> dict[str, Any]:
    """Return the names that a code block of CONTRIBUTING.md defines, run as module `name`."""
    names: dict[str, Any] = {"__name__": name}
    exec(blocks(CONTRIBUTING, "python")[block], names)
    return names


def test_contributing_adds_a_compressor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(spec.COMPONENTS, "sign", contributed(0, "sign")["Sign"])

    def body(exchange: torchcomp.InProcessExchange) -> Tensor:
        mean = {"w": torch.tensor([3.0, -1.0, 0.0])}
        Averager("ef(sign)", exchange, mean).average_all(mean)
        return mean["w"]

    for mean in torchcomp.run_in_process(2, body):
        torch.testing.assert_close(mean, torch.tensor([4 / 3, -4 / 3, 0.0]))
    assert torchcomp.explain("ef(sign)", numel=3, world_size=2).message_bytes == 3 + 4


def test_contributing_adds_an_aggregator(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = contributed(1, "plain_ef")["PlainEF"]
    monkeypatch.setitem(spec.COMPONENTS, "plain_ef", plain)

    def run(exchange: torchcomp.InProcessExchange, spec: str) -> Any:
        generator = torch.Generator().manual_seed(exchange.rank)
        averager, means = Averager(spec, exchange, {"w": torch.zeros(20)}), []
        for _ in range(4):
            # A new averager with the same state continues the same way.
            state, averager = averager.state_dict(), Averager(spec, exchange, averager.parameters)
            averager.load_state_dict(state)
            means.append({"w": torch.randn(20, generator=generator)})
            averager.average_all(means[-1])
        return means, averager.residual_norms(), averager.stats.bytes_sent

    ours, theirs = (
        torchcomp.run_in_process(3, lambda each, spec=spec: run(each, spec))
        for spec in ("plain_ef(topk(0.25))", "ef(topk(0.25))")
    )
    assert same(ours, theirs)
    plan = torchcomp.explain("plain_ef(topk(0.25))", numel=20, world_size=3)
    assert plan.bytes_sent == ours[0][-1] > 0


def test_contributing_averages_in_a_loop() -> None:
    draw = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(4, 8, generator=draw), torch.randint(3, (4,), generator=draw))
        for _ in range(12)
    ]
    models = contributed(2, "loop")["train"]("ef(topk(0.25))", 3, data)
    assert models[0].weight.abs().sum() > 0
    assert_replicas_equal([flat(model.parameters()) for model in models])


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGE = Path(torchcomp.__file__).parent


def traced_step() -> list[str]:
    """Run DDP steps with ``ef(topk(0.5))``; return the files that the last bucket passes."""
    calls = list[tuple[str, str]]()

    def record(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            file = str(Path(frame.f_code.co_filename).relative_to(PACKAGE))
            calls.append((file, frame.f_code.co_name))

    model = DistributedDataParallel(torch.nn.Linear(8, 3))
    torchcomp.register(model, "ef(topk(0.5))")
    model(torch.ones(2, 8)).sum().backward()  # prepares the bucket
    sys.setprofile(record)
    try:
        model(torch.ones(2, 8)).sum().backward()
    finally:
        sys.setprofile(None)
    # Without the calls of the first job before its bucket, which ask whether the last step counts.
    starts = [("ddp/hook.py", "hook"), ("ddp/executors.py", "submit")]
    starts += [("engine/averager.py", "average")]
    at = [calls.index(start) for start in starts]
    assert at == sorted(at)
    return list(dict.fromkeys(file for file, _ in [*starts, *calls[at[-1] :]]))


def test_architecture_has_the_stations_of_a_bucket_in_order() -> None:
    stations = re.findall(r"^\| \d \| \w+ \| `([\w/]+\.py)` \|", ARCHITECTURE, re.MULTILINE)
    assert len(stations) == 7
    for files in on_threads(2, traced_step):
        assert [file for file in files if file in stations] == stations
    picture = (ROOT / "docs" / "architecture.svg").read_text()
    assert re.findall(r">([\w/]+\.py)<", picture) == stations


def names_of_the_code() -> set[str]:
    """Return all names that the package defines: modules, classes, functions, parameters, keys."""
    names = {"torchcomp", *spec.COMPONENTS}
    for path in PACKAGE.rglob("*.py"):
        names |= {path.stem, path.parent.name}
        for node in ast.walk(ast.parse(path.read_text())):
            # Values are the names of slots and the keys of a state.
            found = (getattr(node, field, None) for field in ("name", "arg", "id", "attr", "value"))
            names |= {name for name in found if isinstance(name, str)}
    return names


def test_architecture_names_only_what_the_code_has() -> None:
    prose = re.sub(r"^```.*?^```", "", ARCHITECTURE, flags=re.MULTILINE | re.DOTALL)
    known, unknown = names_of_the_code(), []
    for name in re.findall("`([^`]+)`", prose):
        if "/" in name:
            places = (PACKAGE, ROOT)
            unknown += [] if any((place / name).exists() for place in places) else [name]
        else:
            unknown += [part for part in re.findall(r"[A-Za-z_]\w*", name) if part not in known]
    assert unknown == []
    assert len(ARCHITECTURE.split()) <= 1200


def test_architecture_has_every_room_and_every_key_of_a_state() -> None:
    cells = re.findall(r"^\| (`.*?) \|", ARCHITECTURE.partition("## Rooms")[2], re.MULTILINE)
    named = set(re.findall(r"`(\w+)/?`", " ".join(cells)))
    assert named >= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    (form,) = re.findall(r"```\n(.*?)```", ARCHITECTURE, re.DOTALL)
    (state,) = torchcomp.run_in_process(
        1, lambda exchange: Averager("ef(topk(0.5))", exchange, {"w": torch.ones(4)}).state_dict()
    )
    assert set(state) <= set(re.findall(r'"(\w+)"', form))


def test_the_traffic_in_choosing_is_what_explain_counts() -> None:
    lines = (ROOT / "docs" / "choosing.md").read_text().splitlines()
    start = lines.index("| method | N = 2 | 4 | 8 | 16 | 64 |") + 2
    rows = [line.strip("| ").split(" | ") for line in lines[start : lines.index("", start)]]
    assert len(rows) == 6
    for label, *shown in rows:
        spec = label.split("`")[1]
        plans = [torchcomp.explain(spec, numel=25_557_032, world_size=n) for n in (2, 4, 8, 16, 64)]
        assert shown == [f"{plan.bytes_sent / 1e6:,.1f}" for plan in plans], spec
