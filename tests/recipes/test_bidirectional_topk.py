"""Bidirectional TopK: algorithms on ranks, many workers in one process, and the numbers."""

import itertools

import pytest
import torch
from torch.nn.functional import cross_entropy

import torchcomp
from recipes.bidirectional_topk import counterexample, problems, runs
from recipes.bidirectional_topk.runs import Run
from recipes.bidirectional_topk.workers import METHODS, SerialWorkers
from recipes.rows import build, read_rows
from tests.recipes.runs import RECIPES, published
from tests.support.ranks import on_threads

NAME = "bidirectional_topk"
RESULTS = RECIPES / NAME / "results"


def test_published_runs_have_the_thesis_s_numbers():
    rows = read_rows(RESULTS / "counterexample.csv")
    assert len(rows) == 15
    assert counterexample.differences(rows) == []
    next(row for row in rows if row["lr"] == 0.01)["F_at_300"] += 0.001
    assert len(counterexample.differences(rows)) == 1


@pytest.mark.parametrize("method", counterexample.METHODS)
def test_f_is_reproduced_to_its_last_digit(method):
    spec = counterexample.METHODS[method]
    found = on_threads(3, counterexample.train, spec, counterexample.LR, 150)[0]
    curves = read_rows(RESULTS / "counterexample_curves.csv")[:150]
    assert found == pytest.approx([row[method] for row in curves], abs=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_serial_workers_train_like_averagers(method):
    digits = problems.open_problem("digits", "cnn", None)
    models = digits.build(0), digits.build(0)
    # More workers than are computed together.
    count, spec = 27, METHODS[method].spec(0.001)
    parameters = dict(models[0].named_parameters())
    exchanges = torchcomp.InProcessExchange.ranks(count)
    averagers = [torchcomp.Averager(spec, each, parameters) for each in exchanges]
    serial = SerialWorkers(models[1], METHODS[method], count, 0.001)
    for shares in itertools.islice(problems.batches(digits, count, 0), 4):
        every, gradients = digits.train.take(shares), []
        assert serial.step(every.images, every.labels, lr=0.3)
        for share in shares:
            mine = digits.train.take(share)
            loss = cross_entropy(models[0](mine.images), mine.labels)
            found = torch.autograd.grad(loss, list(parameters.values()))
            gradients.append(dict(zip(parameters, found, strict=True)))
        torchcomp.run_in_process(
            count, lambda e, g=gradients: averagers[e.rank].average_all(g[e.rank]), exchanges
        )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.sub_(gradients[0][name], alpha=0.3)
    # Only the order of some sums differs.
    pairs = [torch.nn.utils.parameters_to_vector(model.parameters()) for model in models]
    torch.testing.assert_close(*pairs, rtol=0, atol=1e-6)


def test_an_accuracy_is_reproduced():
    row = published(NAME, "accuracy", model="mlp", workers=20, method="bidirectional", seed=3)
    run = build(Run, row)
    outcome = runs.train(run, problems.open_problem(run.dataset, run.model, None))
    # Machines add in different orders. One test image of 355 is 0.28 points.
    assert float(outcome.accuracy) == pytest.approx(row["accuracy"], abs=0.6)
    unions = [list(map(float, text.split())) for text in (outcome.unions, row["unions"])]
    assert unions[0] == pytest.approx(unions[1], rel=0.02)
