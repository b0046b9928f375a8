"""LocalSGD: local optimizer steps, and an average of the parameters at the end of each round."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torchcomp.checkpoints.gathering import Gatherable
from torchcomp.ddp.checks import check_is_ddp
from torchcomp.engine.nonfinite import all_finite
from torchcomp.engine.stats import Stats
from torchcomp.exchange import Exchange
from torchcomp.local_sgd import averages
from torchcomp.local_sgd.local_steps import LocalSteps
from torchcomp.local_sgd.method import ProcessGroup, parsed, ranks_of
from torchcomp.local_sgd.outer_steps import OuterStep
from torchcomp.local_sgd.rounds import state_of
from torchcomp.local_sgd.schedules import Schedule
from torchcomp.specs.checks import check_count
from torchcomp.specs.component import Component
from torchcomp.specs.errors import NonFiniteError, SpecError, UnsupportedModelError


class LocalSGD(Gatherable):
    """Train with local steps and average the parameters at the end of each round.

    This is Algorithm 2 ("Local OPT") of Gu et al., ICLR 2024 (arXiv 2310.14423). Each rank steps
    its own optimizer on its own gradients, which are not exchanged.

    1. At the first step of a round, read the learning rate and fix the round's length H.
    2. Take H local steps.
    3. Average the parameters over the ranks, in float32 or wider. The last round is cut to end
       with an average at exactly ``total_steps``.

    ``compress`` averages *pseudo-gradients* instead: what a rank's parameters have moved since the
    last synchronisation. ``outer`` applies an outer optimizer to their mean. After every
    synchronisation, all ranks have the same parameters, bit for bit. BatchNorm's running statistics
    are averaged with them (see :func:`torchcomp.reestimate_batchnorm`); other buffers and the
    optimizer's state stay local.

    The training loop stays as it is: hooks count calls of ``optimizer.step()``, or of
    ``scaler.step(optimizer)`` whether it skips or not. The average happens inside that call. A rank
    that takes more or fewer steps is not found.

    Args:
        model: a DDP model. :func:`torchcomp.register` may be called on it only before this, and
            only with ``process_group``.
        optimizer: any torch optimizer over the model's parameters, or a list of all optimizers that
            train it. With a list, a step counts when each has been stepped once. Learning rates
            must be the same on all ranks.
        spec: the schedule. Try ``"every(8)"`` first, then ``"qsr(alpha=0.0175, h_base=4)"``.
            ``"auto"`` averages after each step, measures 50, and logs which schedule it proposes.
        total_steps: T, the optimizer steps of the run. Beyond it, the ranks average after every
            step, with a warning.
        warmup_steps: W, steps of learning-rate warm-up.
        scaler: the loop's ``GradScaler``.
        compress: how pseudo-gradients are averaged: any method for :func:`torchcomp.register`. Try
            ``"ef(topk(0.01))"``. ``"mean"`` is the exact mean of the parameters.
        outer: an outer step, ``"slowmo(beta=0.7, alpha=1.0)"`` or ``"nesterov(lr=0.7,
            momentum=0.9)"``. None adds the mean pseudo-gradient to the parameters.
        moments: what a synchronisation does with the optimizers' state: ``"local"`` leaves it
            alone, ``"average"`` averages it uncompressed, ``"reset"`` clears it. An optimizer that
            keeps weights in its state, such as a schedule-free one, needs ``"average"``.
        overlap: let the average overlap with the code after the optimizer step, with the same
            results. Call :meth:`wait` before other code than layers reads parameters.
        process_group: for two levels, a group that contains one rank of each node, or a mesh of one
            dimension, such as ``mesh["node"]``. Parameters are averaged over it, and DDP reduces
            gradients at every step in its own group, the node.
        seed: seed of the random choices of ``compress``, an integer of at least 0.

    Raises:
        SpecError: on every rank, if an option cannot be used, or if the first step is taken by a
            GradScaler that was not passed as ``scaler``.
        UnsupportedModelError: as for :func:`torchcomp.register`. At a synchronisation, if an
            optimizer trains a parameter that was frozen or not in the model or optimizer before.
        RankMismatchError: if the arguments, learning rates or rounds differ between ranks; at the
            first step, with ``compress``, ``outer`` or ``process_group``, if parameters do.
        ScheduleError: from ``optimizer.step()``, at a learning rate that the schedule cannot use.
        NonFiniteError, WireError: on every rank, at a synchronisation, if a rank's parameters are
            not finite or a message is damaged. Nothing has changed then.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: "torch.optim.Optimizer | Sequence[torch.optim.Optimizer]",
        spec: str | Component,
        *,
        total_steps: int,
        warmup_steps: int = 0,
        scaler: "torch.amp.GradScaler | None" = None,
        compress: str | Component = "mean",
        outer: str | OuterStep | None = None,
        moments: str = "local",
        overlap: bool = False,
        process_group: "ProcessGroup | None" = None,
        seed: int = 0,
    ) -> None:
        check_is_ddp(model)
        options: dict[str, Any] = {
            **{"spec": spec, "total_steps": total_steps, "warmup_steps": warmup_steps},
            **{"compress": compress, "outer": outer, "moments": moments, "overlap": overlap},
            "seed": seed,
        }
        argument: Any = optimizer  # parsed() reports other types
        optimizers = list(argument) if isinstance(argument, list | tuple) else [argument]
        exchange, two_levels = ranks_of(model, process_group), process_group is not None
        method = exchange.build(
            "torchcomp.LocalSGD",
            {**options, "process_group": "set" if two_levels else "none"},
            lambda: parsed(model, optimizers, scaler, two_levels, **options),
        )
        self._steps = LocalSteps(model, optimizers, method, exchange, scaler)

    def __repr__(self) -> str:
        return f"<LocalSGD '{self.schedule}': {self.stats}>"

    @property
    def schedule(self) -> Schedule:
        """The schedule; its ``str`` is the spec."""
        return self._steps.method.schedule

    @property
    def next_sync(self) -> int | None:
        """The step, counted from 1, at which the round in progress ends; None between rounds.

        Between rounds, all ranks have the same parameters: evaluate and save there.
        """
        return self._steps.clock.next_sync

    @property
    def proposal(self) -> Any:
        """What ``"auto"`` proposes, with its `schedule`, a spec; None before."""
        return self._steps.proposing and self._steps.proposing.proposal

    @property
    def stats(self) -> Stats:
        """Bytes of this rank's last synchronisation and of the run. Any thread can read them."""
        traffic, steps = self._steps.counters
        return replace(traffic, steps=steps)

    @property
    def seconds_waited(self) -> float:
        """Time in synchronisations, with the wait for other ranks, but not that of layers."""
        return self._steps.seconds_waited

    def residual_norms(self, slot: str = "error") -> dict[str, float]:
        """Euclidean norms by parameter, as in :meth:`torchcomp.Averager.residual_norms`."""
        return self._steps.averager.residual_norms(slot)

    def wait(self) -> None:
        """With ``overlap``, wait until all parameters have their averages."""
        self._steps.averages.wait()

    def backward(self, compute: Callable[[], Tensor], tries: int = 24) -> Tensor:
        """Add a micro-batch's gradients to ``.grad``, and return its loss, without the scale.

        This is the paper's remedy for float16: gradients that overflow are computed again, so that
        no rank ever skips an optimizer step. Call it in place of ``scaler.scale(loss).backward()``,
        once for each micro-batch. The gradients in ``.grad`` are then unscaled: clip them directly,
        and call ``optimizer.step()``.

        Args:
            compute: the forward pass of a micro-batch; returns its loss, a scalar.
            tries: the maximum number of computations, at ever smaller scales.

        Raises:
            SpecError: without a scaler.
            UnsupportedModelError: with ``process_group``.
            NonFiniteError: if the gradients are not finite at any of these scales.
        """
        scaler, optimizers = self._steps.scaler, self._steps.optimizers
        if scaler is None:
            raise SpecError("sync.backward needs torchcomp.LocalSGD(..., scaler=scaler)", "scaler")
        if self._steps.method.two_levels:
            raise UnsupportedModelError(
                "sync.backward repeats a backward pass on one rank, which process_group does not "
                "allow: use scaler.step(optimizer)"
            )
        check_count("tries", tries)
        groups = [group for each in optimizers for group in each.param_groups]
        parameters = [p for group in groups for p in group["params"]]
        # Set earlier gradients aside: unscale_() would divide them by the scale a second time. In a
        # copy, because with gradient_as_bucket_view DDP writes into them.
        earlier = [p for p in parameters if p.grad is not None]
        aside = [torch.empty_like(p.grad) for p in earlier]
        if aside:
            torch._foreach_copy_(aside, [p.grad for p in earlier])
        finite = False
        tries = tries if scaler.is_enabled() else 1  # without a scale to lower
        try:
            for _ in range(tries):
                for parameter in parameters:
                    parameter.grad = None
                loss = compute()
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                found = [p.grad for p in parameters if p.grad is not None]
                finite = not found or bool(all_finite(found, found[0].device))
                # After every try: unscale_() can be called again only after update().
                scaler.update()
                if finite:
                    break
        finally:
            if not finite:  # or after an error: drop this micro-batch's gradients
                for parameter in parameters:
                    parameter.grad = None
            both = [(p.grad, g) for p, g in zip(earlier, aside, strict=True) if p.grad is not None]
            if both:
                torch._foreach_add_(*map(list, zip(*both, strict=True)))
            for parameter, gradient in zip(earlier, aside, strict=True):
                if parameter.grad is None:
                    parameter.grad = gradient
        if not finite:
            problem = f"the gradients of a micro-batch were not finite in {tries} tries"
            raise NonFiniteError(f"{problem}, and the scale is now {scaler.get_scale():g}")
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's step count, round, residual and outer momentum.

        Inside a round, weights differ between ranks: save the model, the optimizer and this on
        every rank, or use :class:`torchcomp.Gathered`. A state saved between rounds fits another
        number of ranks after :func:`torchcomp.redistribute`.

        Raises:
            RuntimeError: if only some of several optimizers have been stepped.
        """
        self._steps.require_whole_step("state_dict")
        return state_of(self._steps.method, self._steps.clock, self._steps.averager)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` of this rank returned; on error, nothing changes.

        Load the rank's own weights after ``DistributedDataParallel(...)``, because its constructor
        copies rank 0's to all ranks. The next optimizer step verifies them.

        Raises:
            CheckpointError: if the state is damaged, or that of another model, run or rank.
            RuntimeError: if only some of several optimizers have been stepped.
        """
        self._steps.load(state)

    @property
    def _gather_over(self) -> Exchange:
        return self._steps.averager.exchange

    @property
    def _gathers(self) -> bool:
        # With two levels, each rank of a node gathers over the nodes, with the same result.
        return self._steps.first_in_node

    def close(self) -> None:
        """Remove every hook and restore plain DDP; a second call does nothing.

        Closing inside a round logs a warning: replicas then differ. To continue with plain DDP,
        build a new optimizer, because the ranks' momentum differs.
        """
        try:
            self.wait()
        finally:
            self._steps.remove()

    def __enter__(self) -> "LocalSGD":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        else:  # another rank may never join an average
            self._steps.averages.close(averages.AT_EXIT_SECONDS)
            self._steps.remove()
