"""Ranks that are processes: plain DDP, or local steps by ``torchcomp.LocalSGD``."""

import copy
import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from recipes.qsr.settings import Setting
from recipes.qsr.task import Task
from recipes.qsr.training import DIVERGED, PARALLEL, Batch, Outcome, Point, batches, train

# As many training images re-estimate the statistics of BatchNorm after the last average.
BN_IMAGES = 4096


def train_on_ranks(
    task: Task, setting: Setting, point: Point, *, seeds: Sequence[int], part: str, curve: bool
) -> list[Outcome]:
    """Train as one rank of the default group; all ranks call this and get the same outcomes.

    The arguments are those of :func:`recipes.qsr.training.train`.
    """
    ranks = RealRanks(task, setting, point, seeds, part)
    try:
        found = train(task, setting, point, ranks, seeds=seeds, part=part, curve=curve)
    except torchcomp.NonFiniteError:
        # It is raised on every rank, so all ranks take the same branch.
        if len(seeds) == 1:
            return [Outcome(*DIVERGED, 0, 0)]
    else:
        # Rounding can differ between ranks. With the results of one, all choose the same points of
        # the grid. Otherwise, their next collectives might not match.
        box = [found]
        dist.broadcast_object_list(box, src=0)
        return box[0]
    finally:
        ranks.close()
    # One seed has diverged, which ended the run of all.
    alone = [
        train_on_ranks(task, setting, point, seeds=[seed], part=part, curve=curve) for seed in seeds
    ]
    return [outcome for (outcome,) in alone]


class RealRanks:
    """This rank's share of one run."""

    def __init__(
        self, task: Task, setting: Setting, point: Point, seeds: Sequence[int], part: str
    ) -> None:
        self._task, self._setting, self._seeds, self._part = task, setting, seeds, part
        self._schedule = point.schedule
        self.model = DistributedDataParallel(task.build(setting.model, seeds))
        self._sync: torchcomp.LocalSGD | None = None

    def shard(self, batch: Batch) -> Batch:
        """Return this rank's slice of a batch of all ranks."""
        inputs, labels = (each.chunk(dist.get_world_size())[dist.get_rank()] for each in batch)
        return inputs, labels

    def start(self, optimizer: torch.optim.Optimizer) -> None:
        """Wrap model and optimizer, except for parallel training."""
        if self._schedule == PARALLEL:
            return
        samples = self._task.samples
        self._sync = torchcomp.LocalSGD(
            self.model,
            optimizer,
            self._schedule,
            total_steps=self._setting.total_steps(samples),
            warmup_steps=self._setting.warmup_steps(samples),
        )

    def after_backward(self) -> None:
        """Do nothing: DDP has averaged the gradients."""

    def after_step(self, step: int) -> None:
        """Do nothing: ``LocalSGD`` has averaged the parameters."""

    def averaged(self) -> nn.Module:
        """Return a copy with the mean of all ranks' parameters and statistics."""
        averaged = copy.deepcopy(self.model.module)
        for tensor in itertools.chain(averaged.parameters(), averaged.buffers()):
            if tensor.is_floating_point():
                dist.all_reduce(tensor.data)
                tensor.data /= dist.get_world_size()
        return averaged

    def finish(self) -> tuple[int, int]:
        """Return the traffic of a seed, after re-estimating the statistics of BatchNorm."""
        if self._sync is None:
            # DDP has no counter. Its traffic is what the plan of an uncompressed mean predicts.
            plan = torchcomp.explain("mean", model=self.model, world_size=dist.get_world_size())
            syncs = self._setting.total_steps(self._task.samples)
            return syncs, syncs * plan.dense_bytes_sent // len(self._seeds)
        stats = self._sync.stats
        self.close()
        # The mean of the ranks' statistics fits the averaged weights only approximately.
        if any(isinstance(each, nn.BatchNorm2d) for each in self.model.modules()):
            train = [self._task.draw(seed, self._part)[0] for seed in self._seeds]
            more = batches(self._task, self._setting, self._seeds, train, self._setting.epochs)
            images = (self.shard(batch)[0] for batch in more)
            torchcomp.reestimate_batchnorm(self.model, images, BN_IMAGES)
        return stats.syncs, stats.total_bytes_sent // len(self._seeds)

    def close(self) -> None:
        """Unwrap model and optimizer."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None
