"""The residual: every byte of a worker's stable allocations that is not in the pack, in address order.

Unlike the pack it belongs to one capture, so it is read once, its order is by address, and a damaged extent
shows in its CRC-32 beside the SHA-256 of the whole file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from coldsnap.core.digest import Digest
from coldsnap.core.extents import ResidualExtent, file_layout
from coldsnap.errors import UsageError
from coldsnap.store.assembly import CrcTally, assemble
from coldsnap.store.documents import publish_new
from coldsnap.store.faults import translated
from coldsnap.store.meter import Meter
from coldsnap.store.sources import ResidualSource, Source
from coldsnap.store.staging import stage_file

__all__ = ["ResidualSource", "StoredResidual", "WrittenResidual", "write_residual"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredResidual:
    """Where a residual extent's bytes are in the file."""

    ptr: int
    size: int
    offset: int
    crc32: int

    def in_allocation(self, allocation_ptr: int) -> ResidualExtent:
        """The manifest's row for this extent."""
        return ResidualExtent(
            ptr=self.ptr, size=self.size, allocation_ptr=allocation_ptr, offset=self.offset, crc32=self.crc32
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenResidual:
    """A residual on disk; ``extents`` in address order, which is the file's."""

    path: Path
    bytes: int
    sha256: Digest
    extents: tuple[StoredResidual, ...]


def write_residual(
    path: Path,
    sources: Sequence[Source],
    *,
    progress: Callable[[int], None] | None = None,
    cancel: threading.Event | None = None,
) -> WrittenResidual | None:
    """Write the sources to ``path``, durably and mode 0600. Without sources there is no file, and None.

    Raises ResourceBusy when the name is taken, UsageError for an empty source, IntegrityError for one that does
    not give its bytes, OutOfSpace, OperationInterrupted. Nothing is left behind then.
    """
    ordered = sorted(sources, key=lambda source: source.ptr)
    if not ordered:
        return None
    for source in ordered:
        if source.size < 1:
            message = f"the residual extent at {source.ptr:#x} has {source.size} bytes"
            raise UsageError(message, cure="leave empty ranges out")
    layout = file_layout(source.size for source in ordered)
    meter = Meter(progress, cancel, undone="the unfinished residual was removed")
    tally = CrcTally(len(ordered))
    with stage_file(path.parent, layout.bytes, stem=f".{path.name}") as staged:
        with translated("write", staged.path):
            digest = assemble(staged.fd, ordered, tally, meter)
        publish_new(staged, path)
    extents = tuple(
        StoredResidual(ptr=source.ptr, size=source.size, offset=offset, crc32=crc)
        for source, offset, crc in zip(ordered, layout.offsets, tally.values, strict=True)
    )
    return WrittenResidual(path=path, bytes=layout.bytes, sha256=digest, extents=extents)
