"""What the ranks train while one of them gets a fault, and the places where it gets it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import torchcomp
from tests.fsdp.runs import Run
from tests.support.models import loss_of, mlp, rows, wrap
from tests.support.outcomes import reloaded
from torchcomp import Averager
from torchcomp.exchange import PrivateExchange

STEPS = 7
FAULTY_STEP = 4  # after DDP has rebuilt its buckets
SPEC = "ef(topk(0.1))"

Reach = Callable[[str], None]


class Client:
    """A model that trains, and the object of torchcomp that its method installed."""

    def __init__(self, reach: Reach, spec: str = SPEC, **options: Any) -> None:
        self.model = wrap(mlp())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        reach("register")
        self.handle = self.install(spec, **options)

    def install(self, spec: str, **options: Any) -> Any:
        return torchcomp.register(self.model, spec, **options)

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten().clone() for p in self.model.parameters()])

    def state(self) -> Any:
        return reloaded(self.handle.state_dict())

    def step(self, step: int, reach: Reach) -> None:
        reach("between steps")
        self.optimizer.zero_grad()
        hook = self.model.register_forward_pre_hook(lambda *_: reach("forward"))
        loss = loss_of(self.model(rows(step)))
        hook.remove()
        loss.backward()
        reach("optimizer step")
        self.optimizer.step()

    def call(self, place: str) -> None:
        if place == "gather":
            self.handle.gather_state_dict()
        elif place == "swap":
            self.handle.swap("ef(topk(0.2))")


class LocalSteps(Client):
    """Parameters are averaged in FAULTY_STEP; `own` are those after the rank's last own step."""

    def install(self, spec: str, **options: Any) -> Any:
        def note(*_: Any) -> None:
            self.own = self.weights()

        note()
        self.optimizer.register_step_post_hook(note)  # before LocalSGD, whose hook averages
        schedule = f"every({FAULTY_STEP + 1})"
        return torchcomp.LocalSGD(
            self.model, self.optimizer, schedule, total_steps=STEPS, compress=spec
        )


class Layers(Client):
    def install(self, spec: str, **options: Any) -> Any:
        return torchcomp.JointSpar(self.model, budget=0.9, compress=spec)


class Sharding(Client):
    """FSDP2 with replicas."""

    def __init__(self, reach: Reach) -> None:
        run = Run((2, 2), SPEC)
        self.model, self.handle, self.optimizer = run.model, run.handle, run.optimizer

    def weights(self) -> Tensor:
        # From the optimizer, because FSDP2 replaces the model's until the end of a backward pass.
        shards = [p.to_local() for p in self.optimizer.param_groups[0]["params"]]
        return torch.cat([shard.detach().flatten().clone() for shard in shards])


CLIENTS: dict[str, tuple[type[Client], int, dict[str, Any]]] = {
    "ddp": (Client, 3, {}),
    "late": (Client, 3, {"check": "late"}),
    "bidirectional": (Client, 3, {"spec": "bidirectional(topk(0.1), topk(0.1))"}),
    "two levels": (Client, 4, {"nodes": 2}),
    "fsdp": (Sharding, 4, {}),
    "local sgd": (LocalSteps, 3, {"spec": "mean"}),
    "compressed local sgd": (LocalSteps, 3, {}),
    "jointspar": (Layers, 3, {}),
}
"""By name: the class, the number of ranks, and options."""


@contextmanager
def places(reach: Reach) -> Iterator[None]:
    """Call `reach` with the name of a place in the exchange each time this rank gets there."""
    average, finish, connect = Averager.average, Averager.finish, PrivateExchange.__init__

    def averaging(self: Averager, bucket: Any) -> None:
        # In the thread of the exchange.
        reach(f"bucket {self._averaged}")
        average(self, bucket)

    def finishing(self: Averager, **options: Any) -> bool:
        reach("finish")
        counts = finish(self, **options)
        reach("finished")
        return counts

    def connecting(self: PrivateExchange, *arguments: Any) -> None:
        reach("connect")
        connect(self, *arguments)

    with (
        mock.patch.object(Averager, "average", averaging),
        mock.patch.object(Averager, "finish", finishing),
        mock.patch.object(PrivateExchange, "__init__", connecting),
    ):
        yield
