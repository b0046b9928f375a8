"""Fragments: parts of the parameters that are averaged by themselves, in rounds of their own.

Mostly there is one, of all parameters. There are several where each optimizer has its own schedule,
and in streaming (``fragments=P``), where they take turns so that less is sent at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn

from torchcomp.local_sgd.averaging import Averaging
from torchcomp.local_sgd.checks import LocalMethod, held_by, rates_of
from torchcomp.local_sgd.moments import Moments
from torchcomp.local_sgd.progress import Round
from torchcomp.local_sgd.turns import Turns
from torchcomp.local_sgd.weights import Weights
from torchcomp.schedules import Horizon, Schedule

Names = tuple[str, ...]
Phase = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """What makes a fragment.

    Attributes:
        names: of its parameters.
        schedule: of its rounds.
        owners: places of the optimizers whose learning rates the schedule reads.
        phase: see :meth:`Round.begin`.
    """

    names: Names
    schedule: Schedule
    owners: tuple[int, ...]
    phase: Phase = (1, 1)


@dataclass
class Fragment:
    """A part of the parameters at work.

    Attributes:
        part: what it was made from.
        weights: its parameters.
        averaging: how they are averaged.
        moments: what becomes of the optimizers' state.
        round: its clock.
        turns: the optimizers.
    """

    part: Part
    weights: Weights
    averaging: Averaging
    moments: Moments
    round: Round
    turns: Turns

    @property
    def rates(self) -> list[float]:
        """The learning rates that count for it; none of groups that have no number as rate."""
        return [float(rate) for rate in rates_of(self._optimizers())]

    @property
    def rates_on_device(self) -> bool:
        """Whether reading them waits for a device."""
        rates = rates_of(self._optimizers())
        return any(isinstance(rate, torch.Tensor) and not rate.is_cpu for rate in rates)

    def begin_round(self, step: int, horizon: Horizon) -> None:
        """Fix the length of the round that the next step begins.

        Raises:
            ScheduleError: if the schedule cannot use the learning rate; nothing changes.
        """
        self.round.begin(step, self.part.schedule, self.rates, horizon, self.part.phase)
        self.averaging.begin_round()

    def exchange(self, step: int) -> None:
        """Exchange what a synchronisation after `step` steps needs.

        Raises:
            NonFiniteError: on all ranks, if something is not finite.
            WireError: on all ranks, if a message was not intact.
        """
        self.averaging.exchange(step)
        self.moments.exchange(self.weights.parameters, self.turns, step)

    def commit(self, step: int) -> None:
        """Make what was exchanged count, and end the round."""
        self.averaging.commit(self.round.mean_rate(step))
        self.moments.commit(self.weights.parameters, self.turns)
        self.round.end(step)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [each for place, each in enumerate(self.turns) if place in self.part.owners]


def parts_of(
    method: LocalMethod,
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Mapping[str, nn.Parameter],
) -> list[Part]:
    """What becomes a fragment each: the parameters of every schedule, cut into pieces.

    Args:
        method: with one schedule for all parameters, or one for each optimizer's.
        optimizers: all of them.
        parameters: all trained ones, by name.
    """
    places = range(len(optimizers))
    if len(method.schedules) == 1:
        whole = [Part(tuple(parameters), method.schedules[0], tuple(places))]
    else:
        whole = [
            Part(held_by(optimizers[place], parameters), method.schedules[place], (place,))
            for place in places
        ]
    return [piece for part in whole for piece in _stream(part, parameters, method.fragments)]


def _stream(part: Part, parameters: Mapping[str, nn.Parameter], pieces: int) -> list[Part]:
    """Cut a part into pieces of about equal bytes, in registration order, with rounds out of phase.

    The first round of piece p of P takes (p + 1)/P of a round, so they synchronise in turn, as in
    Streaming DiLoCo (Douillard et al., 2025, arXiv 2501.18512); its delayed application of what
    was exchanged is left out, because it is another algorithm. All synchronise at the end.

    Args:
        part: of at least `pieces` parameters.
        parameters: all, by name.
        pieces: P.
    """
    sizes = [parameters[name].nbytes for name in part.names]
    middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
    fair = [int(pieces * middle / max(sum(sizes), 1)) for middle in middles]
    bounds = _bounds(fair, pieces)
    return [
        Part(part.names[start:stop], part.schedule, part.owners, (place + 1, pieces))
        for place, (start, stop) in enumerate(pairwise(bounds))
    ]


def _bounds(fair: Sequence[int], pieces: int) -> list[int]:
    """Where pieces begin and end if each parameter goes to its fair piece, and none is empty."""
    bounds = [sum(piece < place for piece in fair) for place in range(pieces)] + [len(fair)]
    for place in range(1, pieces):
        bounds[place] = max(bounds[place], bounds[place - 1] + 1)
    for place in reversed(range(1, pieces)):
        bounds[place] = min(bounds[place], bounds[place + 1] - 1)
    return bounds
