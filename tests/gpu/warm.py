"""Compile the kernels of all methods once: later processes find them in the cache on disk.

Without this, several files of tests, with several ranks each, would compile the same at once.
"""

import torch

import torchcomp
from tests.gpu.place import DEVICE
from tests.support.models import CONSERVING, METHODS
from torchcomp.aggregators.rehearsal import rehearse

# The dtypes of most tests first, as the time may end before all are compiled.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

if __name__ == "__main__":
    for dtype in DTYPES:
        for spec in dict.fromkeys((*METHODS, *CONSERVING)):
            rehearse(torchcomp.parse(spec).rehearsed, dtype, DEVICE)
