"""Ranks that are models side by side in one process, at a tenth of the time of processes.

A step of a small model on a rank takes less time than its wait for the other ranks. The schedule
decides when to average, by :func:`torchcomp.sync_steps`. Tests compare the results with those of
``torchcomp.LocalSGD`` and of plain DDP: they are equal.
"""

import copy
from collections.abc import Sequence

import torch
from torch import nn

import torchcomp
from recipes.qsr.settings import Setting
from recipes.qsr.side_by_side import average_over_ranks, first_models
from recipes.qsr.task import Task
from recipes.qsr.training import PARALLEL, Batch, Outcome, Point, train


def train_simulated(
    task: Task, setting: Setting, point: Point, *, seeds: Sequence[int], part: str, curve: bool
) -> list[Outcome]:
    """Train on simulated ranks; the arguments are those of :func:`recipes.qsr.training.train`."""
    ranks = SimulatedRanks(task, setting, point, seeds)
    return train(task, setting, point, ranks, seeds=seeds, part=part, curve=curve)


class SimulatedRanks:
    """The ranks of one run. Their models must have no BatchNorm, whose buffers are not averaged."""

    def __init__(self, task: Task, setting: Setting, point: Point, seeds: Sequence[int]) -> None:
        samples = task.samples
        self._count, self._seeds = setting.ranks, len(seeds)
        # All ranks start with the same weights.
        self.model = task.build(setting.model, [*seeds] * self._count)
        self._parallel = point.schedule == PARALLEL
        self._ends = set(
            torchcomp.sync_steps(
                "every(1)" if self._parallel else point.schedule,
                lr=setting.lr_function(point.lr, samples),
                total_steps=setting.total_steps(samples),
                warmup_steps=setting.warmup_steps(samples),
            )
        )

    def shard(self, batch: Batch) -> Batch:
        """Return (N, S, ...) as (N / K, K * S, ...): each of K ranks takes a slice of the batch."""
        inputs, labels = (
            each.unflatten(0, (self._count, -1)).transpose(0, 1).flatten(1, 2) for each in batch
        )
        return inputs, labels

    def start(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing."""

    def after_backward(self) -> None:
        """Average the gradients if the schedule is parallel training."""
        if self._parallel:
            average_over_ranks(self.model, self._count, gradients=True)

    def after_step(self, step: int) -> None:
        """Average the parameters if a round ends here."""
        if step in self._ends and not self._parallel:
            average_over_ranks(self.model, self._count)

    def averaged(self) -> nn.Module:
        """Return the mean over the ranks, as a copy."""
        averaged = copy.deepcopy(self.model)
        average_over_ranks(averaged, self._count)
        return first_models(averaged, self._seeds)

    def finish(self) -> tuple[int, int]:
        """Return the number of averages, and the bytes that a rank of processes would send."""
        numel = sum(parameter.numel() for parameter in self.model.parameters())
        one = numel // (self._count * self._seeds)
        plan = torchcomp.explain("mean", numel=one, world_size=self._count)
        return len(self._ends), len(self._ends) * plan.dense_bytes_sent
