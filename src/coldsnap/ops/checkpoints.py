"""Is the pinned checkpoint of a recovery there? Looked at while everything still runs.

The worker compares headers and bytes once more as they arrive (``engines/recovery.py``). Here a restore that would
fail is refused before it has ended the service it was to replace; where there is none to lose, the headers are enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from coldsnap.core.manifest import RecoveryManifest
from coldsnap.engines.recovery import check_checkpoint, prove_bytes
from coldsnap.ops.places import MountLike, outside

__all__ = ["check_pinned_checkpoint", "outside"]


def check_pinned_checkpoint(
    manifest: RecoveryManifest, folder: Path, mounts: Iterable[MountLike], *, read_all: bool
) -> None:
    """Compare the headers of the checkpoint a unit with these mounts sees at ``folder``; with ``read_all`` all bytes.

    Raises IntegrityError naming what differs, UserError without a folder.
    """
    place = outside(folder, mounts)
    check_checkpoint(manifest, place)
    if read_all:
        prove_bytes(manifest, place)
