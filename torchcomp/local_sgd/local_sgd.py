"""LocalSGD: local optimizer steps, and an average of the parameters when the schedule says so."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torchcomp.component import Component
from torchcomp.ddp.checks import OWNER, check_is_ddp
from torchcomp.errors import SpecError, UnsupportedModelError
from torchcomp.local_sgd import snapshot
from torchcomp.local_sgd.callers import checkpoint_at_work, within_own_step
from torchcomp.local_sgd.checks import Options, Specs, as_list, check_arguments
from torchcomp.local_sgd.hooks import Step, Undo, claim, override, watch_batches, wrap_scaler
from torchcomp.local_sgd.overflow import backward_until_finite
from torchcomp.local_sgd.progress import Progress
from torchcomp.local_sgd.ranks import GIVEN, Across, Ranks
from torchcomp.local_sgd.run import Run
from torchcomp.local_sgd.turns import Turns
from torchcomp.local_sgd.waiting import wait_in_forward
from torchcomp.outer_steps import OuterStep
from torchcomp.schedules import Schedule
from torchcomp.stats import Stats


class LocalSGD:
    """Train with local steps; average the parameters whenever the schedule ends a round.

    Algorithm 2 ("Local OPT") of Gu et al., ICLR 2024 (arXiv 2310.14423), with the schedule's rule
    for H. Each rank steps its own optimizer on its own gradients; gradients are not exchanged.
    Momentum and Adam moments stay local, neither averaged nor reset, unless ``moments`` says so.
    BatchNorm buffers stay local too: DDP's broadcast of rank 0's buffers is switched off until
    :meth:`close`, and :func:`torchcomp.reestimate_batchnorm` makes them fit averaged weights.

    1. At the first step of a round, read the learning rate and fix the round's length H.
    2. Take H local steps.
    3. Average the parameters over the ranks, in float32 or wider. Repeat; the last round is cut so
       that the run ends with an average at exactly ``total_steps``.

    With ``compress``, the average is that of the *changes* since the last synchronisation, by any
    method that :func:`torchcomp.register` takes; with ``outer``, an outer optimizer's step along
    the mean change replaces it (see ``DeltaAverage``). Both keep the parameters of the last
    synchronisation, in float32 or wider; whatever else changes the parameters is part of the next
    change. All ranks hold the same parameters bit for bit after every synchronisation.

    The training loop stays as it is: hooks on the model and the optimizer do the work. The clock
    counts *turns* of the optimizer, ``optimizer.step()`` or ``scaler.step(optimizer)``, skipped or
    not, because a GradScaler skips on one rank and not on another. The average happens inside the
    turn, so whatever follows sees averaged weights. An average of weights (EMA) is the same on all
    ranks if it is updated between rounds, where :attr:`next_sync` is None.

    A parameter that is added to an optimizer later, or thawed, is averaged from its first step on;
    DDP itself does not reduce its gradients after :meth:`close`.

    Args:
        model: a DDP model; not one that :func:`torchcomp.register` serves.
        optimizer: any torch optimizer over the model's parameters, or a list of all optimizers that
            train it; a step is then one turn of each. Rates must be the same on all ranks, which is
            checked at the first step and at every synchronisation.
        spec: the schedule, such as ``"every(8)"`` or ``"qsr(alpha=0.0175, h_base=4)"``; or a list
            with one for each optimizer, whose parameters then have rounds of their own. Where
            parameter groups have different learning rates, a schedule reads the largest.
        total_steps: T, optimizer steps of the whole run; of what is left of it, if a run goes on
            without :meth:`load_state_dict`.
        warmup_steps: W, steps of learning-rate warm-up.
        scaler: the ``GradScaler`` of the loop, if there is one. One that is switched on and was not
            handed over is refused at the first step.
        compress: how changes are averaged, such as ``"ef(topk(0.01))"``; ``"mean"`` is the exact
            mean of the parameters.
        outer: an outer step, ``"slowmo(beta=0.7, alpha=1.0)"`` or ``"nesterov(lr=0.7,
            momentum=0.9)"`` (:class:`torchcomp.local_sgd.SlowMo`, ``Nesterov``); None takes the
            mean itself.
        moments: what a synchronisation does with the optimizers' state: ``"local"`` leaves it
            alone, ``"average"`` averages it like the parameters (uncompressed), ``"reset"``
            starts it anew.
        fragments: P, pieces of the parameters that synchronise in turn, P times as often and a P-th
            as much, as in Streaming DiLoCo. Ranks then hold equal parameters at the
            end alone, as a rule: no other number of ranks can go on from a checkpoint before it.
        overlap: let the average go on beside what follows the optimizer's turn, the next forward
            pass included: every layer waits for its own parameters, so results are the same bit for
            bit. Whatever else reads parameters calls :meth:`wait` before: an EMA, or a module
            without parameters of its own that reads those of a child which it does not call.
        process_group: for two levels: DDP goes on to reduce gradients at every step in its own
            group (of a node, say), and the average runs over this group, or mesh of one dimension,
            which takes one rank of each node, such as ``mesh["node"]``.
        seed: seed of the random choices of ``compress``, a whole number of at least 0.

    Raises:
        SpecError: if the schedule, its horizon or another option cannot be built; all ranks raise.
            Also from the first step, if it is taken by a scaler that was not handed over.
        UnsupportedModelError: as for :func:`torchcomp.register`; also from ``optimizer.step()``
            with ``process_group``, if it trains a parameter that DDP does not know.
        RankMismatchError: if the ranks give different arguments, at construction; if their learning
            rates, or, with ``compress``, ``outer`` or ``process_group``, their parameters differ
            at the first step; or if they lose step with each other, at the next synchronisation.
        ScheduleError: from ``optimizer.step()``, beyond ``total_steps`` or at a rate that the
            schedule cannot use.
        NonFiniteError: at a synchronisation, if a rank's parameters are not finite; on all ranks.
        WireError: at a synchronisation, if a message was not intact; on all ranks. After either,
            no parameter has been averaged, and the error memory is what it was.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: "torch.optim.Optimizer | Sequence[torch.optim.Optimizer]",
        spec: Specs,
        *,
        total_steps: int,
        warmup_steps: int = 0,
        scaler: "torch.amp.GradScaler | None" = None,
        compress: str | Component = "mean",
        outer: str | OuterStep | None = None,
        moments: str = "local",
        fragments: int = 1,
        overlap: bool = False,
        process_group: "Across | None" = None,
        seed: int = 0,
    ) -> None:
        check_is_ddp(model)
        options = Options(
            spec, total_steps, warmup_steps, compress, outer, moments, fragments, overlap, seed
        )
        ranks = Ranks.of(model, process_group)
        method = ranks.agree(
            "torchcomp.LocalSGD",
            {**vars(options), "process_group": "none" if process_group is None else GIVEN},
            lambda: check_arguments(model, optimizer, options, scaler, ranks.inside is not None),
        )
        # The optimizer's hooks own this object. It holds model and optimizer weakly: a cycle would
        # keep the process group, and gloo's threads, alive until after the interpreter has ended.
        self._turns = Turns(as_list(optimizer))
        self._scaler = scaler
        self._run = Run(model, self._turns, method, ranks, seed, scaler)
        self._closed = False
        self._undo = self._install(model)
        self._finalizer = weakref.finalize(
            self, Progress.warn_inside_round, self._run.progress, method.horizon
        )

    def __repr__(self) -> str:
        return f"<LocalSGD '{snapshot.spec_of(self._run.method)}': {self.stats}>"

    @property
    def schedule(self) -> Schedule:
        """The schedule in use, of the first optimizer if each has one; its ``str`` is the spec."""
        return self._run.method.schedules[0]

    @property
    def next_sync(self) -> int | None:
        """The step, counted from 1, at which the round in progress ends; None between rounds.

        Between rounds all ranks hold the same parameters: the time to evaluate or to save. Of
        several rounds in progress, it is the first to end.
        """
        return self._run.progress.next_sync

    @property
    def stats(self) -> Stats:
        """Counters of this rank: bytes of the last synchronisation and in all."""
        self.wait()
        return self._run.stats

    def wait(self) -> None:
        """With ``overlap``, wait until all parameters have their averages."""
        self._run.wait()

    def backward(self, compute: Callable[[], Tensor], tries: int = 24) -> Tensor:
        """Add the gradients of a micro-batch to ``.grad``, and compute it again while it overflows.

        The paper's remedy for float16: no rank ever skips an optimizer step. It replaces
        ``scaler.scale(loss).backward()``, once for each micro-batch; gradients are unscaled then,
        so clip them as they are, and call ``optimizer.step()``, not ``scaler.step(optimizer)``::

            optimizer.zero_grad()
            loss = sync.backward(lambda: criterion(model(inputs), targets))
            optimizer.step()

        Dropout draws anew when a micro-batch is computed again, and BatchNorm counts it twice.

        Args:
            compute: the forward pass of a micro-batch; returns its loss, a scalar.
            tries: how often to compute at most; the scale is halved each time (``backoff_factor``).

        Returns:
            The loss, not scaled.

        Raises:
            SpecError: if LocalSGD was built without a scaler.
            UnsupportedModelError: with ``process_group``, where the ranks of a node go backward
                together.
            NonFiniteError: if the gradients are not finite at any of these scales.
        """
        if self._scaler is None:
            raise SpecError(
                "sync.backward works with the scaler of the loop: torchcomp.LocalSGD(..., "
                "scaler=scaler)"
            )
        if self._run.ranks.inside is not None:
            raise UnsupportedModelError(
                "sync.backward computes again on one rank alone, and with process_group the ranks "
                "of a node reduce their gradients together: there an overflow reaches all of them, "
                "so scaler.step(optimizer) skips on all or on none"
            )
        batches = self._run.progress.batches
        batches.forward(self._turns.cleared)
        with self._turns.evaluation():
            loss = backward_until_finite(self._scaler, list(self._turns), compute, tries)
        batches.gradients()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """This rank's clock, error memory and outer momentum: plain tensors, numbers and strings.

        It does not hold the model's weights. In the middle of a round they differ between ranks, as
        does the optimizer's state, so every rank saves its own model, optimizer and this. States
        saved between rounds fit another number of ranks after :func:`torchcomp.redistribute`; with
        ``fragments``, mostly none is before the run ends.
        torch.distributed.checkpoint keeps one value for each name, so give every rank names of its
        own: ``dcp.save({f"rank{rank}": {"sync": sync.state_dict(), ...}}, checkpoint_id=...)``.

        Raises:
            RuntimeError: between the turns of several optimizers.
        """
        self._require_whole_steps("state_dict")
        self.wait()
        return self._run.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` of this rank returned; nothing changes on error.

        Load the rank's own weights after ``DistributedDataParallel(...)``, whose constructor copies
        rank 0's to all ranks; the next optimizer step checks that they are those of the checkpoint.

        Raises:
            CheckpointError: if it is another model's, schedule's, run's or rank's.
            RuntimeError: between the turns of several optimizers.
        """
        self._require_whole_steps("load_state_dict")
        self.wait()
        self._run.load_state_dict(state)

    def close(self) -> None:
        """Remove every hook and give the model back to DDP; harmless when repeated.

        DDP keeps equal replicas equal, and no others. So close between rounds, where parameters are
        equal (a warning says where they are not), and train on with ``moments="average"`` or a new
        optimizer: momentum and Adam moments of local steps differ between the ranks, and replicas
        drift apart with them. Should such an optimizer step again, a warning says so.
        """
        self.wait()
        self._finalizer()
        if not self._closed:
            self._run.warn_afterwards()
        self._closed = True
        self._undo.close()

    def __enter__(self) -> "LocalSGD":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _install(self, model: DistributedDataParallel) -> ExitStack:
        with ExitStack() as undo:
            for each in self._changes(model):
                undo.callback(each)
            return undo.pop_all()

    def _changes(self, model: DistributedDataParallel) -> Iterator[Undo]:
        """Make the changes to the user's objects, one by one; gives what undoes each."""
        run = self._run
        yield override(model, OWNER, f"torchcomp.LocalSGD('{snapshot.spec_of(run.method)}')")
        yield claim(model)
        yield from watch_batches(model, run.progress.batches, self._turns)
        if run.ranks.inside is None:
            yield override(model, "require_backward_grad_sync", False)
            yield override(model, "require_forward_param_sync", False)
            yield override(model, "broadcast_buffers", False)
        for optimizer in self._turns:
            yield optimizer.register_step_pre_hook(self._before_step).remove
            yield optimizer.register_step_post_hook(self._after_step).remove
        if run.background is not None:
            yield run.background.executor.close
            yield from wait_in_forward(model.module, run.overlapped)
        if self._scaler is not None:
            yield wrap_scaler(self._scaler, self._around_scaler)

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if within_own_step(optimizer):
            return None
        self._turns.foreign = not optimizer.state and checkpoint_at_work()
        if not self._turns.scaling and not self._turns.foreign:
            self._run.begin_turn(optimizer)
        evaluated = self._turns.evaluated
        return tuple(map(evaluated, args)), {name: evaluated(a) for name, a in kwargs.items()}

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._turns.scaling and not self._turns.foreign and not within_own_step(optimizer):
            self._run.end_turn(optimizer)

    def _around_scaler(self, step: Step) -> Step:
        """A ``scaler.step`` that is one turn, skipped or not."""
        owner = weakref.ref(self)

        def turn(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            sync = owner()
            if sync is None or sync._closed or optimizer not in sync._turns:
                return step(optimizer, *args, **kwargs)
            sync._run.begin_turn(optimizer)
            sync._turns.scaling = True
            try:
                result = step(optimizer, *args, **kwargs)
            finally:
                sync._turns.scaling = False
            sync._run.end_turn(optimizer)
            return result

        return turn

    def _require_whole_steps(self, call: str) -> None:
        if self._turns.between:
            raise RuntimeError(
                f"{call} between the turns of several optimizers: call it when all have had theirs"
            )
