"""QSR: simulated ranks and real ones, tuning, and the reproduced number."""

import copy
import itertools

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from recipes.experiments import ResultTable
from recipes.qsr import experiment, task, training
from recipes.qsr.settings import METHODS, PARALLEL, QUICK_GRID, Point, Run, Setting, Study
from recipes.qsr.task import SAMPLES
from recipes.qsr.training import Outcome, train
from recipes.rows import build, columns, grouped, typed, where
from tests.recipes.runs import published
from tests.support.ranks import on_threads

NAME = "qsr"
NUMEL = 64 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10
SHORT = Setting(ranks=2, epochs=2)


def real(setting, point, seeds, start):
    """Train as one rank of the default group, through plain DDP or LocalSGD."""
    drawn = [task.draw(seed, "test", setting.label_noise) for seed in seeds]
    model = DistributedDataParallel(copy.deepcopy(start))
    optimizer = training.build_optimizer(setting, point, model)
    total, sync = setting.total_steps(SAMPLES), None
    if point.schedule != PARALLEL:
        lengths = {"total_steps": total, "warmup_steps": setting.warmup_steps(SAMPLES)}
        sync = torchcomp.LocalSGD(model, optimizer, point.schedule, **lengths)
    lr_at = setting.lr_function(point.lr, SAMPLES)
    stream = training.batches(setting, seeds, [each for each, _ in drawn])
    for step, batch in enumerate(itertools.islice(stream, total)):
        optimizer.param_groups[0]["lr"] = lr_at(step)
        optimizer.zero_grad()
        mine = [each.chunk(dist.get_world_size())[dist.get_rank()] for each in batch]
        training.loss_of(model, mine).backward()
        optimizer.step()
    counts = (total, 0)
    if sync is not None:
        counts = (sync.stats.syncs, sync.stats.total_bytes_sent // len(seeds))
        sync.close()
    scores = training.evaluate(model.module, [each for _, each in drawn])
    return [(*score, *counts) for score in scores]


@pytest.mark.parametrize(
    ("ranks", "model", "optimizer", "decay", "schedule"),
    [
        (4, "mlp", "sgd", "cosine", "parallel"),
        (4, "mlp", "sgd", "step", "qsr(alpha=0.1, h_base=2)"),
        (4, "mlp", "adamw", "linear", "swap(switch=12)"),
        (2, "vit", "adamw", "cosine", "every(3)"),
    ],
)
def test_simulated_ranks_do_what_ddp_and_local_sgd_do(ranks, model, optimizer, decay, schedule):
    setting = Setting(model=model, optimizer=optimizer, decay=decay, ranks=ranks, epochs=2)
    point = Point("any", schedule, 0.1 if optimizer == "sgd" else 0.003, 5e-4)
    start = training.build(model, (3, 5))
    found = on_threads(ranks, real, setting, point, (3, 5), start)[0]
    both = train(setting, point, (3, 5), "test")
    for outcome, theirs in zip(both, found, strict=True):
        assert (outcome.accuracy, outcome.loss, outcome.syncs) == theirs[:3]
        assert theirs[3] in (0, outcome.nbytes)
    # Seeds side by side do not change each other.
    assert both[0].loss != both[1].loss
    for seed, outcome in zip((3, 5), both, strict=True):
        (alone,) = train(setting, point, [seed], "test")
        assert outcome.loss == pytest.approx(alone.loss, abs=2e-4)


def test_each_method_is_reported_at_its_best_point_with_exact_bytes(tmp_path):
    path = tmp_path / "own.csv"
    table = ResultTable(path, columns(Run), columns(Outcome), "a task", resume=False)
    experiment.run_study(Study(SHORT, METHODS), table, QUICK_GRID, (0, 1), (1000,))
    finished = typed(table.rows)
    for method, rows in grouped(finished, "method").items():
        (point,) = grouped(where(rows, part="test"), lambda row: build(Point, row))
        points = QUICK_GRID.points(method, SHORT, SAMPLES, 0.1)
        tried = {build(Point, row): row["accuracy"] for row in where(rows, part="validation")}
        assert all(tried[point] >= tried[each] for each in points)
        assert {row["seed"] for row in where(rows, part="test")} == {0, 1}
    for row in finished:
        # In an all-reduce, each of two ranks sends half of the model twice.
        assert row["nbytes"] == row["syncs"] * NUMEL * 4
        assert row["syncs"] == 22 or row["method"] != PARALLEL


def test_an_accuracy_is_reproduced():
    row = published(NAME, "lengths", epochs=30, method="QSR", part="test", seed=4)
    run = build(Run, row)
    (outcome,) = train(run.setting, run.point, [run.seed], run.part)
    # Machines add in different orders. One image of 538 is 0.19 points.
    assert outcome.accuracy == pytest.approx(row["accuracy"], abs=0.6)
    assert (outcome.syncs, outcome.nbytes) == (row["syncs"], row["nbytes"])
