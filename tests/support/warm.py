"""Loads the compiled kernels, by using them. Ranks are forked from a process that imports this."""

import torch

import torchcomp

torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
_tensors = {"w": torch.ones(100)}
for _spec in ("ef(topk(0.1))", 'ef(topk(0.1, values="int8"))'):
    torchcomp.run_in_process(
        1, lambda exchange: torchcomp.Averager(_spec, exchange, _tensors).average_all(_tensors)
    )
