"""A small training script with two levels: DDP inside each node, local steps across nodes."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.local_sgd.script import batch, loss_of, mlp, momentum
from tests.support.models import optimizer_step, seeded
from tests.support.outcomes import flat

NODES, PER_NODE, TOTAL = 2, 2, 8


def groups():
    """This rank's node, and the group of the ranks with the same local rank in every node."""
    rank = dist.get_rank()
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return inside[rank // PER_NODE], across[rank % PER_NODE]


class Hierarchy:
    """A training script on 4 ranks in 2 nodes.

    With `inside`, a gradient method compresses inside the nodes; `register` are its options.
    """

    def __init__(
        self,
        make=groups,
        spec="every(3)",
        build=mlp,
        lr=0.05,
        shape=(6,),
        ddp=None,
        inside=None,
        register=None,
        **local,
    ):
        node, across = make()
        self.rank = dist.get_rank()
        self.shape = shape
        self.model = DistributedDataParallel(seeded(build()), process_group=node, **(ddp or {}))
        self.optimizer = momentum(self.model.parameters(), lr=lr)
        self.handle = inside and torchcomp.register(self.model, inside, **(register or {}))
        self.scaler = local.get("scaler")
        arguments = {"total_steps": TOTAL, "process_group": across} | local
        self.sync = torchcomp.LocalSGD(self.model, self.optimizer, spec, **arguments)

    def backward(self, step, scale=1.0):
        self.optimizer.zero_grad()
        loss = loss_of(self.model, *batch(self.rank, step, self.shape)) * scale
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, step, scale=1.0):
        self.backward(step, scale)
        optimizer_step(self.optimizer, self.scaler)
        self.sync.wait()
        return flat(self.model.parameters())

    def train(self, start=0, stop=TOTAL):
        return [self.step(step) for step in range(start, stop)]
