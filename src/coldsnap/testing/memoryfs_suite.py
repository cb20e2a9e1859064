"""The promises of ``capsule.memoryfs.MemoryFs``, which every implementation keeps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coldsnap.capsule.memoryfs import MemoryFs
from coldsnap.errors import HostError

__all__ = ["check_memory_fs"]


def check_memory_fs(fs: MemoryFs, folder: Path) -> None:
    """The contract. ``folder`` is an empty private folder."""
    found = fs.memory()
    assert 0 < found.available_bytes <= found.total_bytes
    cached = fs.cached_fraction(Path(__file__))
    assert cached is None or 0 <= cached <= 1
    assert not fs.is_mounted(folder)
    fs.mount(folder, num_bytes=5 << 20)
    assert fs.is_mounted(folder)
    (folder / "file").write_bytes(bytes(5 << 20))
    fs.mount(folder, num_bytes=5 << 20)
    assert (folder / "file").stat().st_size == 5 << 20, "mounting again hides nothing"
    fs.unmount(folder)
    assert not folder.exists()
    assert not fs.is_mounted(folder)
    fs.unmount(folder)
    with pytest.raises(HostError, match=re.escape(str(folder))):
        fs.mount(folder, num_bytes=1)
