"""CRC-32 where the native library has no fast one: isal's, an extra of this package, or zlib's. The same sums.

Must not know: what is summed.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
