"""The table of `torchcomp plan`: what each method takes for a whole run."""

import textwrap
from collections.abc import Iterable, Sequence

from torchcomp.advisor.links import Link
from torchcomp.advisor.prediction import BF16, DDP, Run, Training
from torchcomp.advisor.units import span, step_time, volume, wrapped
from torchcomp.exchange.traffic import three_digits

_WORTH = 1.02  # a method is worth its change if it is this many times as fast as the bf16 hook
_BASELINES = {DDP: "plain DDP", BF16: "DDP with the bf16 hook"}


def table(
    trainings: Sequence[Training],
    run: Run,
    link: Link,
    *,
    price_per_gb: float | None = None,
    currency: str = "USD",
) -> str:
    """Return a table of at most 80 columns, the fastest method first."""
    alone = span(run.step_seconds * run.total_steps / 3600)
    heads = [
        f"{run.world_size:,} ranks, {link}",
        f"{run.total_steps:,} steps of {step_time(run.step_seconds)} without any exchange: {alone}",
    ]
    columns = ["step", "use", "time", "sent"] + ["price"] * (price_per_gb is not None)
    lines = [_line(columns, "method")]
    for training in sorted(trainings, key=lambda each: each.step.seconds):
        share = f"{training.step.utilisation:.0%}"
        cells = [step_time(training.step.seconds), share, span(training.hours)]
        cells.append(volume(training.gigabytes))
        if price_per_gb is not None:
            cells.append(f"{training.price(price_per_gb):,.0f} {currency}")
        lines.append(_line(cells, training.method))
    faster = "" if run.speedup == 1 else f" and divided by {run.speedup:g}"
    notes = [
        *verdict(trainings),
        "use: share of a step in which the ranks compute. sent: by all nodes, over their cards.",
        f"Encoding was measured on this machine{faster}. The network is computed from its "
        "numbers, and docs/prediction.md compares such predictions with measured times.",
    ]
    heads, notes = ([textwrap.fill(each, 80) for each in texts] for texts in (heads, notes))
    return "\n".join([*heads, "", *lines, "", *notes])


def verdict(trainings: Sequence[Training]) -> list[str]:
    """Return sentences about the fastest method and schedule, compared with the bf16 hook."""
    seconds = {training.method: training.step.seconds for training in trainings}
    others = [method for method in seconds if method not in _BASELINES]
    if BF16 not in seconds or not others:
        return []
    known = min(_BASELINES.keys() & seconds.keys(), key=seconds.__getitem__)
    local = {training.method for training in trainings if training.local}

    def faster(methods: Iterable[str], caveat: str = "") -> str:
        best = min(methods, key=seconds.__getitem__, default=known)
        factor = seconds[known] / seconds[best]
        if factor < _WORTH:
            return ""
        return f"{best} is {three_digits(factor)}x as fast as {_BASELINES[known]}{caveat}."

    sentences = (
        faster(method for method in others if method not in local)
        or f"No method is faster than {_BASELINES[known]}: keep it.",
        faster(local, ", but trains in another way"),
    )
    return list(filter(None, sentences))


def _line(cells: Sequence[str], method: str) -> str:
    widths = (9, 6, 9, 9, 14)
    head = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False)) + "  "
    return wrapped(head, method)
