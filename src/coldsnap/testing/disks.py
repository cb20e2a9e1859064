"""A file system that is soon full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["small_disk"]


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """An empty file system of ``num_bytes`` at the new ``folder``, gone afterwards. Needs root."""
    folder.mkdir(mode=0o700)
    options = f"size={num_bytes},mode=700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "coldsnap-test", folder], check=True)  # noqa: S607
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)  # noqa: S607
