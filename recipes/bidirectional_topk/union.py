"""The union of the workers' supports, which an uncompressed downlink must carry.

It grows for hundreds of steps, while the residuals fill, so it is measured over whole runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace

from recipes.bidirectional_topk import runs
from recipes.bidirectional_topk.downlink import Traffic, count_traffic
from recipes.bidirectional_topk.problems import SHIFTED_DIGITS, Problem
from recipes.bidirectional_topk.runs import WINDOW, Run

LR = 0.3
STEPS = 1000
ONE_WAY, BOTH_WAYS = "unidirectional", "bidirectional"
COLUMNS = (*runs.COLUMNS, *(field.name for field in fields(Traffic)))


@dataclass(frozen=True)
class UnionSize:
    """The grid of the measurement.

    Attributes:
        seeds, varied_seeds: how many of the reported seeds are used, for the unidirectional runs of
            the MLP at the usual settings, and for all other runs.
        workers: N of the MLP, unidirectional and bidirectional. All other runs are unidirectional.
        other_workers: N of the CNN, and of the MLP on the shifted digits.
        ratio_workers, ratios: N of the runs with another K, and their K as shares of d.
        lr_workers, lrs: N of the runs with another learning rate, and their learning rates.
        long_workers, long_steps: N of the runs with more steps, and how many.
    """

    seeds: int = 3
    varied_seeds: int = 2
    steps: int = STEPS
    workers: tuple[int, ...] = (2, 5, 10, 20, 50, 100)
    other_workers: tuple[int, ...] = (5, 20, 100)
    ratio_workers: tuple[int, ...] = (20, 50)
    ratios: tuple[float, ...] = (0.0003, 0.003, 0.01)
    lr_workers: int = 20
    lrs: tuple[float, ...] = (0.1, 1.0)
    long_workers: int = 20
    long_steps: int = 2 * STEPS

    def task(self, dataset: str) -> str:
        """Return the settings that all rows share."""
        return f"{dataset}, {self.steps} steps, unions over windows of {WINDOW} steps"

    def runs(self, dataset: str, seeds: Sequence[int]) -> list[Run]:
        """Return all runs, those at the usual settings first."""
        usual = Run(dataset, "mlp", ONE_WAY, self.long_workers, LR, self.steps, seed=0)
        found = [
            replace(usual, seed=seed, workers=n)
            for seed in seeds[: self.seeds]
            for n in self.workers
        ]
        for seed in seeds[: self.varied_seeds]:
            found += self._varied_runs(replace(usual, seed=seed))
        return found

    def _varied_runs(self, usual: Run) -> Iterator[Run]:
        both_ways = replace(usual, method=BOTH_WAYS)
        yield from (replace(both_ways, workers=n) for n in self.workers)
        yield from (replace(usual, model="cnn", workers=n) for n in self.other_workers)
        for n in self.ratio_workers:
            yield from (replace(usual, workers=n, ratio=ratio) for ratio in self.ratios)
        yield from (replace(usual, workers=self.lr_workers, lr=lr) for lr in self.lrs)
        yield replace(usual, steps=self.long_steps)
        if usual.dataset == "digits":
            shifted = replace(usual, dataset=SHIFTED_DIGITS)
            yield from (replace(shifted, workers=n) for n in self.other_workers)
            yield replace(shifted, steps=self.long_steps)


def measure(run: Run, problem: Problem) -> list[object]:
    """Return the row of a run. Received bytes are counted only if the downlink is compressed."""
    outcome, workers = runs.train_serially(run, problem)
    counted: list[object] = [""] * len(fields(Traffic))
    if run.method == BOTH_WAYS:
        counted = list(asdict(count_traffic(run, problem, workers)).values())
    return [*runs.cells(run, outcome), *counted]
