"""The training script with two levels: DDP inside each node, local steps across nodes."""

import torch.distributed as dist

from tests.local_sgd.script import Script

NODES, PER_NODE, TOTAL = 2, 2, 8


def groups():
    """This rank's node, and the group of the ranks with the same local rank in every node."""
    rank = dist.get_rank()
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return inside[rank // PER_NODE], across[rank % PER_NODE]


class Hierarchy(Script):
    """A training script on 4 ranks in 2 nodes; further options are those of LocalSGD."""

    def __init__(self, make=groups, spec="every(3)", lr=0.05, ddp=None, **options):
        node, across = make()
        own = ("build", "scaler", "shape", "inside", "register")
        script = {name: options.pop(name) for name in own if name in options}
        options = {"process_group": across} | options
        total = options.pop("total_steps", TOTAL)
        script |= {"process_group": node, "local": options, "lr": lambda step: lr}
        super().__init__(spec, total, **script, **(ddp or {}))

    def step(self, step, scale=1.0):
        super().step(step, scale)
        self.sync.wait()
        return self.weights()

    def train(self, start=0, stop=TOTAL):
        return super().train(start, stop)
