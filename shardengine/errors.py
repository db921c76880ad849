"""The exception tree. Owns: every exception class of the library. Knows nothing else.

    ShardEngineError                 catch this to catch all of them
    ├── ConfigError  (ValueError)    the JSON config is wrong; lists every problem of the file at once
    ├── UsageError   (RuntimeError)  the library was called in a way it cannot serve (model, optimizer, order of calls)
    ├── MismatchError (RuntimeError) ranks disagree about model, config or order of collectives; names the ranks
    │   └── EarlyTerminationError     … or have unequal numbers of batches, inside a join that asks for this error
    ├── CheckpointError (RuntimeError) a checkpoint is missing, damaged, or could not be written
    ├── OffloadError (RuntimeError)   states that rest on a disk cannot be read or written, or came back changed
    ├── NonfiniteGradientError (RuntimeError)  gradients hold Inf or NaN; names the first parameters
    │   └── LossScaleError            … in fp16, although the loss scale is at its smallest
    ├── CommunicationError (RuntimeError)  a collective failed or timed out; names operation, bucket, parameters, rank
    └── InternalError (AssertionError)     an invariant of ours broke: a bug in shardengine, please report it

A message names the expected and the given value, and the remedy. ``error.code`` is a short name of the kind of error,
such as "join-nested". It stays the same when the message is reworded; docs/troubleshooting.md lists the codes.
"""

from __future__ import annotations

_names: dict[str, str] = {}


def call_by(names: dict[str, str]) -> None:
    """Replace our names by ``names`` in every later message of this process.

    Another interface calls it, whose user does not see the engine.
    """
    _names.update(names)


class ShardEngineError(Exception):
    """Base class of every exception that shardengine raises on purpose. code: names the kind of error, "" for none."""

    def __init__(self, *args: object, code: str = "") -> None:
        super().__init__(*args)
        self.code = code

    def __str__(self) -> str:
        text = super().__str__()
        for ours, theirs in _names.items():
            text = text.replace(ours, theirs)
        return text


class ConfigError(ShardEngineError, ValueError):
    """The JSON config cannot be used. ``problems`` holds one sentence per problem found."""

    def __init__(self, problems: list[str] | str, source: str = "config") -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        self.source = source
        count = len(self.problems)
        head = f"{source}: {count} problem{'s' if count != 1 else ''}"
        super().__init__("\n".join([head, *(f"  - {problem}" for problem in self.problems)]), code="config-invalid")


class UsageError(ShardEngineError, RuntimeError):
    """The library was called in a way that it cannot serve; the message says what to do instead."""


class MismatchError(ShardEngineError, RuntimeError):
    """Ranks disagree about the model, the config or the order of collectives."""


class EarlyTerminationError(MismatchError):
    """Some ranks ran out of data before others inside of ``engine.join(throw_on_early_termination=True)``."""


class CommunicationError(ShardEngineError, RuntimeError):
    """A collective failed or timed out."""


class NonfiniteGradientError(ShardEngineError, RuntimeError):
    """Gradients hold Inf or NaN, and the config makes this, or a number of such steps in a row, an error."""


class LossScaleError(NonfiniteGradientError):
    """Gradients are not finite although the loss scale is at its minimum."""


class CheckpointError(ShardEngineError, RuntimeError):
    """A checkpoint is missing or damaged, or could not be written."""


class OffloadError(ShardEngineError, RuntimeError):
    """The file of offloaded states cannot be made, read or written, or its bytes are not those that were written."""


class InternalError(ShardEngineError, AssertionError):
    """An invariant of the library broke. This is a bug in shardengine, not in the caller's code."""
