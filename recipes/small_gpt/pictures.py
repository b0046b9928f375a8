"""The plot: excess of the validation loss against traffic."""

from pathlib import Path

from recipes.result_files import pyplot, save_figure
from recipes.small_gpt.summary import Summary
from recipes.small_gpt.training import DENSE

_TARGET_EXCESS, _TARGET_SAVING = 2.0, 20.0


def draw_tradeoff(compared: list[Summary], title: str, path: Path) -> None:
    """Draw each method as a numbered point with its standard error; the legend has its strings."""
    from matplotlib.ticker import FuncFormatter

    figure, axes = pyplot().subplots(figsize=(11.5, 5.2), layout="constrained")
    # The legend lists the best methods first, like the points from the bottom up.
    shown = sorted((c for c in compared if c.method != DENSE), key=lambda each: each.excess.mean)
    for number, each in enumerate(shown, 1):
        color = "C2" if _is_good(each) else "C0"
        point = (each.saving, each.excess.mean)
        axes.errorbar(
            *point, yerr=each.excess.error, color=color, alpha=0.4, capsize=3, linewidth=1
        )
        axes.plot(*point, "o", color=color, markersize=15, label=f"{number:>2}  {each.method}")
        axes.annotate(
            str(number), point, ha="center", va="center", color="white", fontweight="bold", size=9
        )
    axes.axhline(0, color="black", linewidth=0.8)
    axes.axhline(_TARGET_EXCESS, color="C3", linestyle="--", linewidth=1)
    axes.text(1.05, _TARGET_EXCESS, "2 %", color="C3", va="bottom")
    axes.axvline(_TARGET_SAVING, color="C3", linestyle="--", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(left=1)
    axes.set_xticks([1, 2, 5, 10, 20, 50, 100], minor=False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.set_xlabel("traffic: how many times fewer bytes than plain DDP (log scale)")
    axes.set_ylabel("validation loss above plain DDP, %\n(mean and standard error)")
    goal = "save 20x\nand stay within 2 % of the loss of plain DDP"
    axes.set_title(f"{title}: {'green points' if any(map(_is_good, shown)) else 'none'} {goal}")
    axes.grid(True, which="major", alpha=0.3)
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside right upper",
        prop={"family": "monospace", "size": 8},
        handlelength=0,
        markerscale=0,
        frameon=False,
    )
    save_figure(figure, path, dpi=120)


def _is_good(each: Summary) -> bool:
    return each.excess.mean <= _TARGET_EXCESS and each.saving >= _TARGET_SAVING
