"""A small training script with two levels: DDP inside each node, local steps across nodes."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.local_sgd.script import batch, loss_of, mlp, momentum
from tests.support.models import seeded
from tests.support.outcomes import flat

NODES, PER_NODE, TOTAL = 2, 2, 8


def groups():
    """This rank's node, and the group of the ranks with the same local rank in every node."""
    rank = dist.get_rank()
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return inside[rank // PER_NODE], across[rank % PER_NODE]


class Hierarchy:
    """A training script on 4 ranks in 2 nodes."""

    def __init__(
        self, make=groups, spec="every(3)", build=mlp, lr=0.05, shape=(6,), ddp=None, **local
    ):
        inside, across = make()
        self.rank = dist.get_rank()
        self.shape = shape
        self.model = DistributedDataParallel(seeded(build()), process_group=inside, **(ddp or {}))
        self.optimizer = momentum(self.model.parameters(), lr=lr)
        arguments = {"total_steps": TOTAL, "process_group": across} | local
        self.sync = torchcomp.LocalSGD(self.model, self.optimizer, spec, **arguments)

    def step(self, step):
        self.optimizer.zero_grad()
        loss_of(self.model, *batch(self.rank, step, self.shape)).backward()
        self.optimizer.step()
        return flat(self.model.parameters())

    def train(self, start=0, stop=TOTAL):
        return [self.step(step) for step in range(start, stop)]
