"""Checkpoints of other libraries: read into ours, and ours written for them."""
