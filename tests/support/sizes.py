"""How long a flat storage must be: what the formulas of memory and traffic share. Must not know: layout.py."""

from __future__ import annotations

ALIGN_BYTES = 64


def padded(counts: list[int], ranks: int, itemsize: int = 4) -> int:
    """Elements of one flat storage: every parameter starts at a multiple of 64 bytes, the end is one of 64 · ranks."""
    align = ALIGN_BYTES // itemsize
    filled = sum(-(-count // align) * align for count in counts)
    return -(-filled // (align * ranks)) * align * ranks
