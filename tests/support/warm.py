"""Compile or load the kernels, by using them once.

The fork server imports this module, so the ranks that it forks start with compiled kernels.
"""

import torch

import torchcomp


def _use(spec: str) -> None:
    tensors = {"w": torch.ones(100)}
    torchcomp.run_in_process(
        1, lambda exchange: torchcomp.Averager(spec, exchange, tensors).average_all(tensors)
    )


torch.set_num_threads(1)  # OpenMP threads do not survive a fork: the child would hang
_use("ef(topk(0.1))")
_use('ef(topk(0.1, values="int8"))')
