"""The verdict on a step: one message at its end, from which all ranks learn whether it counts."""

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from torchcomp.exchange import Exchange
from torchcomp.nonfinite import FiniteWatch
from torchcomp.settlement import Reason

LATE = (
    "This was found one step later: the residual is that before the step. The averaged gradients "
    "were set to zero, so the optimizer has applied at most its momentum and weight decay."
)
"""What became of a step that the host checks when the next one begins."""

_SAME_LR = "The learning rate must be the same function of the step on all ranks."
_SAME_FATE = (
    "On some ranks, an optimizer has stepped with the gradients of the last step, and on others "
    "these gradients were cleared: the replicas are no longer equal."
)


class Question(NamedTuple):
    """What the ranks decide about a step.

    Attributes:
        watch: what has looked for a NaN on this rank.
        lrs: learning rates of the step, which must be equal on all ranks; empty if not given.
        taken_back: whether the last step was taken back, which must be the same on all ranks. None
            if no rank can take one back.
        where: the name of the step, for error messages.
        what: what has the NaN, for the error message: "a gradient at step 3".
        unchanged: a sentence on what a discarded step leaves unchanged.
        advice: what to do about a NaN, for the error message.
        may_skip: answer False instead of raising if there is a NaN or an infinity.
        residuals: returns the residuals that show the NaN of a gradient, by parameter name.
    """

    watch: FiniteWatch
    lrs: Mapping[str, float]
    taken_back: bool | None
    where: str
    what: str
    unchanged: str
    advice: str
    may_skip: bool
    residuals: Callable[[], Iterable[tuple[str, Tensor]]]


def ask(exchange: Exchange, question: Question) -> tuple[Reason, Tensor | None]:
    """Send this rank's part of the message, without waiting for the others.

    Returns:
        A function that waits for the others and says whether the step counts. It raises, on all
        ranks, what is wrong with the step. And the flags on the device: the step does not count if
        one of the first two is not 0. None if no message was sent.
    """
    watch, lrs, where = question.watch, question.lrs, question.where
    same: list[tuple[Callable[[], bool], dict[str, Any], str]] = []
    if lrs:
        digest = zlib.crc32(repr(lrs).encode()).to_bytes(4, "big")
        problem = f"{_SAME_LR} {question.unchanged}"
        same.append((exchange.same_at_end(digest), {"lr": lrs}, problem))
    fates: list[int] = []
    # Without a message at its end, a step is not worth one for this alone.
    if question.taken_back is not None and exchange.must_conclude:
        fates = exchange.max_at_end([question.taken_back, not question.taken_back])
    decide = exchange.conclude_later(watch.finite(), where, question.unchanged)

    def counts() -> bool:
        finite = decide()
        for matches, values, problem in same:
            if not matches():
                exchange.verify(where, values, problem)
        if all(fates) and fates:
            fate = {"gradients of the last step": "cleared" if question.taken_back else "applied"}
            exchange.verify(where, fate, _SAME_FATE)
        if not finite and not question.may_skip:
            suffix = f" {question.advice}" if question.advice else ""
            raise watch.error(question.what, question.unchanged + suffix, question.residuals())
        return finite

    return counts, decide.flags
