"""One file of tensors, written as a stream, with a checksum of every chunk. The form is safetensors.

Must not know: engines, parameters, what the tensors mean.

[Note: Checksums] Every file is cut into chunks of ``CHUNK_BYTES``, and the index keeps a CRC-32 of each. So a rank that
needs a part of a file verifies that part, and no more. A checksum finds damage; it is no signature.

[Note: Streaming] A few blocks: while some are on their way to the disk, past the page cache where the file system can
do that (O_DIRECT), the next is filled and its checksums are taken. So the disk does not wait for the processor, unless
its checksums are the slower of the two.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardengine.errors import UsageError
from shardengine.kernels import crc32
from shardengine.offload import direct_io, staging

CHUNK_BYTES = 1 << 20
_BLOCK_CHUNKS = 4
_BLOCKS = 6
"""Of a writer: one is filled, the others are being written."""
_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _CODES}
"""The dtypes that can be written, by the names that an index uses."""


@dataclass(frozen=True)
class Written:
    """A finished file: its size, a CRC-32 per chunk, where each tensor begins (bytes from the start of the file)."""

    bytes: int
    chunks: list[int]
    offsets: dict[str, int]


def header_of(
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: dict[str, str] | None = None
) -> tuple[bytes, dict[str, int], int]:
    """The head of a safetensors file: (its bytes, where each tensor begins, size of the whole file).

    Tensors lie in the given order without gaps; the head is padded, so that the first one starts at a page.
    """
    header: dict[str, Any] = {}
    offset = 0
    for key, dtype, shape in tensors:
        if dtype not in _CODES:
            raise UsageError(f"{key}: tensors of {dtype} cannot be written as safetensors")
        end = offset + math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header if metadata is None else {"__metadata__": metadata, **header}).encode()
    text += b" " * (-(8 + len(text)) % direct_io.ALIGNMENT)
    start = 8 + len(text)
    offsets = {key: start + row["data_offsets"][0] for key, row in header.items()}
    return len(text).to_bytes(8, "little") + text, offsets, start + offset


def write(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> Written:
    """Write a new safetensors file and fsync it. The tensors may be views of anything and lie on any device."""
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())  # every tensor then starts aligned
    head, offsets, total = header_of([(key, tensor.dtype, tensor.shape) for key, tensor in ordered])
    with Stream(path, total) as stream:
        stream.put(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        for _, tensor in ordered:
            stream.put(tensor.detach().reshape(-1).contiguous().view(torch.uint8))
    return Written(total, stream.chunks, offsets)


class Stream:
    """A new file that bytes are appended to ([Note: Streaming]); whole and durable when its ``with`` ends."""

    def __init__(self, path: Path, size: int = 0) -> None:
        """size: bytes that will be appended, where that is known: their room on the disk is taken at once."""
        self.chunks: list[int] = []
        self._blocks = list(staging(_BLOCKS * _BLOCK_CHUNKS * CHUNK_BYTES).chunk(_BLOCKS))
        self._file = direct_io.open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            direct_io.take_room(self._file, size)
        except OSError:
            os.close(self._file)
            raise
        self._filled = 0
        self._written = 0
        self._threads = ThreadPoolExecutor(_BLOCKS - 1)
        self._under_way: list[Future[None]] = []

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            if kind is None:
                if self._filled % CHUNK_BYTES:
                    self._sum(self._filled - self._filled % CHUNK_BYTES)
                self._flush()
                self._finish(0)
                os.ftruncate(self._file, self._written)
                os.fsync(self._file)
        finally:
            self._threads.shutdown()
            os.close(self._file)

    def put(self, data: Tensor) -> None:
        """Append ``data``: uint8 [bytes], on any device."""
        start = 0
        while start < data.numel():
            block = self._blocks[0]
            count = min(data.numel() - start, CHUNK_BYTES - self._filled % CHUNK_BYTES)
            block[self._filled : self._filled + count].copy_(data[start : start + count])
            start, self._filled = start + count, self._filled + count
            if self._filled % CHUNK_BYTES == 0:
                self._sum(self._filled - CHUNK_BYTES)
            if self._filled == block.numel():
                self._flush()

    def _sum(self, start: int) -> None:
        """Take the checksum of the chunk that was filled last, while it is still in the processor's cache."""
        self.chunks.append(crc32(direct_io.bytes_of(self._blocks[0][start : self._filled])))

    def _flush(self) -> None:
        count, block = self._filled, direct_io.bytes_of(self._blocks[0])
        self._finish(_BLOCKS - 2)
        write = partial(direct_io.write, self._file, [block[: direct_io.whole_pages(count)]], self._written)
        try:
            self._under_way.append(self._threads.submit(write))
        except RuntimeError:  # the process is ending: it waits for threads that are there and lets nobody start one
            write()
        self._written, self._filled = self._written + count, 0
        self._blocks.append(self._blocks.pop(0))

    def _finish(self, left: int) -> None:
        """Wait until only ``left`` blocks are being written."""
        while len(self._under_way) > left:
            self._under_way.pop(0).result()
