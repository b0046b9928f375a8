"""The comparison of the learning rate inside and outside of the residual."""

from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from recipes.bidirectional_topk import lr_inside
from recipes.bidirectional_topk.lr_inside import LrInsideSize, LrRun
from recipes.bidirectional_topk.methods import METHODS
from recipes.bidirectional_topk.problems import Problem, open_problem
from recipes.bidirectional_topk.runs import RATIO
from recipes.bidirectional_topk.serial import SerialWorkers
from recipes.bidirectional_topk.simulation import Workers
from recipes.bidirectional_topk.training import batches
from recipes.experiments import ResultTable
from recipes.image_data.in_memory import Split

LRS = (0.5, 0.5, 0.1, 0.2, 0.01)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return open_problem("digits", "mlp", None)


def loss_of(model: nn.Module, batches: Split, rank: int) -> Tensor:
    return cross_entropy(model(batches.images[rank]), batches.labels[rank])


@pytest.mark.parametrize("method", lr_inside.COMPARED)
def test_the_serial_form_is_that_of_the_library(method: str, problem: Problem) -> None:
    serial = SerialWorkers(problem.build(0), METHODS[method], 3, RATIO)
    model = problem.build(0)
    workers = Workers(model, METHODS[method].spec(RATIO), 3)
    before = LRS[0]
    for lr, chosen in zip(LRS, batches(problem, 3, seed=0), strict=False):
        mine = problem.train.take(chosen)
        lr_inside.convert_residuals(serial, before / lr)
        assert serial.step(mine.images, mine.labels, lr)
        assert workers.backward(partial(loss_of, model, mine), lr)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=lr)
        before = lr
    flat = parameters_to_vector(model.parameters())
    torch.testing.assert_close(serial.weights, flat.detach(), rtol=0, atol=1e-6)
    assert (serial.weights - parameters_to_vector(problem.build(0).parameters())).abs().max() > 0.01


def test_only_a_falling_learning_rate_tells_the_forms_apart(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = LrInsideSize(workers=3, steps=8)

    def outcomes(schedule: str) -> set[tuple[float, float]]:
        runs = [LrRun(schedule, "bidirectional", f, "test", 0.3, 0) for f in lr_inside.FORMS]
        return {lr_inside.train(problem, size, run) for run in runs}

    assert len(outcomes("by steps")) == 2
    monkeypatch.setitem(lr_inside.SCHEDULES, "constant", lambda done: 1.0)
    assert len(outcomes("constant")) == 1


def test_the_rows_are_resumed_and_compared(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[LrRun] = []

    def train(problem: Problem, size: LrInsideSize, run: LrRun) -> tuple[float, float]:
        trained.append(run)
        # The larger learning rate is better, and "inside" is better by 1 on average.
        return 10 * run.lr + (run.form == "inside") * (0.5 + run.seed), 1.0

    monkeypatch.setattr(lr_inside, "train", train)
    size = LrInsideSize(lrs=(1.0, 2.0))

    def measured(resume: bool) -> ResultTable:
        path, task = tmp_path / lr_inside.TABLE, size.task(problem.dataset)
        table = ResultTable(path, lr_inside.COLUMNS, task, resume=resume)
        lr_inside.measure(problem, size, table, seeds=(0, 1), tuning=(7,))
        return table

    rows = measured(resume=False).rows
    # Two schedules, methods and forms: two tuning runs and two reported ones for each.
    assert len(rows) == len(trained) == 8 * 4
    assert measured(resume=True).rows == rows
    assert len(trained) == 8 * 4
    # A reported run at a learning rate that is not chosen does not count.
    other = {**rows[-1], "lr": "1.0", "accuracy": "0"}
    found = lr_inside.compare([*rows, other])
    assert [(each.schedule, each.method) for each in found] == [
        (schedule, method) for schedule in lr_inside.SCHEDULES for method in lr_inside.COMPARED
    ]
    for each in found:
        assert each.lrs == {"outside": 2.0, "inside": 2.0}
        assert each.accuracy["outside"].mean == 20.0
        assert (each.gain.mean, each.gain.count) == (1.0, 2)
        assert "+1.00 ± 0.50" in lr_inside.text_of(rows)


def test_a_row_has_the_settings_of_its_run() -> None:
    run = LrRun("cosine", "bidirectional", "inside", "test", 0.3, 4)
    assert LrRun.of({name: str(value) for name, value in asdict(run).items()}) == run
