"""Benchmarks, run from the repository as ``python -m benchmarks.NAME``. Not part of the installed package."""
