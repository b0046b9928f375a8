"""Kernels: the inner loops, each as plain torch and, where it pays, as Numba and Triton.

All forms of a kernel give the same result bit for bit, so which one runs is a matter of speed.
"""
