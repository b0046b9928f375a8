"""JointSpar: skip whole layers, in the backward pass and on the wire."""

from torchcomp.jointspar.bandit import Bandit, Baseline, Literal, kl_project, sample
from torchcomp.jointspar.jointspar import JointSpar
from torchcomp.jointspar.lars import LARS, Sampling
from torchcomp.jointspar.layers import default_layers
from torchcomp.jointspar.sampler import Sampler, SamplingOptions

__all__ = ["LARS", "Bandit", "Baseline", "JointSpar", "Literal", "Sampler"]
__all__ += ["Sampling", "SamplingOptions", "default_layers", "kl_project", "sample"]
