"""The flags that all parts of the experiment have."""

import argparse
from pathlib import Path

from recipes.experiments import ExperimentParser

HOME = Path(__file__).resolve().parent
SEEDS = (0, 1, 2, 3, 4, 5, 6, 7)
QUICK_SEEDS = (0,)


def part_parser(description: str | None, seeds: tuple[int, ...] = SEEDS) -> ExperimentParser:
    """Return a parser with the common flags; its help is the first line of a docstring."""
    summary = (description or "").splitlines()[0]
    return ExperimentParser(summary, HOME, seeds=seeds, quick_seeds=QUICK_SEEDS)


def parse_common(description: str | None, words: list[str]) -> argparse.Namespace:
    """Parse the flags of a part that has only the common ones."""
    parser = part_parser(description)
    parsed = parser.read(words)
    parsed.out = parser.output_folder(parsed)
    return parsed
