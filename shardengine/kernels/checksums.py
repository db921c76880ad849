"""CRC-32 without the native library: from isal, an extra of this package, or from zlib, with the same results.

Must not know: the meaning of the bytes.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32

    FASTEST = True
except ImportError:
    from zlib import crc32

    FASTEST = False

__all__ = ["FASTEST", "crc32"]
