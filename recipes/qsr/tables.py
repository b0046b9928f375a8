"""The tables of the pages, computed from the files of the results."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from recipes.page_tables import markdown_table
from recipes.qsr.comparison import Grid
from recipes.qsr.results import Entry, Results, read_results
from recipes.qsr.settings import ADAMW_MLP, ADAMW_VIT, MAIN_METHODS, METHODS, SGD_MLP, Setting
from recipes.spread import Spread, paired, spread

_NONE = "–"
# Marks a tuned value that is an end of its grid.
_END = "†"
_LENGTHS = {f"{epochs} epochs": Setting(epochs=epochs) for epochs in (30, 120, 360)}
_CLEAN = replace(SGD_MLP, label_noise=0.0)


def summary(folder: Path) -> str:
    """Return all reported results of a folder as text."""
    results = read_results(folder)
    tables = [f"{each}\n{_methods(results, each)}" for each in results.settings()]
    return "\n\n".join(tables)


def methods(folder: Path, setting: Setting) -> str:
    """Return the methods of one setting: accuracy, differences and communication."""
    return _methods(read_results(folder), setting)


def _methods(results: Results, setting: Setting) -> str:
    parallel, qsr = (results.reported(setting, name) for name in ("parallel", "QSR"))
    found = [entry for each in METHODS if (entry := results.reported(setting, each))]
    rows = [
        (
            *(entry.point.method, f"`{entry.point.schedule}`", entry.accuracy.with_deviation()),
            *(_difference(entry, parallel), _difference(qsr, entry)),
            *(_share(entry, parallel), f"{entry.nbytes / 1e6:.1f}"),
        )
        for entry in found
    ]
    header = ("", "schedule", "accuracy, %", "it − parallel", "QSR − it", "averages", "MB")
    return markdown_table(header, rows)


def settings(folder: Path, chosen: dict[str, Setting]) -> str:
    """Return the main methods of several settings, one setting per row."""
    results = read_results(folder)
    rows = []
    for name, setting in chosen.items():
        if entries := results.main(setting):
            parallel, constant, qsr = entries
            rows.append(
                (
                    *(name, *(entry.accuracy.with_deviation() for entry in entries)),
                    *(_difference(qsr, parallel), _difference(qsr, constant)),
                    *(_share(constant, parallel), _share(qsr, parallel)),
                )
            )
    header = ("", "parallel, %", "constant H, %", "QSR, %", "QSR − parallel", "QSR − constant H")
    return markdown_table((*header, "averages: constant H", "QSR"), rows)


def growth(folder: Path) -> str:
    """Return how QSR's lead changes from the shortest run to the longest, paired by seed."""
    results = read_results(folder)
    found = [entries for each in _LENGTHS.values() if (entries := results.main(each))]
    rows = []
    for index, name in enumerate(MAIN_METHODS[:2]):
        leads = [_lead(entries[2], entries[index]) for entries in (found[0], found[-1])]
        rows.append((name, *(spread(lead.values()).with_error() for lead in leads)))
        rows[-1] += (paired(leads[1], leads[0]).with_error(),)
    short, *_, long = _LENGTHS
    return markdown_table(("QSR ahead of", short, long, "change"), rows)


def _lead(ours: Entry, theirs: Entry) -> dict[int, float]:
    both = theirs.by_seed
    return {seed: accuracy - both[seed] for seed, accuracy in ours.by_seed.items()}


def verdicts(folder: Path) -> str:
    """Return in how many settings QSR differs from the others by two standard errors or more."""
    results = read_results(folder)
    found = [entries for each in results.settings() if (entries := results.main(each))]
    rows = []
    for index, name in enumerate(MAIN_METHODS[:2]):
        sides = [_side(entries[2].ahead_of(entries[index])) for entries in found]
        rows.append((name, *(f"{sides.count(side)} of {len(sides)}" for side in (1, 0, -1))))
    return markdown_table(("QSR against", "ahead", "no difference", "behind"), rows)


def _side(difference: Spread) -> int:
    """Return 1 or -1 for a difference of at least two standard errors, and otherwise 0."""
    mean, least = difference.mean, 2 * difference.error
    return (mean >= least) - (mean <= -least)


def tuned(folder: Path) -> str:
    """Return what tuning has chosen in every setting; a mark shows an end of the grid."""
    results, grid = read_results(folder), Grid()
    periods = [f"every({h})" for h in grid.periods]
    rows = []
    for setting in results.settings():
        if entries := results.main(setting):
            parallel, constant, qsr = (entry.point for entry in entries)
            lrs, decays = grid.lrs[setting.optimizer], grid.weight_decays[setting.optimizer]
            rows.append(
                (
                    *(setting.model, setting.optimizer, setting.decay, setting.ranks),
                    *(setting.epochs, f"{setting.label_noise:g}"),
                    f"{parallel.lr:g}{_end_mark(parallel.lr, lrs)}",
                    ", ".join(
                        f"{each:g}{_end_mark(each, decays)}"
                        for each in (entry.point.weight_decay for entry in entries)
                    ),
                    f"`{constant.schedule}`{_end_mark(constant.schedule, periods)}",
                    f"`{qsr.schedule}`",
                )
            )
    header = ("model", "optimizer", "decay", "K", "epochs", "label noise", "peak lr")
    return markdown_table((*header, "weight decays of the three", "constant H", "QSR"), rows)


def _end_mark(chosen: object, tried: Sequence[object]) -> str:
    return _END if chosen in (tried[0], tried[-1]) else ""


def _difference(ours: Entry | None, theirs: Entry | None) -> str:
    if ours is None or theirs is None or ours is theirs:
        return _NONE
    return ours.ahead_of(theirs).with_error()


def _share(entry: Entry, parallel: Entry | None) -> str:
    # Parallel training averages in every step.
    share = f" ({entry.syncs / parallel.syncs:.1%})" if parallel else ""
    return f"{entry.syncs:,}{share}"


TABLES = {
    "sgd_mlp": partial(methods, setting=SGD_MLP),
    "adamw_mlp": partial(methods, setting=ADAMW_MLP),
    "adamw_vit": partial(methods, setting=ADAMW_VIT),
    "main": partial(
        settings,
        chosen={"SGD, MLP": SGD_MLP, "AdamW, MLP": ADAMW_MLP, "AdamW, ViT": ADAMW_VIT},
    ),
    "lengths": partial(settings, chosen=_LENGTHS),
    "growth": growth,
    "decays": partial(
        settings,
        chosen={each: Setting(decay=each) for each in ("cosine", "linear", "step-cosine", "step")},
    ),
    "workers": partial(
        settings, chosen={f"{ranks} workers": Setting(ranks=ranks) for ranks in (2, 4, 8)}
    ),
    "clean_labels": partial(
        settings, chosen={"a fifth of the labels random": SGD_MLP, "all right": _CLEAN}
    ),
    "verdicts": verdicts,
    "tuned": tuned,
}
"""By the name that a page uses."""
