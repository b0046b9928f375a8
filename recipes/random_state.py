"""The state of all global random generators, as plain values for a checkpoint."""

import random
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch."""
    random.seed(seed)
    # NumPy's global generator takes 32 bits only.
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Return the state of all global generators, for :func:`set_random_state`."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        # As a list, because torch.load(weights_only=True) refuses NumPy arrays.
        "numpy": (kind, keys.tolist(), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        # Asking for the state would initialize CUDA in a run that does not use it.
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set all global generators to a state that :func:`random_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
