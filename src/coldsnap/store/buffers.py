"""Buffers that model bytes pass through on their way to a digest.

They are mappings of their own, never heap: this code also runs inside an engine's process, where a freed heap block
keeps its bytes, and so would the image of that process.
"""

from __future__ import annotations

import mmap

__all__ = ["transit_buffer"]


def transit_buffer(num_bytes: int) -> memoryview:
    """``num_bytes`` of zeros to write to, at least one; given back to the kernel with the last view of it."""
    return memoryview(mmap.mmap(-1, max(1, num_bytes)))
