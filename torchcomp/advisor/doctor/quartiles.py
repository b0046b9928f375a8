"""Quartiles of a few measurements."""

from collections.abc import Sequence


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the values that a quarter, and three quarters, of all values do not exceed."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[(3 * len(ordered) - 1) // 4]
