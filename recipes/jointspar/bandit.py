"""The two forms of Algorithm 1 on layers with fixed norms that change once.

    python -m recipes.jointspar.bandit        # half a minute

54 layers with log-normal norms (sigma 1.5), S = 32.4 layers a step, p_min = 0.0125; after 5,000
steps the norms are drawn again. The cost of p is sum |g_d|^2 / p_d. The literal form is shown with
the best of a grid of step sizes, chosen in hindsight. Writes ``bandit.csv`` and ``bandit.png``.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recipes.errors import told_in_one_line
from recipes.result_files import make_folder, pyplot, save_figure, write_csv
from torchcomp.jointspar import (
    Bandit,
    Baseline,
    Literal,
    best_probabilities,
    sample,
)
from torchcomp.keys import Key

LAYERS, SHARE, P_MIN = 54, 0.6, 0.0125
STEPS = 5000
ALPHAS = (0.003, 0.01, 0.03)
# In units of p_min^3 / L^2, where the exponent of a kept layer at p_min is about 1.
LITERAL_ALPHAS = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)
SEEDS = 5

Curve = NDArray[np.float64]


@dataclass(frozen=True)
class Result:
    """Excess cost over the optimum's at every step, mean over the seeds; 0.5 is 50 %."""

    name: str
    excess: Curve


def norms_of(seed: int) -> tuple[Curve, Curve]:
    """Norms before and after the change."""
    rng = np.random.default_rng(seed)
    before, after = np.exp(1.5 * rng.standard_normal((2, LAYERS)))
    return before, after


def run(rule: Baseline | Literal | None, seed: int) -> Curve:
    """The excess of one run."""
    bandit = Bandit(np.ones(LAYERS), SHARE * LAYERS, P_MIN, rule)
    excess = []
    for part, norms in enumerate(norms_of(seed)):
        best = best_probabilities(norms, SHARE * LAYERS, P_MIN)
        least = (norms**2 / best).sum()
        for step in range(part * STEPS, (part + 1) * STEPS):
            excess.append((norms**2 / bandit.p).sum() / least - 1)
            if rule is not None:
                bandit.update(sample(bandit.p, Key(seed, step)), norms)
    return np.array(excess)


def literal(alpha: float, seed: int) -> Literal:
    """The literal form, told the least bound that holds, with a step size in natural units."""
    bound = float(np.max(norms_of(seed)))
    return Literal(alpha * P_MIN**3 / bound**2, bound)


def measure() -> list[Result]:
    """All curves, the literal form with its best step size last."""
    found = [Result("uniform", _mean([run(None, seed) for seed in range(SEEDS)]))]
    for alpha in ALPHAS:
        curves = [run(Baseline(alpha), seed) for seed in range(SEEDS)]
        found.append(Result(f"baseline, alpha {alpha:g}", _mean(curves)))
    tried = [
        Result(
            f"literal, alpha {alpha:g}", _mean([run(literal(alpha, s), s) for s in range(SEEDS)])
        )
        for alpha in LITERAL_ALPHAS
    ]
    return [*found, *tried]


def _mean(curves: list[Curve]) -> Curve:
    mean: Curve = np.mean(curves, axis=0)
    return mean


def rows_of(results: list[Result]) -> list[list[object]]:
    """What the table says of each curve."""
    rows: list[list[object]] = []
    for result in results:
        first, second = result.excess[:STEPS], result.excess[STEPS:]
        within = np.flatnonzero(first < 0.02)
        row: list[object] = [result.name, f"{first[-1]:.4f}", f"{first.mean():.4f}"]
        row += [int(within[0]) if within.size else "never"]
        row += [f"{second[-1]:.4f}", f"{second.mean():.4f}"]
        rows.append(row)
    return rows


def draw(results: list[Result], path: Path) -> None:
    """Excess and regret of uniform p, the baseline form, and the best of the literal form."""
    forms = [r for r in results if not r.name.startswith("literal")]
    tried = [r for r in results if r.name.startswith("literal")]
    best = min(tried, key=lambda r: r.excess.mean())
    figure, axes = pyplot().subplots(1, 2, figsize=(13, 4.8), layout="constrained")
    for result in [*forms, *tried]:
        faint = result in tried and result is not best
        label = None if faint else result.name + (" (best)" if result is best else "")
        style = {"color": "0.8", "linewidth": 0.8} if faint else {"label": label}
        if result.name == "uniform":
            style |= {"color": "black", "linestyle": "--", "zorder": 5}
        axes[0].plot(100 * (_smooth(result.excess) if faint else result.excess), **style)
        axes[1].plot(np.cumsum(result.excess), **style)
    axes[0].axhline(2, color="black", linestyle=":", linewidth=1, label="2 %")
    axes[0].set_yscale("log")
    axes[0].set_ylabel("cost above the optimum, % (grey: means over 100 steps)")
    axes[1].set_ylabel("regret: excess summed over the steps")
    axes[1].set_yscale("log")
    for each in axes:
        each.axvline(STEPS, color="0.5", linewidth=0.8)
        each.set_xlabel(f"step (norms change at {STEPS:,}); grey: literal, other step sizes")
        each.grid(True, alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=6)
    save_figure(figure, path)


def _smooth(curve: Curve, width: int = 100) -> Curve:
    """Means over the steps before, for curves whose jumps would fill the picture."""
    sums = np.cumsum(curve)
    sums[width:] = sums[width:] - sums[:-width]
    smoothed: Curve = sums / np.minimum(np.arange(1, len(curve) + 1), width)
    return smoothed


@told_in_one_line()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    folder = Path(__file__).resolve().parent / "results"
    parser.add_argument("--out", type=Path, default=folder, help="folder of the files [results]")
    out = parser.parse_args().out
    make_folder(out)
    results = measure()
    header = ["form", "excess_at_5000", "mean_excess_to_5000", "steps_to_2_percent"]
    header += ["excess_at_10000", "mean_excess_from_5000"]
    rows = rows_of(results)
    for row in [header, *rows]:
        print("  ".join(f"{cell!s:>22}" for cell in row))
    write_csv(out / "bandit.csv", header, rows)
    draw(results, out / "bandit.png")


if __name__ == "__main__":
    main()
