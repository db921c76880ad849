"""CRC-32 without the native library: isal's, an extra of this package, or zlib's. The same sums.

Must not know: what is summed.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32

    FASTEST = True
except ImportError:
    from zlib import crc32

    FASTEST = False

__all__ = ["FASTEST", "crc32"]
