"""Write one file of tensors as a stream, with a checksum of every chunk. The format is safetensors.

Must not know: engines, parameters, the meaning of the tensors.

[Note: Checksums] Every file is cut into chunks of ``CHUNK_BYTES``, and the index keeps a CRC-32 of each. So a rank that
needs a part of a file verifies only the chunks of that part. A checksum detects damage; it is no signature.

[Note: Streaming] A writer has a few blocks. While some are written to disk, bypassing the page cache if the file system
can (O_DIRECT), the next block is filled and its checksums are computed. So the disk does not wait for the processor,
unless the checksums are slower than the disk. Tensors on a device with memory of its own are copied directly to the
blocks, which are page-locked then, one chunk ahead: the checksum of a chunk is computed while the next one arrives.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardengine.errors import UsageError
from shardengine.kernels import crc32
from shardengine.offload import HOST, Done, Platform, direct_io

CHUNK_BYTES = 1 << 20
_BLOCK_CHUNKS = 4
_BLOCKS = 6
"""Blocks of a writer: one is filled, the others are being written."""
_ON_HOST = Platform(HOST)
_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _CODES}
"""The dtypes that can be written, by the names that an index uses."""


@dataclass(frozen=True)
class Written:
    """A finished file: its size, a CRC-32 per chunk, the offset of each tensor (bytes from the start of the file)."""

    bytes: int
    chunks: list[int]
    offsets: dict[str, int]


def header_of(
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: dict[str, str] | None = None
) -> tuple[bytes, dict[str, int], int]:
    """Return the header of a safetensors file: (its bytes, the offset of each tensor, size of the whole file).

    Tensors follow in the given order without gaps; the header is padded so that the first one starts at a page.
    """
    header: dict[str, Any] = {}
    offset = 0
    for key, dtype, shape in tensors:
        if dtype not in _CODES:
            raise UsageError(
                f"{key}: tensors of {dtype} cannot be written as safetensors", code="save-dtype-not-in-safetensors"
            )
        end = offset + math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header if metadata is None else {"__metadata__": metadata, **header}).encode()
    text += b" " * (-(8 + len(text)) % direct_io.ALIGNMENT)
    start = 8 + len(text)
    offsets = {key: start + row["data_offsets"][0] for key, row in header.items()}
    return len(text).to_bytes(8, "little") + text, offsets, start + offset


def write(path: Path, tensors: Sequence[tuple[str, Tensor]], platform: Platform = _ON_HOST) -> Written:
    """Write a new safetensors file and fsync it. tensors: may be views, on the device of ``platform`` or the host."""
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())  # every tensor then starts aligned
    head, offsets, total = header_of([(key, tensor.dtype, tensor.shape) for key, tensor in ordered])
    with Stream(path, total, platform) as stream:
        stream.put(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        for _, tensor in ordered:
            stream.put(tensor.detach().reshape(-1).contiguous().view(torch.uint8))
    return Written(total, stream.chunks, offsets)


class _Chunk(NamedTuple):
    """Bytes [start, end) of ``block``. copies: for each copy into it that is in flight, its end and its source."""

    block: Tensor
    start: int
    end: int
    copies: list[tuple[Done, Tensor]]


class Stream:
    """A new file that bytes are appended to ([Note: Streaming]); complete and durable when its ``with`` ends."""

    def __init__(self, path: Path, size: int = 0, platform: Platform = _ON_HOST) -> None:
        """Create the file at ``path``.

        size: bytes that will be appended, 0 if unknown; disk space for them is reserved at once · platform: that of the
        device that holds the data.
        """
        self.chunks: list[int] = []
        self._ahead = int(platform.has_own_memory)
        count = _BLOCKS + self._ahead
        self._blocks = list(platform.host_buffer(count * _BLOCK_CHUNKS * CHUNK_BYTES, pinned=True).chunk(count))
        self._stream = platform.saves
        self._copies: list[tuple[Done, Tensor]] = []
        """Copies in flight to the chunk that is being filled."""
        self._arriving: deque[_Chunk] = deque()
        """Chunks whose checksums are not computed yet."""
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
                    self._end_chunk()
                self._conclude(0)
                self._flush(self._blocks[0], self._filled)
                self._finish(0)
                os.ftruncate(self._file, self._written)
                os.fsync(self._file)
        finally:
            try:
                for copies in (*(chunk.copies for chunk in self._arriving), self._copies):
                    _await(copies)
            finally:
                self._threads.shutdown()
                os.close(self._file)

    def put(self, data: Tensor) -> None:
        """Append ``data``: uint8 [bytes], on the device or the host. It must not change until the ``with`` ends."""
        start = 0
        while start < data.numel():
            count = min(data.numel() - start, CHUNK_BYTES - self._filled % CHUNK_BYTES)
            place = self._blocks[0][self._filled : self._filled + count]
            end = self._stream.copy(data[start : start + count], place)
            if not end.reached:
                self._copies.append((end, data))
            start, self._filled = start + count, self._filled + count
            if self._filled % CHUNK_BYTES == 0:
                self._end_chunk()
                self._conclude(self._ahead)

    def _end_chunk(self) -> None:
        """End the chunk that is being filled, after all copies to it have begun, and start the next one."""
        block, start = self._blocks[0], (self._filled - 1) // CHUNK_BYTES * CHUNK_BYTES
        self._arriving.append(_Chunk(block, start, self._filled, self._copies))
        self._copies = []
        if self._filled == block.numel():
            self._blocks.append(self._blocks.pop(0))
            self._filled = 0

    def _conclude(self, left: int) -> None:
        """Wait for all chunks but the last ``left``, compute their checksums, and write full blocks."""
        while len(self._arriving) > left:
            block, start, end, copies = self._arriving[0]
            _await(copies)
            self.chunks.append(crc32(direct_io.bytes_of(block[start:end])))  # while it is in the processor's cache
            self._arriving.popleft()
            if end == block.numel():
                self._flush(block, end)

    def _flush(self, block: Tensor, count: int) -> None:
        """Start writing the first ``count`` bytes of ``block``."""
        self._finish(_BLOCKS - 2)
        pages = direct_io.bytes_of(block)[: direct_io.whole_pages(count)]
        write = partial(direct_io.write, self._file, [pages], self._written)
        try:
            self._under_way.append(self._threads.submit(write))
        except RuntimeError:  # a process that is ending waits for running threads, but starts no new ones
            write()
        self._written += count

    def _finish(self, left: int) -> None:
        """Wait until only ``left`` blocks are being written."""
        while len(self._under_way) > left:
            self._under_way.pop(0).result()


def _await(copies: Sequence[tuple[Done, Tensor]]) -> None:
    for end, _ in copies:
        end.wait_on_host()
