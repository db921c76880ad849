"""Tests of the Triton kernels that run under Triton's interpreter, in processes of their own: tests/test_triton.py."""
