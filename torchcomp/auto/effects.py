"""Measured effects of methods on the accuracy of a trained model."""

from collections.abc import Mapping

EFFECTS: Mapping[str, float] = {
    "mean": 0.0,
    'mean(cast("bf16"))': 0.11,
    'bidirectional(topk(0.01, values="int8"), topk(0.01, values="int8"))': -0.11,
    'ef(topk(0.01, values="int8"))': -0.22,
    'bidirectional(topk(0.001, values="int8"), topk(0.001, values="int8"))': -0.33,
    "ef(topk(0.01))": -0.50,
    "powersgd(1)": -0.72,
    'bidirectional(topk(0.01, values="int8"), topk(0.01, values="int8"), selection="exact")': -0.72,
}
"""Final accuracy minus that of plain DDP, in percentage points, by method.

Means over 5 seeds; the standard error is up to 0.27. From "Final accuracy" in docs/performance.md:
a small CNN on the digits, 4 ranks, each method with its own learning rate. ``cast("bf16")`` has
the value of PyTorch's bf16 hook. Another model or task can lose more.
"""


def loss_of(method: str) -> float | None:
    """Return the percentage points that a method has lost at most; None if it was not measured."""
    effect = EFFECTS.get(method)
    return None if effect is None else max(0.0, -effect)
