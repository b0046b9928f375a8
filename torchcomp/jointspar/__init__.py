"""JointSpar: skip whole layers, in the backward pass and on the wire."""

from torchcomp.jointspar.jointspar import JointSpar
from torchcomp.jointspar.stats import JointSparStats

__all__ = ["JointSpar", "JointSparStats"]
