"""Many workers in one process: a torchcomp.Averager for each, over collectives of threads.

All replicas of a synchronised run are equal, so one model stands for all of them: the workers'
gradients are computed on it one after another, and then averaged by all workers together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchcomp import Averager, InProcessExchange, run_in_process

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Received:
    """What one collective brought to one worker.

    Attributes:
        payload: whether it was a message; else counts, or what the search for a threshold needs.
        nbytes: from the other workers.
    """

    payload: bool
    nbytes: int


class LoggedExchange(InProcessExchange):
    """An exchange that notes what each all-gather and all-to-all has brought.

    Attributes:
        log: of the last step.
    """

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self.log: list[Received] = []

    def all_gather(self, message: Tensor) -> list[Tensor]:
        return self._noted(super().all_gather(message))

    def all_to_all(
        self, outgoing: Tensor, sizes: Sequence[int], arriving: Sequence[int]
    ) -> list[Tensor]:
        return self._noted(super().all_to_all(outgoing, sizes, arriving))

    def _noted(self, parts: list[Tensor]) -> list[Tensor]:
        nbytes = sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank)
        self.log.append(Received(parts[0].dtype == torch.uint8, nbytes))
        return parts


class Workers:
    """``count`` workers that train one model together by a method.

    Attributes:
        exchanges: one for each worker; their logs tell the bytes of the last step.
        averagers: one for each worker.
        supports: by worker and parameter, a mask of the entries that were sent in the last step;
            kept only where ``watch`` is set, and only right for methods that send values as they
            are, so that what was sent leaves exactly 0 in the residual.
    """

    def __init__(self, model: nn.Module, spec: str, count: int, *, watch: bool = False) -> None:
        self.parameters = dict(model.named_parameters())
        self.watch = watch
        self.exchanges = LoggedExchange.ranks(count)
        self.averagers = [Averager(spec, each, self.parameters) for each in self.exchanges]
        self.supports: list[Gradients] = [{} for _ in self.exchanges]

    def backward(self, loss_of: Callable[[int], Tensor]) -> bool:
        """Leave in every ``grad`` what the method makes of all workers' gradients.

        Args:
            loss_of: the loss of a worker's batch, by rank.

        Returns:
            Whether they are finite; if not, the step must not be taken.
        """
        gradients = [self._gradients(loss_of(exchange.rank)) for exchange in self.exchanges]

        def average(exchange: LoggedExchange) -> bool:
            return self._average(exchange, gradients[exchange.rank])

        counts = run_in_process(len(self.exchanges), average, self.exchanges)[0]
        if counts:
            self._write(gradients)
        return counts and all(bool(p.grad.isfinite().all()) for p in self.parameters.values())

    def _gradients(self, loss: Tensor) -> Gradients:
        gradients = torch.autograd.grad(loss, list(self.parameters.values()))
        return dict(zip(self.parameters, gradients, strict=True))

    def _average(self, exchange: LoggedExchange, gradients: Gradients) -> bool:
        exchange.log.clear()
        averager = self.averagers[exchange.rank]
        if not self.watch:
            return averager.average_all(gradients, may_skip=True)
        # What error feedback has to send, and where nothing is left of it.
        wanted = {name: gradient.flatten().clone() for name, gradient in gradients.items()}
        for name, residual in averager.state.items("error"):
            wanted[name] = wanted[name] + residual
        counts = averager.average_all(gradients, may_skip=True)
        self.supports[exchange.rank] = {
            name: (residual == 0) & (wanted[name] != 0)
            for name, residual in averager.state.items("error")
        }
        return counts

    def _write(self, gradients: list[Gradients]) -> None:
        first, *others = gradients
        for name, parameter in self.parameters.items():
            for rank, theirs in enumerate(others, start=1):
                # As bytes: a NaN equals itself.
                if not torch.equal(_bits(first[name]), _bits(theirs[name])):
                    step = self.averagers[0].step
                    raise AssertionError(f"workers 0 and {rank} differ at step {step}")
            parameter.grad = first[name]


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)
