"""Tests of the Triton kernels in Triton's interpreter. tests/kernels/test_triton.py runs them."""
