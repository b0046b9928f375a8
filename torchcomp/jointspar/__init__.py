"""JointSpar: skip whole layers, in the backward pass and on the wire."""

from torchcomp.jointspar.bandit import (
    Bandit,
    Baseline,
    Literal,
    best_probabilities,
    kl_project,
    sample,
)
from torchcomp.jointspar.jointspar import JointSpar
from torchcomp.jointspar.lars import LARS, Sampling
from torchcomp.jointspar.layers import Layers, check_several, default_layers, layers_by_pattern
from torchcomp.jointspar.sampler import Sampler, SamplingOptions
from torchcomp.jointspar.stats import JointSparStats

__all__ = [
    "LARS",
    "Bandit",
    "Baseline",
    "JointSpar",
    "JointSparStats",
    "Layers",
    "Literal",
    "Sampler",
    "Sampling",
    "SamplingOptions",
    "best_probabilities",
    "check_several",
    "default_layers",
    "kl_project",
    "layers_by_pattern",
    "sample",
]
