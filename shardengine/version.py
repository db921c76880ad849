"""The library's version: written into checkpoints, shown by the command. Knows nothing else."""

__version__ = "0.1.0"
