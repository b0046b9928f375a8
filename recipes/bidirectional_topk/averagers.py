"""Many workers in one process, each with a torchcomp.Averager, and the bytes that they receive.

The collectives are between threads. All replicas of a synchronised run have equal weights, so the
workers share one model. Their gradients are computed one after another, and then averaged by all
workers together.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from recipes.bidirectional_topk.problems import Problem, batches
from recipes.bidirectional_topk.workers import SerialWorkers
from torchcomp import Averager, InProcessExchange, explain, run_in_process

Gradients = dict[str, Tensor]


class LoggedExchange(InProcessExchange):
    """An exchange that records the bytes received in each all-gather and all-to-all."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.log: list[tuple[bool, int]] = []

    def all_gather_rows(self, message: Tensor) -> Tensor:
        rows = super().all_gather_rows(message)
        self._record(list(rows))
        return rows

    def all_to_all(self, outgoing: Tensor, sizes: Sequence[int], arriving: Sequence[int]) -> Tensor:
        received = super().all_to_all(outgoing, sizes, arriving)
        self._record(received.split(list(arriving)))
        return received

    def _record(self, parts: Sequence[Tensor]) -> None:
        nbytes = sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank)
        # Encoded entries are uint8. Counts and the threshold search use wider types.
        self.log.append((parts[0].dtype == torch.uint8, nbytes))


class Workers:
    """``count`` workers that train one model together."""

    def __init__(self, model: nn.Module, spec: str, count: int) -> None:
        self.parameters = dict(model.named_parameters())
        self.exchanges = LoggedExchange.ranks(count)
        self.averagers = [Averager(spec, each, self.parameters) for each in self.exchanges]

    def backward(self, loss_of: Callable[[int], Tensor]) -> bool:
        """Average the gradients of ``loss_of(rank)`` in ``grad``; return whether all are finite."""
        gradients = [self._gradients(loss_of(exchange.rank)) for exchange in self.exchanges]

        def average(exchange: LoggedExchange) -> bool:
            exchange.log.clear()
            averager = self.averagers[exchange.rank]
            return averager.average_all(gradients[exchange.rank], may_skip=True)

        # All workers skip a step together, so rank 0's result is valid for all.
        taken = run_in_process(len(self.exchanges), average, self.exchanges)[0]
        if taken:
            self._write(gradients)
        return taken and all(bool(p.grad.isfinite().all()) for p in self.parameters.values())

    def continue_from(self, serial: SerialWorkers) -> None:
        """Take over the residuals of a serial run of the same method and model."""
        server = serial.parts(serial.server_residual)
        taken = dict.fromkeys(server, 0)
        for rank, averager in enumerate(self.averagers):
            state = averager.state_dict()
            slots = {name: slot["tensors"] for name, slot in state["slots"].items()}
            if "error" in slots and serial.method.up:
                for name, values in serial.parts(serial.residuals[rank]).items():
                    slots["error"][name].view(-1).copy_(values)
            # Ranks own successive parts of a parameter.
            for name, part in slots.get("server_error", {}).items():
                first = taken[name]
                part.copy_(server[name][first : first + part.numel()])
                taken[name] += part.numel()
            averager.load_state_dict(state)

    def _gradients(self, loss: Tensor) -> Gradients:
        gradients = torch.autograd.grad(loss, list(self.parameters.values()))
        return dict(zip(self.parameters, gradients, strict=True))

    def _write(self, gradients: list[Gradients]) -> None:
        first, *others = gradients
        for name, parameter in self.parameters.items():
            # The simulation is valid only while all replicas would be equal.
            for rank, theirs in enumerate(others, start=1):
                # Compare bytes, because a NaN does not equal itself.
                if not torch.equal(_bits(first[name]), _bits(theirs[name])):
                    step = self.averagers[0].step
                    raise AssertionError(f"workers 0 and {rank} differ at step {step}")
            parameter.grad = first[name]


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


@dataclass(frozen=True)
class Traffic:
    """Bytes of messages that a rank receives in one step, counted by its exchange."""

    up: float  # entries for its shard
    down: float  # entries of the downlink
    selection: float  # counts, histograms and candidates
    busiest: int  # entries for its shard, on the rank that receives most


# The first step searches the threshold from no guess, so that it is not a usual one.
_COUNTED_STEPS = 3


def count_traffic(
    problem: Problem, serial: SerialWorkers, spec: str, *, lr: float, seed: int
) -> Traffic:
    """Take some steps more with one :class:`torchcomp.Averager` for each worker."""
    workers = Workers(serial.model, spec, serial.count)
    workers.continue_from(serial)
    train(problem, workers, serial.model, lr=lr, steps=_COUNTED_STEPS, seed=seed)
    received = [phases(exchange) for exchange in workers.exchanges]
    up, down, selection = (round(fmean(way), 1) for way in zip(*received, strict=True))
    return Traffic(up, down, selection, busiest=max(up for up, _, _ in received))


def phases(exchange: LoggedExchange) -> tuple[int, int, int]:
    """Return the bytes that a rank received up, down, and for the selection; see `Traffic`."""
    entries = [nbytes for is_entries, nbytes in exchange.log if is_entries]
    selection = sum(nbytes for is_entries, nbytes in exchange.log if not is_entries)
    # Bidirectional TopK exchanges entries twice; an all-gather has only the downlink.
    up, down = entries if len(entries) == 2 else (0, sum(entries))
    return up, down, selection


def train(
    problem: Problem, workers: Workers, model: nn.Module, *, lr: float, steps: int, seed: int
) -> bool:
    """Take ``steps`` steps of plain SGD, and return whether every gradient stayed finite."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    chosen = batches(problem, len(workers.exchanges), seed)
    for shares in itertools.islice(chosen, steps):
        # The default argument binds this step's shares, not those of a later step.
        def loss_of(rank: int, shares: Tensor = shares) -> Tensor:
            mine = problem.train.take(shares[rank])
            return cross_entropy(model(mine.images), mine.labels)

        if not workers.backward(loss_of):
            return False
        optimizer.step()
    return True


def server_bytes(d: int, entries: int) -> int:
    """Return the size of a server's message: the entries, or all d values if those are smaller."""
    return min(explain(f"topk(k={entries})", numel=d, world_size=1).message_bytes, 4 * d)


def received_bytes(spec: str, d: int, workers: int) -> int:
    """Return the bytes that a rank receives per step, as planned by :func:`torchcomp.explain`."""
    return explain(spec, numel=d, world_size=workers).bytes_received


def random_union(d: int, k: int, workers: int) -> float:
    """Return the expected union of random supports of ``k`` of ``d`` entries, in units of k."""
    return d * (1 - (1 - k / d) ** workers) / k
