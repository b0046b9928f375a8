"""Run: what happens at every turn of the optimizers, from the first step to the last."""

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchcomp import checkpoint
from torchcomp.bucket import partition
from torchcomp.ddp.checks import bucket_caps, check_not_joined, trained_parameters
from torchcomp.errors import CheckpointError, ScheduleError, SpecError
from torchcomp.local_sgd import snapshot
from torchcomp.local_sgd.afterwards import warn_of_local_moments
from torchcomp.local_sgd.averaging import Averaging, PlainAverage
from torchcomp.local_sgd.background import Background
from torchcomp.local_sgd.callers import scaler_at_work
from torchcomp.local_sgd.checks import LocalMethod, check_no_hook
from torchcomp.local_sgd.deltas import DeltaAverage
from torchcomp.local_sgd.fragments import Fragment, Part, parts_of
from torchcomp.local_sgd.moments import held_of, moments_of
from torchcomp.local_sgd.newcomers import Newcomers
from torchcomp.local_sgd.overlapped import OverlappedAverage
from torchcomp.local_sgd.progress import Progress, Round
from torchcomp.local_sgd.ranks import Ranks
from torchcomp.local_sgd.synchronise import synchronise
from torchcomp.local_sgd.turns import Turns
from torchcomp.local_sgd.weights import Weights
from torchcomp.stats import Meter, Stats

_FIRST_STEP = (
    f"{checkpoint.ONE_STEP} The learning rate is the same function of the step on all ranks."
)


