"""Tests of shardengine/kernels. They need no ranks, so `make test` runs them beside the others."""
