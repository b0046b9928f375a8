"""Kernels: the inner loops. Each exists in plain torch and, where it pays, in Numba or Triton.

All forms of a kernel give the same result bit for bit. Choosing one affects only the speed.
"""
