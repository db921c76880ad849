"""Tests of the Triton kernels under Triton's interpreter; ``tests/kernels/test_triton.py`` runs them."""
