"""The fixtures of the engine's tests: rank pools and the process that forks lives."""

from tests.conftest import forks, pools

__all__ = ["forks", "pools"]
