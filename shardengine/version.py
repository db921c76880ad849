"""The version of the library, for the package, checkpoints and the command. Knows nothing else."""

__version__ = "0.1.0"
