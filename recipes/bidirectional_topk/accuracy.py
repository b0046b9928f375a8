"""Final test accuracy of dense, uni- and bidirectional training, each at its own learning rate."""

import statistics
from dataclasses import dataclass

from recipes.bidirectional_topk.downlink import BOTH_WAYS, DENSE, ONE_WAY, UnionLog
from recipes.bidirectional_topk.problems import Problem
from recipes.bidirectional_topk.simulation import Workers
from recipes.bidirectional_topk.training import evaluate, train
from recipes.image_data.in_memory import Split

METHODS = {"dense": DENSE, "unidirectional": ONE_WAY, "bidirectional": BOTH_WAYS}
# No seed that is reported chooses a learning rate.
_TUNING_SEED = 1000


@dataclass(frozen=True)
class Score:
    """One method on one problem, after tuning.

    Attributes:
        lr: the best of the grid, by accuracy on the held-out training images, then by loss.
        at_edge: whether it is the grid's first or last, so that a better one may lie outside.
        accuracies: on the test images, in per cent, one for each seed.
        union: of the supports in units of K, over the second half of the runs; 0 for dense.
        tuning: accuracy on the held-out images, by learning rate.
    """

    dataset: str
    model: str
    method: str
    workers: int
    steps: int
    lr: float
    at_edge: bool
    accuracies: tuple[float, ...]
    union: float
    tuning: dict[float, float]

    @property
    def mean(self) -> float:
        """Mean accuracy."""
        return statistics.fmean(self.accuracies)

    @property
    def deviation(self) -> float:
        """Sample standard deviation of the accuracy."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0


def compare(
    problem: Problem, method: str, count: int, steps: int, rates: tuple[float, ...], seeds: int
) -> Score:
    """Tune one method's learning rate, then train with every seed."""
    tried = {
        lr: _run(problem, problem.validation, method, count, steps, lr, _TUNING_SEED)
        for lr in rates
    }
    lr = max(tried, key=lambda rate: (tried[rate][0], -tried[rate][1]))
    runs = [_run(problem, problem.test, method, count, steps, lr, seed) for seed in range(seeds)]
    return Score(
        dataset=problem.dataset,
        model=problem.model,
        method=method,
        workers=count,
        steps=steps,
        lr=lr,
        at_edge=lr in (rates[0], rates[-1]),
        accuracies=tuple(accuracy for accuracy, _, _ in runs),
        union=statistics.fmean(union for _, _, union in runs),
        tuning={rate: accuracy for rate, (accuracy, _, _) in tried.items()},
    )


def _run(
    problem: Problem, judged: Split, method: str, count: int, steps: int, lr: float, seed: int
) -> tuple[float, float, float]:
    """Return accuracy, loss and the late union of one run; a run that diverges scores 0."""
    model = problem.build(seed)
    compressed = method != "dense"
    workers = Workers(model, METHODS[method], count, watch=compressed)
    log = UnionLog(workers)
    after = log if compressed else None
    if not train(problem, workers, model, lr=lr, steps=steps, seed=seed, after_step=after):
        return 0.0, float("inf"), 0.0
    return *evaluate(model, judged), log.late if compressed else 0.0
