"""Read pickles of other programs without running their code: an allow-list, inert stand-ins, rejection of other names.

Owns: the globals that a pickle may name. ``load_torch`` is torch's own reader of tensors, with stand-ins for classes of
DeepSpeed. ``load_plain`` is Python's unpickler, for files that torch's cannot read, with stand-ins for everything but
``torch.Size``, ``OrderedDict`` and dtypes. Must not know: the meaning of the files.

A stand-in takes any arguments and any state, and does nothing with them. Its class is sealed, because a pickle can set
attributes of the objects that it names. It could otherwise change a class (or a function's defaults) for the process.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch

from shardengine.errors import CheckpointError, UsageError

_BAD_PICKLE = (
    pickle.UnpicklingError, EOFError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError,
    AssertionError, OverflowError, MemoryError, ImportError, OSError,
)  # fmt: skip
"""Exceptions that unpicklers and torch raise for a file that is truncated, damaged or malicious."""

DEEPSPEED = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig",
    "deepspeed.runtime.fp16.loss_scaler.LossScaleProfile",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""Classes whose instances DeepSpeed writes into its checkpoints."""

_METADATA = "torch.distributed.checkpoint.metadata"
DCP = (
    *(f"{_METADATA}.{name}" for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local")
      for name in ("Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")),
)  # fmt: skip
"""Classes, and one function, that torch.distributed.checkpoint writes into its ``.metadata``."""

_VALUES: dict[str, Any] = {
    "torch.Size": torch.Size,
    "collections.OrderedDict": OrderedDict,
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
}
"""Globals that a plain pickle gets unchanged: C types and dtypes, whose attributes cannot be set."""


class _Sealed(type):
    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"a pickle may not set {name} of a class")


class Inert(metaclass=_Sealed):
    """A stand-in for an instance of a class that is not loaded; keeps its arguments and state from the pickle."""

    __slots__ = ("args", "state")
    stands_for = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        """Keep the arguments."""
        made = object.__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def __setstate__(self, state: Any) -> None:
        """Keep the state."""
        self.state = state

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute from the state in the pickle."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default

    def __hash__(self) -> int:
        """Hash the contents, so that a stand-in can be a dict key like the original."""
        return hash((type(self), repr(self.args), repr(self.state)))

    def __eq__(self, other: object) -> bool:
        """Return whether class, arguments and state are equal."""
        return isinstance(other, Inert) and (type(self), self.args, self.state) == (
            type(other), other.args, other.state)  # fmt: skip


def stand_ins(names: Iterable[str]) -> dict[str, type[Inert]]:
    """Return full name → stand-in class."""
    return {name: _made(name) for name in names}


def _made(name: str) -> type[Inert]:
    made: Any = _Sealed(name.rpartition(".")[2], (Inert,), {"__slots__": (), "stands_for": name})
    return cast(type[Inert], made)


_DEEPSPEED = stand_ins(DEEPSPEED)
_PLAIN: dict[str, Any] = {**_VALUES, **stand_ins(DCP)}


def load_torch(path: Path) -> Any:
    """Load a file of ``torch.save``, with memory-mapped tensors and inert stand-ins for DeepSpeed's classes.

    ``UsageError``: the file names another class or function. ``CheckpointError``: it is missing or damaged.
    """
    require_file(path)
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path} is cut off, damaged or no file of torch.save (expected a zip archive)", code="import-damaged"
        )
    allowed: list[Any] = [(stand_in, name) for name, stand_in in _DEEPSPEED.items()]
    with torch.serialization.safe_globals(allowed):
        try:
            unknown = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        except _BAD_PICKLE as error:
            raise _damaged(path, error) from None
        if unknown:
            raise refusal(path, sorted(unknown))
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except _BAD_PICKLE as error:
            raise _damaged(path, error) from None


def load_plain(path: Path) -> Any:
    """Load a file of ``pickle.dump``, with stand-ins (``DCP``) for classes. Errors as ``load_torch``."""
    require_file(path)
    with path.open("rb") as file:
        try:
            return _Plain(file, path).load()
        except UsageError:
            raise
        except _BAD_PICKLE as error:
            raise _damaged(path, error) from None


def require_file(path: Path) -> None:
    """Raise ``CheckpointError`` unless ``path`` is a file."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing (or no file)", code="import-file-missing")


def refusal(path: Path | str, names: list[str]) -> UsageError:
    """Return the error for a file with names that are not allowed."""
    return UsageError(
        f"{path}: it names {', '.join(names)}, which no checkpoint needs that can be imported; nothing of it was run. "
        "Where your own training put such an object into the checkpoint, save it again without",
        code="import-unsafe-object",
    )


def _damaged(path: Path, error: BaseException) -> CheckpointError:
    lines = str(error).strip().splitlines()
    text = lines[0][:200] if lines else ""
    return CheckpointError(
        f"{path} cannot be read, it is cut off or damaged ({type(error).__name__}: {text})", code="import-damaged"
    )


class _Plain(pickle.Unpickler):
    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Return the allowed object or stand-in of a global; UsageError for any other name."""
        full = f"{module}.{name}"
        if full not in _PLAIN:
            raise refusal(self._path, [full])
        return _PLAIN[full]
