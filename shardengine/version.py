"""The library's version: of the package, in checkpoints, shown by the command. Knows nothing else."""

__version__ = "0.1.0"
