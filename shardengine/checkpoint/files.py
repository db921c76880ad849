"""Bytes on disk: safetensors files written as a stream, checksums, directories that appear whole or not at all.

Must not know: engines, parameters, what the bytes mean.

[Note: Atomic directories] A checkpoint is written into ``.tmp-<tag>``, files and directory are fsynced, and one rename
makes it ``<tag>``; then ``latest`` is replaced by another rename. Where the tag exists already, the old directory is
first renamed to ``.old-<tag>`` and removed at the end; ``recover`` puts it back if the program ended between the two
renames. So at every moment ``latest`` names a directory that is whole, or one that ``recover`` brings back.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardengine.errors import UsageError

LATEST = "latest"
_CHUNK_BYTES = 8 << 20
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip


def write_tensors(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
    """Write a safetensors file and fsync it; {"bytes", "sha256"} of what was written.

    The tensors are copied through one small buffer on the CPU: they may be views of anything and lie on any device.
    """
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())  # every tensor then starts aligned
    header: dict[str, Any] = {}
    offset = 0
    for key, tensor in ordered:
        if tensor.dtype not in _DTYPES:
            raise UsageError(f"{key}: tensors of {tensor.dtype} cannot be written as safetensors")
        end = offset + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    staging = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
    window = memoryview(staging.numpy())  # type: ignore[arg-type]  # its stubs do not say so
    with path.open("wb") as file:

        def put(data: Any) -> None:
            digest.update(data)
            file.write(data)

        put(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            raw = tensor.detach().reshape(-1).view(torch.uint8)
            for start in range(0, raw.numel(), _CHUNK_BYTES):
                part = raw[start : start + _CHUNK_BYTES]
                staging[: part.numel()].copy_(part)
                put(window[: part.numel()])
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": 8 + len(text) + offset, "sha256": digest.hexdigest()}


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write and fsync a text file beside ``path`` and move it there."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames and new files in ``path`` durable."""
    number = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems refuse it
            os.fsync(number)
    finally:
        os.close(number)


def begin(directory: Path, tag: str) -> Path:
    """The empty directory to write ``tag`` into; what killed runs left unfinished is removed."""
    directory.mkdir(parents=True, exist_ok=True)
    recover(directory, tag)
    for left in directory.glob(".tmp-*"):
        shutil.rmtree(left)
    work = _work(directory, tag)
    work.mkdir()
    return work


def finish(directory: Path, tag: str) -> Path:
    """Everything is written: ``tag`` appears, and ``latest`` names it ([Note: Atomic directories])."""
    work, target, old = _work(directory, tag), directory / tag, _old(directory, tag)
    sync_directory(work)
    if target.exists():
        target.rename(old)
    work.rename(target)
    sync_directory(directory)
    write_text(directory / LATEST, tag + "\n")
    shutil.rmtree(old, ignore_errors=True)
    return target


def abandon(directory: Path, tag: str) -> None:
    """Remove what was written so far; never raises."""
    shutil.rmtree(_work(directory, tag), ignore_errors=True)
    with suppress(OSError):
        recover(directory, tag)


def recover(directory: Path, tag: str) -> None:
    """End what a killed run began when it replaced ``tag``."""
    old = _old(directory, tag)
    if not old.exists():
        return
    if (directory / tag).exists():
        shutil.rmtree(old)
    else:
        old.rename(directory / tag)


def _work(directory: Path, tag: str) -> Path:
    return directory / f".tmp-{tag}"


def _old(directory: Path, tag: str) -> Path:
    return directory / f".old-{tag}"
