"""The two forms of Algorithm 1 on layers with fixed gradient norms that change once.

    python -m recipes.jointspar.bandit

Takes two minutes. There are 54 layers with log-normal norms (sigma 1.5), a budget of S = 32.4
layers per step, and p_min = 0.0125. After 5,000 steps the norms are drawn again. The cost of p is
sum |g_d|^2 / p_d. The paper's form (``Literal``) runs with a grid of step sizes, of which the best
is chosen afterwards. Writes ``bandit.csv``, ``bandit_curves.csv`` and ``bandit.png``.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recipes.errors import exit_on_user_error
from recipes.experiments import ResultTable
from recipes.jointspar.parts import parse_common
from recipes.result_files import make_folder, pyplot, read_csv, save_figure
from recipes.spread import Spread, spread
from torchcomp.jointspar import Bandit, Baseline, Literal, kl_project, sample
from torchcomp.keys import Key

LAYERS, SHARE, P_MIN = 54, 0.6, 0.0125
ALPHAS = (0.003, 0.01, 0.03)
# In units of p_min^3 / L^2, for which the exponent of a kept layer at p_min is about 1.
LITERAL_ALPHAS = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)
# Number of steps that one point of the curves averages.
BLOCK = 50

Curve = NDArray[np.float64]
Rule = Baseline | Literal | None


@dataclass(frozen=True)
class BanditSize:
    """The length of the runs: `steps` before the norms change, and as many after it."""

    steps: int

    @property
    def task(self) -> str:
        """The settings that all rows share."""
        return f"{LAYERS} layers, norms change after {self.steps} steps"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the table."""
        first, last = self.steps, 2 * self.steps
        return (
            *("form", "seed", f"excess_at_{first}", f"mean_excess_to_{first}"),
            *("steps_to_2_percent", f"excess_at_{last}", f"mean_excess_from_{first}"),
        )

    @property
    def curve_columns(self) -> tuple[str, ...]:
        """The columns of the curves: the run, and the last step of each block."""
        return "form", "seed", *(str(step) for step in range(BLOCK, 2 * self.steps + 1, BLOCK))


WHOLE = BanditSize(steps=5000)
QUICK = BanditSize(steps=200)


@exit_on_user_error()
def main() -> None:
    """Compute the missing runs, print their summary, and draw the picture."""
    arguments = parse(sys.argv[1:])
    table, curves = open_table(arguments), open_curves(arguments)
    make_folder(arguments.out)
    # The curve of a run is saved before its row, so a finished row always has its curve.
    finished = {_key(row) for row in table.rows} & {_key(row) for row in curves.rows}
    for each in (table, curves):
        each.rows = [row for row in each.rows if _key(row) in finished]
    for seed in arguments.seeds:
        for form in forms():
            if (form, seed) not in finished:
                excess = run(rule_of(form, seed), seed, size_of(arguments).steps)
                means = excess.reshape(-1, BLOCK).mean(1)
                curves.add([form, seed, *(f"{mean:.4g}" for mean in means)])
                table.add([form, seed, *cells_of(excess)])
    for form, numbers in summary(table.path).items():
        print(f"{form:<22}{numbers['before'].mean:>10.2%}{numbers['after'].mean:>10.2%}")
    draw(table.path, curves.path, arguments.out / "bandit.png")


def _key(row: dict[str, str]) -> tuple[str, int]:
    return row["form"], int(row["seed"])


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    return parse_common(__doc__, words)


def size_of(arguments: argparse.Namespace) -> BanditSize:
    """Return the length of the runs."""
    return QUICK if arguments.quick else WHOLE


def open_table(arguments: argparse.Namespace) -> ResultTable:
    """Open the table, with the finished runs if the experiment is resumed."""
    size, path = size_of(arguments), arguments.out / "bandit.csv"
    return ResultTable(path, size.columns, size.task, resume=arguments.resume)


def open_curves(arguments: argparse.Namespace) -> ResultTable:
    """Open the curves, with those of the finished runs if the experiment is resumed."""
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
    # Unlike np.exp, math.exp rounds equally on all processors.
    norms = [math.exp(1.5 * value) for value in rng.standard_normal(2 * LAYERS).tolist()]
    return np.array(norms[:LAYERS]), np.array(norms[LAYERS:])


def run(rule: Rule, seed: int, steps: int) -> Curve:
    """Return the cost above the optimum at every step of one run; 0.5 is 50 %."""
    bandit = Bandit(np.ones(LAYERS), SHARE * LAYERS, P_MIN, rule)
    excess = []
    for part, norms in enumerate(norms_of(seed)):
        # p of the optimum is clip(const |g_d|, p_min, 1).
        best = kl_project([math.log(norm) for norm in norms.tolist()], SHARE * LAYERS, P_MIN)
        minimum = (norms**2 / best).sum()
        for step in range(part * steps, (part + 1) * steps):
            excess.append((norms**2 / bandit.p).sum() / minimum - 1)
            if rule is not None:
                bandit.update(sample(bandit.p, Key(seed, step)), norms)
    return np.array(excess)


def cells_of(excess: Curve) -> list[object]:
    """Return the last cells of a row of the table."""
    first, second = np.split(excess, 2)
    within = np.flatnonzero(first < 0.02)
    return [
        *(f"{first[-1]:.5f}", f"{first.mean():.5f}"),
        int(within[0]) if within.size else "never",
        *(f"{second[-1]:.5f}", f"{second.mean():.5f}"),
    ]


def summary(table: Path) -> dict[str, dict[str, Spread]]:
    """Return the spread over the seeds for each form.

    "before" and "after" are the excess costs at the last step before and after the change of norms.
    "steps" are the steps to 2 %, and are there only if all seeds reach it.
    """
    found: dict[str, dict[str, Spread]] = {}
    rows = read_csv(table)
    for form in dict.fromkeys(row["form"] for row in rows):
        of_form = [row for row in rows if row["form"] == form]
        ends = [name for name in rows[0] if name.startswith("excess_at_")]
        found[form] = {
            name: spread(float(row[column]) for row in of_form)
            for name, column in zip(("before", "after"), ends, strict=True)
        }
        steps = [row["steps_to_2_percent"] for row in of_form]
        if "never" not in steps:
            found[form]["steps"] = spread(map(int, steps))
    return found


def draw(table: Path, curves: Path, path: Path) -> None:
    """Draw excess cost and regret of all forms; only the best of the paper's has a color."""
    excess = mean_curves(curves)
    steps = BLOCK * np.arange(1, len(next(iter(excess.values()))) + 1)
    final = {form: numbers["before"].mean for form, numbers in summary(table).items()}
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


def mean_curves(curves: Path) -> dict[str, Curve]:
    """Return the excess cost of each form in each block of steps, as a mean over the seeds."""
    of_form: dict[str, list[list[float]]] = {}
    for row in read_csv(curves):
        blocks = [float(row[name]) for name in row if name.isdecimal()]
        of_form.setdefault(row["form"], []).append(blocks)
    return {form: np.mean(blocks, axis=0) for form, blocks in of_form.items()}


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
