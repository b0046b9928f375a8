"""The two forms of Algorithm 1 on layers with fixed gradient norms that change once.

    python -m recipes.jointspar.bandit

Takes half a minute. There are 54 layers with log-normal norms (sigma 1.5), a budget of S = 32.4
layers per step, and p_min = 0.0125. After 5,000 steps the norms are drawn again. The cost of p is
sum |g_d|^2 / p_d. The paper's form (``Literal``) runs with a grid of step sizes, of which the best
is chosen afterwards. Writes ``bandit.csv``, ``bandit_curves.csv`` and ``bandit.png``.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recipes.errors import exit_on_user_error
from recipes.experiments import ResultTable
from recipes.jointspar.parts import parse_common
from recipes.result_files import make_folder, pyplot, read_csv, save_figure
from torchcomp.jointspar import (
    Bandit,
    Baseline,
    Literal,
    best_probabilities,
    sample,
)
from torchcomp.keys import Key

LAYERS, SHARE, P_MIN = 54, 0.6, 0.0125
ALPHAS = (0.003, 0.01, 0.03)
# In units of p_min^3 / L^2, for which the exponent of a kept layer at p_min is about 1.
LITERAL_ALPHAS = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)
# Number of steps that one point of the curves averages, about one pixel of the picture.
BLOCK = 20

Curve = NDArray[np.float64]
Rule = Baseline | Literal | None


@dataclass(frozen=True)
class BanditSize:
    """The length and the number of the runs.

    Attributes:
        steps: steps before the norms change, and steps after it.
        seeds: number of runs of each form.
    """

    steps: int
    seeds: int

    @property
    def task(self) -> str:
        """The settings that all rows share."""
        return f"{LAYERS} layers, norms change after {self.steps} steps, {self.seeds} seeds"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the table."""
        first, last = self.steps, 2 * self.steps
        return (
            *("form", f"excess_at_{first}", f"mean_excess_to_{first}", "steps_to_2_percent"),
            *(f"excess_at_{last}", f"mean_excess_from_{first}"),
        )

    @property
    def curve_columns(self) -> tuple[str, ...]:
        """The columns of the curves: the form, and the last step of each block."""
        return "form", *(str(step) for step in range(BLOCK, 2 * self.steps + 1, BLOCK))


WHOLE = BanditSize(steps=5000, seeds=5)
QUICK = BanditSize(steps=200, seeds=1)


@exit_on_user_error()
def main() -> None:
    """Run the missing forms, print the table, and draw the picture."""
    arguments = parse(sys.argv[1:])
    size = size_of(arguments)
    table, curves = open_table(arguments), open_curves(arguments)
    make_folder(arguments.out)
    # The curve of a form is saved before its row, so a finished row always has its curve.
    finished = {row["form"] for row in table.rows} & {row["form"] for row in curves.rows}
    for each in (table, curves):
        each.rows = [row for row in each.rows if row["form"] in finished]
    for form in forms():
        if form not in finished:
            excess = mean_excess(form, size)
            curves.add([form, *(f"{mean:.6g}" for mean in excess.reshape(-1, BLOCK).mean(1))])
            table.add(cells_of(form, excess))
    for line in [table.header, *(row.values() for row in table.rows)]:
        print("  ".join(f"{cell!s:>22}" for cell in line))
    draw(table.path, curves.path, arguments.out / "bandit.png")


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    return parse_common(__doc__, words)


def size_of(arguments: argparse.Namespace) -> BanditSize:
    """Return the length and the number of the runs."""
    return QUICK if arguments.quick else WHOLE


def open_table(arguments: argparse.Namespace) -> ResultTable:
    """Open the table, with the finished forms if the experiment is resumed."""
    size, path = size_of(arguments), arguments.out / "bandit.csv"
    return ResultTable(path, size.columns, size.task, resume=arguments.resume)


def open_curves(arguments: argparse.Namespace) -> ResultTable:
    """Open the curves, with those of the finished forms if the experiment is resumed."""
    size, path = size_of(arguments), arguments.out / "bandit_curves.csv"
    return ResultTable(path, size.curve_columns, size.task, resume=arguments.resume)


def forms() -> list[str]:
    """Return the names of all forms that are compared."""
    return [
        "uniform",
        *(f"baseline, alpha {alpha:g}" for alpha in ALPHAS),
        *(f"literal, alpha {alpha:g}" for alpha in LITERAL_ALPHAS),
    ]