class Run:
    """Local steps of one model, without the hooks that drive them.

    Args:
        model: held weakly.
        turns: of its optimizers.
        method: what to do.
        ranks: with whom.
        seed: of the random choices of compression.
        scaler: the GradScaler of the loop, if it was handed over.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        turns: Turns,
        method: LocalMethod,
        ranks: Ranks,
        seed: int,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._model = weakref.ref(model)
        self._turns = turns
        self.method = method
        self.ranks = ranks
        self._seed = seed
        self._scaler = scaler
        self.background = Background.beside(ranks.between) if method.overlap else None
        if self.background is not None:
            weakref.finalize(self, self.background.executor.close)
        self._fragments = self._divide(model)
        names = {name for each in self._fragments for name in each.part.names}
        trained = trained_parameters(model)
        self._weights = Weights({name: p for name, p in trained if name in names})
        two_levels = ranks.inside is not None
        self._newcomers = Newcomers(model, self._weights, self._fragments, two_levels)
        self._meter = Meter()
        self.progress = Progress([each.round for each in self._fragments])
        self._expected_weights: int | None = None
        # Whether a rank alone has loaded a checkpoint shows only when all ranks look.
        self._verified = False

    @property
    def stats(self) -> Stats:
        """Counters of this rank."""
        error: dict[str, float] = {}
        owner: dict[str, float] = {}
        for fragment in self._fragments:
            error |= fragment.averaging.error_norms()
            owner |= fragment.averaging.owner_norms()
        return self._meter.snapshot(self.progress.step, self.progress.syncs, error, owner)

    @property
    def overlapped(self) -> list[OverlappedAverage]:
        """Averages that may be on their way."""
        averages = [each.averaging for each in self._fragments]
        return [average for average in averages if isinstance(average, OverlappedAverage)]

    def wait(self) -> None:
        """Give all parameters the averages that are on their way."""
        if self.background is None:
            return
        for average in self.overlapped:
            average.finish()
        arrived = self.background.exchange.take_traffic(0)
        self._meter.last.add(arrived)
        self._meter.total.add(arrived)

    def begin_turn(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer begins its turn.

        Raises:
            ScheduleError: if it is not its turn, or the run has no step left.
        """
        if self._turns.begin(optimizer):
            self._begin_step()

    def end_turn(self, optimizer: torch.optim.Optimizer) -> None:
        """It has had its turn; after the last one of a step, the ranks may synchronise."""
        self.progress.batches.turn()
        if self._turns.end(optimizer):
            self._end_step()

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`torchcomp.LocalSGD.state_dict`."""
        exchange = self.ranks.between
        return {
            **checkpoint.header(snapshot.spec_of(self.method), exchange),
            **snapshot.fixed(self.method),
            **snapshot.clock(self.progress),
            **snapshot.memory(self._fragments),
            "fragments": [list(each.weights.parameters) for each in self._fragments],
            "seed": self._seed,
            "saved_by": [exchange.rank, exchange.world_size],
            "traffic": self._meter.state_dict(),
            "weights": self._weights.digest(),
            "shapes": checkpoint.shapes(self._weights.parameters),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`torchcomp.LocalSGD.load_state_dict`."""
        parameters = self._weights.parameters
        snapshot.check(state, self.method, len(self._fragments), parameters, self.ranks.between)
        snapshot.set_clock(self.progress, state)
        self._seed = state["seed"]
        self._meter.load_state_dict(state["traffic"])
        for fragment, names in zip(self._fragments, state["fragments"], strict=True):
            fragment.weights.parameters = {name: parameters[name] for name in names}
            fragment.averaging.load_state_dict(state)
        self._expected_weights = state["weights"]
        self._verified = False

    def warn_afterwards(self) -> None:
        """Log it if optimizers go on under plain DDP with moments that differ between ranks."""
        model, alone = self._model(), self.ranks.between.world_size == 1
        equal = alone or self.method.moments == "average" or self.ranks.inside is not None
        if model is None or equal or self.progress.next_sync is not None:
            return
        for optimizer in self._turns:
            if held_of(self._weights.parameters, [optimizer]):
                warn_of_local_moments(optimizer, model)

    # What it is made of.

    def _divide(self, model: DistributedDataParallel) -> list[Fragment]:
        parameters = dict(trained_parameters(model))
        parts = parts_of(self.method, list(self._turns), parameters)
        return [self._fragment(part, model, parameters) for part in parts]

    def _fragment(
        self, part: Part, model: DistributedDataParallel, parameters: dict[str, nn.Parameter]
    ) -> Fragment:
        weights = Weights({name: parameters[name] for name in part.names})
        moments = moments_of(self.method.moments, self.ranks.between)
        averaging = self._averaging(weights, model)
        return Fragment(part, weights, averaging, moments, Round(), self._turns)

    def _averaging(self, weights: Weights, model: DistributedDataParallel) -> Averaging:
        method, exchange = self.method, self.ranks.between
        groups = partition(weights.parameters.items(), bucket_caps(model))
        if self.background is not None:
            return OverlappedAverage(weights, groups, exchange, self.background)
        if method.plain:
            return PlainAverage(weights, groups, exchange)
        return DeltaAverage(weights, groups, exchange, method.aggregator, method.outer, self._seed)

    # A step.

    def _begin_step(self) -> None:
        self.wait()
        check_not_joined(self._model())
        self._require_steps_left()
        self._newcomers.take_in(self._turns)
        if self._verified:
            self._begin_rounds()
            return
        self.ranks.agree("the first local step", {}, self._first_step, _FIRST_STEP)
        self._expected_weights = None
        self._verified = True

    def _end_step(self) -> None:
        progress, outer = self.progress, self.method.outer
        progress.step += 1
        progress.batches.step()
        needed = outer is not None and outer.reads_rate
        for fragment in self._fragments:
            # Without need, no step waits for a rate on a device.
            if needed or not fragment.rates_on_device:
                fragment.round.rate_sum += max(fragment.rates, default=0.0)
        due = [each for each in self._fragments if each.round.round_end == progress.step]
        if due:
            added = self._newcomers.described
            self._meter.record(synchronise(due, self.ranks, progress, added))
            added.clear()
            if progress.step == self.method.horizon.total_steps:
                self.wait()  # nothing follows that the last average could hide under

    def _begin_rounds(self) -> None:
        step = self.progress.step
        for fragment in self._fragments:
            if fragment.round.round_end == step:
                fragment.begin_round(step, self.method.horizon)

    def _first_step(self) -> tuple[None, dict[str, Any]]:
        """Check the step that follows the start or a checkpoint, and what ranks must share."""
        self._require_known_scaler()
        self._require_no_hook()
        step, digest = self.progress.step, None
        if self._expected_weights is not None or self._must_start_equal:
            digest = self._weights.digest()
        if self._expected_weights not in (None, digest):
            raise CheckpointError(
                "parameters that are not those of the checkpoint: every rank loads its own weights "
                "after DistributedDataParallel(...), whose constructor copies rank 0's to all ranks"
            )
        equal = self._must_start_equal and self.progress.next_sync is None
        self._begin_rounds()
        rounds = self.progress.rounds
        facts: dict[str, Any] = {
            "step": step,
            "round": ", ".join(map(str, rounds)),
            "learning rates at its start": [each.rates for each in rounds],
        }
        return None, facts | ({"checksum of the parameters": digest} if equal else {})

    @property
    def _must_start_equal(self) -> bool:
        compared = any(each.averaging.needs_equal_start for each in self._fragments)
        return compared or self.ranks.inside is not None

    # What is refused.

    def _require_no_hook(self) -> None:
        model = self._model()
        if model is not None and self.ranks.inside is None:
            check_no_hook(model)

    def _require_steps_left(self) -> None:
        step, total = self.progress.step, self.method.horizon.total_steps
        if step >= total:
            raise ScheduleError(
                f"optimizer step {step + 1}, but the run was announced with total_steps="
                f"{total}, and its last synchronisation has been: announce more steps, or close() "
                "and go on with plain DDP (with moments='average', or a new optimizer: the ranks' "
                "moments differ otherwise, and their parameters drift apart)"
            )

    def _require_known_scaler(self) -> None:
        at_work = scaler_at_work()
        if at_work is not None and at_work is not self._scaler:
            raise SpecError(
                "a GradScaler takes this step, and may skip others on some ranks only, which would "
                "shift their clocks: hand it over, torchcomp.LocalSGD(..., scaler=scaler)"
            )
