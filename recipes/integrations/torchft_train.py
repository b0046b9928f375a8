"""A whole script for torchft: ranks die, join and leave, and the others go on without a restart.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    python -m recipes.integrations.torchft_train --name a    # b, c, ... in other shells

End one with Ctrl-C or SIGKILL, and start it again: it heals from the others. SIGTERM lets it leave:
it hands its residual to the others at the end of a step. docs/elastic.md describes the calls.
"""

import argparse
import json
import signal
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchcomp

FEATURES, CLASSES = 64, 10


class Training:
    """The model of one rank, its optimizer, and the manager that brings the ranks together."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torchft
        from torchft.process_group import ProcessGroupDummy

        timeout = timedelta(seconds=arguments.timeout)
        # torchrun starts such a store for each replica group. This script is started by hand.
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=timeout),
            load_state_dict=self.load_state_dict,
            state_dict=self.state_dict,
            min_replica_size=1,
            use_async_quorum=False,  # required: a rank heals before its first step
            timeout=timeout,
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=store.port,
            replica_id=arguments.name,
        )
        self._store = store  # the manager connects to it as long as it runs
        net = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))
        # DDP's own group is this rank alone: the ranks of the quorum exchange in the hook.
        self.model = DistributedDataParallel(net, process_group=ProcessGroupDummy(0, 1))
        self.handle = torchcomp.register(self.model, arguments.compress, manager=self.manager)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.optimizer = torchft.Optimizer(self.manager, self.sgd)

    def state_dict(self) -> dict[str, Any]:
        """Return what a rank that joins needs. The state of torchcomp is sent along with it."""
        return {"model": self.model.state_dict(), "optimizer": self.sgd.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.sgd.load_state_dict(state["optimizer"])

    def step(self, inputs: torch.Tensor) -> bool:
        """Take one step, and return whether it counts."""
        self.optimizer.zero_grad()  # brings the ranks together; a rank that joins heals here
        before = self.manager.current_step()
        labels = inputs[:, :CLASSES].argmax(1)
        nn.functional.cross_entropy(self.model(inputs), labels).backward()
        self.optimizer.step()  # asks the manager whether the step counts
        return bool(self.manager.current_step() > before)

    def log(self, file: TextIO) -> None:
        weights = torch.cat([p.detach().view(-1) for p in self.model.parameters()])
        mean = torch.cat([p.grad.view(-1) for p in self.model.parameters() if p.grad is not None])
        residual = torch.tensor(list(self.handle.residual_norms().values())).norm()
        line = {
            "step": self.manager.current_step(),
            "ranks": self.manager.num_participants(),
            "weights": zlib.crc32(weights.numpy().tobytes()),
            "residual": float(residual),
            "mean": float(mean.norm()),
        }
        print(json.dumps(line), file=file, flush=True)


def main() -> None:
    """Train until the last step, or until this rank has left."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", required=True, help="of this rank; the others have other names")
    parser.add_argument("--compress", default="ef(topk(0.01))", help="a method [ef(topk(0.01))]")
    parser.add_argument("--steps", type=int, default=500, help="steps of the whole job [500]")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds of rest a step [0.1]")
    parser.add_argument("--timeout", type=float, default=10, help="of a collective, seconds [10]")
    parser.add_argument("--out", type=Path, default=Path("runs/torchft"), help="folder of the logs")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)

    training = Training(arguments)
    signal.signal(signal.SIGTERM, lambda *_: training.handle.leave())
    data = torch.Generator().manual_seed(zlib.crc32(arguments.name.encode()))
    with (arguments.out / f"{arguments.name}.jsonl").open("a") as file:
        while training.manager.current_step() < arguments.steps and not training.handle.left:
            if training.step(torch.randn(32, FEATURES, generator=data)):
                training.log(file)
            time.sleep(arguments.pace)
    training.manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
