"""Mutated checkpoints of every class that has a state.

Each is refused with CheckpointError, and nothing has changed; or it is loaded with the values that
it has. Then two ranks train on, one of them with the mutated state. Either they raise, or their
parameters are equal bit for bit.
"""

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchcomp
from benchmarks.soak_fuzz import Outcome
from tests.support.models import loss_of, seeded, wrap
from tests.support.mutations import mutated, outcome
from tests.support.outcomes import equal_on_all, flat, reloaded
from tests.support.ranks import on_threads
from torchcomp.two_direction import TwoDirection

RANKS, STEPS, TOTAL = 2, 3, 8
_ERRORS = (
    torchcomp.CheckpointError,
    torchcomp.NonFiniteError,
    torchcomp.RankMismatchError,
    torchcomp.ScheduleError,
)
"""What a rank may raise when it trains with a state that differs from that of the other rank."""


@dataclass(frozen=True)
class Client:
    """A run of this rank.

    Attributes:
        source: what is saved and loaded.
        module: its parameters are equal on all ranks after TOTAL steps.
        step: trains for one step, from the number of steps before it.
    """

    source: Any
    module: nn.Module
    step: Callable[[int], None]

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.step(step)


def _module() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double())


def _rows(step: int) -> Tensor:
    noise = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(4, 6, generator=noise, dtype=torch.float64)


def _client(make: Callable[[Any, Any], Any]) -> Client:
    model = wrap(_module())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    source = make(model, optimizer)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model(_rows(number))).backward()
        optimizer.step()

    return Client(source, model.module, step)


def _handle(spec: str) -> Client:
    return _client(lambda model, _: torchcomp.register(model, spec, checksum=True))


def _local(**options: Any) -> Client:
    return _client(
        lambda model, optimizer: torchcomp.LocalSGD(
            model, optimizer, "every(4)", total_steps=TOTAL, **options
        )
    )


def _jointspar(compress: str) -> Client:
    return _client(lambda model, _: torchcomp.JointSpar(model, budget=0.5, compress=compress))


def _two_direction() -> Client:
    module = _module()
    optimizer = TwoDirection(
        module.parameters(), "randk(0.2, unbiased=True)", "topk(0.2)", lbar=4.0, mu=1e-2
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(module(_rows(0))) / 100
        loss.backward()
        return loss

    return Client(optimizer, module, lambda number: optimizer.step(closure))


def _wrapped(wrapper: Callable[[Any], Any], client: Client) -> Client:
    return Client(wrapper(client.source), client.module, client.step)


TOPK = "ef(topk(0.3))"
CLIENTS: dict[str, Callable[[], Client]] = {
    "states of a handle": lambda: _handle(TOPK),
    "states of a handle, bidirectional": lambda: _handle("bidirectional(topk(0.3), topk(0.3))"),
    "states of a handle, powersgd": lambda: _handle("powersgd(rank=1)"),
    "states of a handle, ef21": lambda: _handle("ef21(topk(0.3))"),
    "states of a handle, dgc": lambda: _handle("dgc(topk(0.3), momentum=0.9)"),
    "states of LocalSGD": _local,
    "states of LocalSGD, compressed": lambda: _local(compress=TOPK, outer="slowmo(beta=0.7)"),
    "states of JointSpar": lambda: _jointspar(TOPK),
    "states of TwoDirection": _two_direction,
    "states of PerRank": lambda: _wrapped(torchcomp.PerRank, _handle(TOPK)),
}


def mutate_states(name: str, every: int = 1) -> Outcome:
    """Load the mutated states of a client, and train on with those that load.

    Args:
        name: a key of CLIENTS.
        every: take only every so-many-th state.
    """
    # LocalSGD warns of every run that ends inside a round, when it is collected.
    logging.disable(logging.WARNING)
    try:
        return _mutate_states(name, every)
    finally:
        gc.collect()
        logging.disable(logging.NOTSET)


def _mutate_states(name: str, every: int) -> Outcome:
    found, _ = on_threads(RANKS, _attacked, name, every)
    for number in list(found.legal):
        try:
            weights = on_threads(RANKS, continued, name, found.legal[number])
        except _ERRORS:
            continue
        except Exception as error:
            found.problems.append(f"{number}: at a later step: {type(error).__name__}: {error}")
        else:
            if not equal_on_all(weights) or not weights[0].isfinite().all():
                found.problems.append(f"{number}: the ranks have trained to other parameters")
    counts = {"refused": found.refused, "loaded": len(found.legal)}
    return Outcome(counts, found.problems, found.slowest)


@dataclass
class _Found:
    legal: dict[str, Any]  # the states that load, by path and number
    problems: list[str]
    refused: int = 0
    slowest: float = 0.0


def _attacked(name: str, every: int) -> _Found:
    client, found = CLIENTS[name](), _Found({}, [])
    client.train(0, STEPS)
    before = client.source.state_dict()
    states = islice(mutated(reloaded(before)), 0, None, every) if dist.get_rank() == 0 else ()
    for path, number, changed in states:
        case, began = f"{'.'.join(map(str, path))}, change {number}", time.process_time()
        result = outcome(client.source, before, changed)
        found.slowest = max(found.slowest, time.process_time() - began)
        if result == "legal":
            found.legal[case] = changed
        elif result is None:
            found.refused += 1
        else:
            found.problems.append(f"{case}: {result}")
    return found


def continued(name: str, changed: Any) -> Tensor:
    """Train with rank 0 on a state, and the others on their own. Return this rank's weights."""
    client = CLIENTS[name]()
    client.train(0, STEPS)
    own = reloaded(client.source.state_dict())
    client.source.load_state_dict(own if dist.get_rank() else changed)
    client.train(STEPS, TOTAL)
    return flat(client.module.parameters())
