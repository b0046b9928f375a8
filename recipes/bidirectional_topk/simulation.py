"""Many workers in one process: each has a torchcomp.Averager over collectives between threads.

All replicas of a synchronised run have equal weights, so the workers share one model. Their
gradients are computed one after another, and then averaged by all workers together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recipes.bidirectional_topk.serial import SerialWorkers
from torchcomp import Averager, InProcessExchange, run_in_process

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Received:
    """The bytes that one worker received in one collective.

    Attributes:
        entries: whether they are encoded entries; if not, the selection of a threshold takes them.
        nbytes: bytes received from the other workers.
    """

    entries: bool
    nbytes: int


class LoggedExchange(InProcessExchange):
    """An exchange that records the bytes received in each all-gather and all-to-all.

    Attributes:
        log: the collectives of the last step.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.log: list[Received] = []

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
        self.log.append(Received(parts[0].dtype == torch.uint8, nbytes))


class Workers:
    """``count`` workers that train one model together.

    Args:
        model: the model that they share.
        spec: the method that averages their gradients.
        count: number of workers.

    Attributes:
        exchanges: one for each worker; their logs count the bytes of the last step.
        averagers: one for each worker.
    """

    def __init__(self, model: nn.Module, spec: str, count: int) -> None:
        self.parameters = dict(model.named_parameters())
        self.exchanges = LoggedExchange.ranks(count)
        self.averagers = [Averager(spec, each, self.parameters) for each in self.exchanges]

    def backward(self, loss_of: Callable[[int], Tensor], lr: float | None = None) -> bool:
        """Compute and average the gradients of all workers, and store the result in ``grad``.

        Args:
            loss_of: returns the loss of a worker's batch, given its rank.
            lr: learning rate of the step, to keep it inside the residuals.

        Returns:
            Whether the result is finite. If it is not, the caller must skip the optimizer step.
        """
        gradients = [self._gradients(loss_of(exchange.rank)) for exchange in self.exchanges]

        def average(exchange: LoggedExchange) -> bool:
            return self._average(exchange, gradients[exchange.rank], lr)

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

    def _average(self, exchange: LoggedExchange, gradients: Gradients, lr: float | None) -> bool:
        exchange.log.clear()
        averager = self.averagers[exchange.rank]
        return averager.average_all(gradients, lr=lr, may_skip=True)

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
