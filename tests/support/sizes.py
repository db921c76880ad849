"""How long a flat storage must be: what the formulas of memory and traffic share. Must not know: layout.py."""

from __future__ import annotations

ALIGN_BYTES = 64
"""On a CPU."""
ALIGN_BYTES_APART = 256
"""On a device with a memory of its own."""


def padded(counts: list[int], ranks: int, itemsize: int = 4, align_bytes: int = ALIGN_BYTES) -> int:
    """Elements of one flat storage: every parameter starts at a multiple of ``align_bytes``, the end is one of
    ``align_bytes`` · ranks."""
    align = align_bytes // itemsize
    filled = sum(-(-count // align) * align for count in counts)
    return -(-filled // (align * ranks)) * align * ranks