def rule_of(form: str, seed: int) -> Rule:
    """Return the rule that a form's name describes."""
    kind, _, alpha = form.partition(", alpha ")
    if kind == "baseline":
        return Baseline(float(alpha))
    return literal(float(alpha), seed) if kind == "literal" else None


def literal(alpha: float, seed: int) -> Literal:
    """Return the paper's form with the tightest valid bound L, and alpha in natural units."""
    bound = float(np.max(norms_of(seed)))
    return Literal(alpha * P_MIN**3 / bound**2, bound)


def norms_of(seed: int) -> tuple[Curve, Curve]:
    """Return the norms before and after the change."""
    rng = np.random.default_rng(seed)
    before, after = np.exp(1.5 * rng.standard_normal((2, LAYERS)))
    return before, after


def mean_excess(form: str, size: BanditSize) -> Curve:
    """Return the excess cost of a form at every step, as a mean over the seeds."""
    curves = [run(rule_of(form, seed), seed, size.steps) for seed in range(size.seeds)]
    mean: Curve = np.mean(curves, axis=0)
    return mean


def run(rule: Rule, seed: int, steps: int) -> Curve:
    """Return the cost above the optimum at every step of one run; 0.5 is 50 %."""
    bandit = Bandit(np.ones(LAYERS), SHARE * LAYERS, P_MIN, rule)
    excess = []
    for part, norms in enumerate(norms_of(seed)):
        best = best_probabilities(norms, SHARE * LAYERS, P_MIN)
        minimum = (norms**2 / best).sum()
        for step in range(part * steps, (part + 1) * steps):
            excess.append((norms**2 / bandit.p).sum() / minimum - 1)
            if rule is not None:
                bandit.update(sample(bandit.p, Key(seed, step)), norms)
    return np.array(excess)


def cells_of(form: str, excess: Curve) -> list[object]:
    """Return a row of the table."""
    first, second = np.split(excess, 2)
    within = np.flatnonzero(first < 0.02)
    return [
        *(form, f"{first[-1]:.4f}", f"{first.mean():.4f}"),
        int(within[0]) if within.size else "never",
        *(f"{second[-1]:.4f}", f"{second.mean():.4f}"),
    ]


def draw(table: Path, curves: Path, path: Path) -> None:
    """Draw excess cost and regret of all forms; only the best of the paper's has a color."""
    excess = {row.pop("form"): np.array([*map(float, row.values())]) for row in read_csv(curves)}
    steps = BLOCK * np.arange(1, len(next(iter(excess.values()))) + 1)
    final = final_excess(table)
    best = best_of(final, "literal")
    figure, axes = pyplot().subplots(1, 2, figsize=(13, 5.4), layout="constrained")
    for form, curve in excess.items():
        style = {"label": f"{form} (best)" if form == best else form}
        if form.startswith("literal") and form != best:
            style = {"color": "0.8", "linewidth": 0.8, "zorder": 1}
        elif form == "uniform":
            style |= {"color": "black", "linestyle": "--", "zorder": 5}
        axes[0].plot(steps, 100 * curve, **style)
        axes[1].plot(steps, BLOCK * np.cumsum(curve), **style)
    axes[0].axhline(2, color="black", linestyle=":", linewidth=1, label="2 %")
    axes[0].set_ylabel(f"cost above the optimum, % (means over {BLOCK} steps)")
    axes[1].set_ylabel("regret: excess cost summed over the steps")
    for each in axes:
        each.set_yscale("log")
        each.axvline(steps[-1] / 2, color="0.5", linewidth=0.8)
        each.set_xlabel(f"step (norms change at {steps[-1] // 2:,}); grey: literal, other alphas")
        each.grid(True, alpha=0.3)
    figure.suptitle(title_of(final, steps[-1] // 2))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    save_figure(figure, path)


def final_excess(table: Path) -> dict[str, float]:
    """Return each form's excess cost at the last step before the change."""
    return {row["form"]: float([*row.values()][1]) for row in read_csv(table)}


def best_of(final: dict[str, float], kind: str) -> str:
    """Return the form of a kind with the smallest excess cost before the change."""
    return min((form for form in final if form.startswith(kind)), key=final.__getitem__)


def title_of(final: dict[str, float], steps: int) -> str:
    """Return a title that states the result."""
    baseline, paper = (final[best_of(final, kind)] for kind in ("baseline", "literal"))
    return (
        f"JointSpar's bandit, cost above the optimum after {steps:,} steps: baseline form "
        f"{baseline:.2%}, literal form {paper:.0%}, uniform {final['uniform']:.0%}"
    )


if __name__ == "__main__":
    main()
