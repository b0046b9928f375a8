"""The final accuracy of the methods: the runs that are trained, and what the page concludes."""

import math
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import accuracy, report, report_final
from benchmarks.net import data, training
from benchmarks.net.final import FinalAccuracy, FinalBench
from benchmarks.net.job import Job
from benchmarks.net.names import PLAIN, POWERSGD
from benchmarks.net.rows import FINAL, Table
from benchmarks.report_data import StepRows, read
from tests.support.ranks import on_threads

TOPK = 'bidirectional(topk(0.1), topk(0.1), selection="shard")'


def test_held_out_images_are_no_training_images() -> None:
    train, test = data.digits(8)
    rest, held = data.hold_out(train)
    assert (len(rest), len(held), len(test)) == (1197, 240, 360)
    everything = torch.cat([rest.images, held.images]).flatten(1)
    assert torch.equal(everything.sort(0).values, train.images.flatten(1).sort(0).values)


def test_the_learning_rate_is_that_of_the_best_held_out_accuracy_then_of_the_lowest_loss() -> None:
    def row(lr: float, found: float, loss: float, images: str = "held-out") -> dict[str, str]:
        texts = {"method": "m", "images": images, "lr": lr, "accuracy": found, "loss": loss}
        return {name: str(value) for name, value in texts.items()}

    rows = [row(0.1, 98, 0.3), row(0.2, 99, 0.2), row(0.4, 99, 0.1), row(0.8, 100, 0, "test")]
    assert accuracy.best_lrs(rows) == {"m": 0.4}
    # With several seeds, the means decide.
    assert accuracy.best_lrs([*rows, row(0.4, 98, 0.1), row(0.2, 99, 0.2)]) == {"m": 0.2}


def test_only_missing_runs_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []

    def results(job: Job, prefixes: list[list[str]]) -> Iterator[dict[str, Any]]:
        jobs.append(job)
        for method, lr, seed in job.runs:
            ranks = [{"accuracy": 0.5, "loss": 1.0, "steps": 7}] * len(prefixes)
            yield {"method": method, "rate": lr, "seed": seed, "parameters": 3, "ranks": ranks}

    monkeypatch.setattr(accuracy, "results", results)
    table = Table(tmp_path / "accuracy.csv", FINAL)
    runs = [("ddp", 0.1, 0), ("ddp", 0.1, 1)]
    accuracy.measure(table, "test", runs[:1], resume=True)
    accuracy.measure(table, "test", runs, resume=True)
    accuracy.measure(table, "held-out", runs, resume=True)
    accuracy.measure(table, "test", runs, resume=True)
    assert [(job.runs, job.held_out) for job in jobs] == [
        (tuple(runs[:1]), False),
        (tuple(runs[1:]), False),
        (tuple(runs), True),
    ]
    assert {job.world for job in jobs} == {4}
    rows = table.read()
    assert len(rows) == 4
    assert (rows[0]["accuracy"], rows[0]["loss"], rows[0]["steps"]) == ("50.000", "1.00000", "7")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "ef(topk(0.1))", "foo"], "error: .*'foo'"),
        (["--seeds", "0"], "error: --seeds.*at least 1.*0"),
        (["--out", __file__], f"error: --out {re.escape(__file__)}"),
        ([], "error: .*accuracy.csv.*date.*loss"),
    ],
)
def test_bad_input_ends_in_one_error_before_training(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "accuracy.csv").write_text("method,accuracy\nddp,99\n")
    monkeypatch.setattr(sys, "argv", ["accuracy.py", "--out", str(tmp_path), *words])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        accuracy.main()
    assert re.match(message, str(ended.value))
    assert (tmp_path / "accuracy.csv").read_text() == "method,accuracy\nddp,99\n"


@pytest.mark.parametrize("method", [PLAIN, "ef(topk(0.1))", "every(2)"])
def test_a_run_that_diverges_is_a_result(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_EPOCHS", 3)
    monkeypatch.setattr(training, "_WARM_UP_EPOCHS", 1)
    job = Job("final", "smallcnn", 256, 2, "", 0, "lo", counted=False)

    def body() -> FinalAccuracy:
        return FinalBench(job, dist.get_rank()).measure(method, 0, 1e30)

    assert {(each.accuracy, each.loss) for each in on_threads(2, body)} == {(0.0, math.inf)}


def final(method: str, *accuracies: float) -> report_final.Final:
    return report_final.Final(method, 0.1, dict(enumerate(accuracies)))


def test_a_method_is_below_another_by_more_than_two_standard_errors_only() -> None:
    plain = final(PLAIN, 99.0, 98.0, 97.0)
    assert final("m", 98.0, 97.1, 95.9).is_below(plain)
    assert not final("m", 99.0, 95.0, 98.0).is_below(plain)
    assert not final("m", 99.5, 98.5, 97.6).is_below(plain)


@pytest.mark.parametrize(
    ("accuracies", "reached"),
    [((98.0, 97.1, 95.9), "**no**"), ((99.0, 98.1, 97.0), "yes"), (None, "–")],
)
def test_a_fast_method_without_the_accuracy_does_not_reach_its_goal(
    accuracies: tuple[float, ...] | None, reached: str, tmp_path: Path
) -> None:
    lines = ["model,hosts,mbit,method,step_ms"]
    lines += [f"resnet18,4,100,{m},{ms}" for m, ms in (("no-op", 10), (POWERSGD, 100))]
    lines.append(f'resnet18,4,100,"{TOPK.replace(chr(34), chr(34) * 2)}",20')
    path = tmp_path / "network.csv"
    path.write_text("\n".join(lines))
    finals = {POWERSGD: final(POWERSGD, 99.0, 98.0, 97.0)}
    if accuracies is not None:
        finals[TOPK] = final(TOPK, *accuracies)
    assert report.above_floor_goal(StepRows(read(path)), TOPK, finals)[-1] == reached


def test_every_method_of_the_page_has_its_accuracy() -> None:
    results = Path(report.RESULTS)
    shown = set(StepRows(read(results / "network.csv")).methods())
    for name in ("time_to_accuracy", "loopback"):
        shown |= {row["method"] for row in report.read(results / f"{name}.csv")}
    found = report_final.finals(results / "accuracy.csv")
    assert shown <= set(found)
    assert all(len(each.by_seed) >= 5 for each in found.values())
