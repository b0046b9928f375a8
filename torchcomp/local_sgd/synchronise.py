"""Synchronise: one meeting of the ranks, at which the fragments that are due are averaged."""

from typing import Any

from torchcomp.local_sgd.fragments import Fragment
from torchcomp.local_sgd.progress import Progress
from torchcomp.local_sgd.ranks import Ranks
from torchcomp.traffic import Traffic

_LOST_STEP = (
    "Every rank calls optimizer.step() once for each step; one that skips it, or takes it twice, "
    "works on other batches than the others from then on, and runs out of them at another time. If "
    "a GradScaler skips steps, hand it over: torchcomp.LocalSGD(..., scaler=scaler). A gradient "
    "that is only looked at comes from torch.autograd.grad, which leaves .grad alone. The learning "
    "rate is the same function of the step on all ranks."
)


def synchronise(due: list[Fragment], ranks: Ranks, progress: Progress, added: list[str]) -> Traffic:
    """End the round of every fragment that is due, on all ranks or on none.

    Args:
        due: whose parameters are averaged.
        ranks: that meet.
        progress: this rank's clock.
        added: descriptions of the parameters that came since the last synchronisation.

    Returns:
        What crossed this rank's link, and what plain DDP would have sent in these rounds.

    Raises:
        RankMismatchError: if the ranks have lost step with each other.
        SpecError: on all ranks, if optimizers hold what cannot be averaged and should be.
        NonFiniteError: on all ranks, if something is not finite.
        WireError: on all ranks, if a message was not intact.
    """
    ranks.agree("synchronisation", {}, lambda: (None, _facts(due, progress, added)), _LOST_STEP)

    def exchange() -> None:
        for fragment in due:
            fragment.exchange(progress.step)

    try:
        ranks.attempt("synchronisation", exchange)
    except BaseException:
        for fragment in due:
            fragment.averaging.rollback()
        ranks.between.take_traffic(0)
        raise
    traffic = Traffic()
    for fragment in due:
        steps = progress.step - fragment.round.synced
        traffic.add(ranks.between.take_traffic(fragment.weights.nbytes, steps))
        fragment.commit(progress.step)
    progress.syncs += 1
    return traffic


def _facts(due: list[Fragment], progress: Progress, added: list[str]) -> dict[str, Any]:
    for fragment in due:
        fragment.moments.check(fragment.weights.parameters, fragment.turns)
    rounds = [fragment.round for fragment in due]
    return {
        "optimizer steps": progress.step,
        "round": ", ".join(map(str, rounds)),
        "batches whose gradients were thrown away without a step": progress.batches.dropped,
        "steps without forward passes in training": progress.batches.missing,
        "learning rates at its start": [each.rates for each in rounds],
        "sum of the learning rates of its steps": [each.rate_sum for each in rounds],
        "parameters added": ", ".join(added) or "none",
    }
