"""The plot: excess of the validation loss against traffic."""

from pathlib import Path

from recipes.pictures import Line, Panel, draw
from recipes.small_gpt.tables import Method, others

_EXCESS, _SAVING = 2.0, 20.0


def tradeoff(results: Path, path: Path) -> None:
    """Draw each method as a numbered point with its standard error; the legend has its strings."""
    methods = others(results)
    good = any(map(_is_good, methods))
    panel = Panel(
        x="traffic: how many times fewer bytes than plain DDP (log scale)",
        y="validation loss above plain DDP, %\n(mean and standard error)",
        lines=[
            Line(
                f"{number:>2}  {each.name}",
                [each.saving],
                [each.excess.mean],
                None if each.excess.count == 1 else [each.excess.error],
                {"color": "C2" if _is_good(each) else "C0", "marker": "o", "linestyle": "none"},
                notes=[str(number)],
            )
            for number, each in enumerate(methods, 1)
        ],
        log="x",
        xticks={value: f"{value}x" for value in (1, 2, 5, 10, 20, 50, 100)},
        xlim=(1, None),
        xmarks=[_SAVING],
        ymarks=[0, _EXCESS],
    )
    goal = "save 20x and stay within 2 % of the loss of plain DDP"
    title = f"A small GPT, AdamW: {'green points' if good else 'none'} {goal}"
    draw(path, title, [panel], size=(10, 5), columns=2)


def _is_good(each: Method) -> bool:
    return each.excess.mean <= _EXCESS and each.saving >= _SAVING


PICTURES = {"tradeoff": tradeoff}
