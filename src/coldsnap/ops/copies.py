"""Which packs have a copy in memory, who runs from them, and taking away those that nobody does."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from coldsnap.core.digest import Digest
from coldsnap.core.objects import ObjectRecord
from coldsnap.errors import ColdsnapError, ResourceBusy
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.tools import Tools
from coldsnap.store.copies import MemoryCopies

__all__ = ["copies_there", "drop_copies", "take_away", "unused_copies"]


def copies_there(tools: Tools, packs: Mapping[str, ObjectRecord]) -> dict[str, Path]:
    """The copy of each worker's pack, for those that have a whole one."""
    copies = MemoryCopies(tools.state)
    there = {worker: pack for worker, pack in packs.items() if copies.is_there(pack.sha256, pack.bytes)}
    return {worker: copies.path(pack.sha256) for worker, pack in there.items()}


def unused_copies(tools: Tools) -> tuple[Digest, ...]:
    """Packs with a copy, or what is left of one, that no service here runs from."""
    used = {pack.sha256 for loaded in _running(tools) for pack in loaded.packs().values()}
    return tuple(digest for digest in MemoryCopies(tools.state).digests() if digest not in used)


def drop_copies(tools: Tools, digests: Collection[Digest]) -> int:
    """Take copies away that no service runs from and nobody is making now; the bytes that frees."""
    freed = 0
    for digest in unused_copies(tools):
        if digest in digests:
            try:
                with tools.store.writing(digest, deadline_s=0.0):
                    freed += take_away(tools, digest)
            except ResourceBusy:
                continue
            except ColdsnapError as error:
                tools.reporter.warn(f"a copy of {digest} stays in memory: {error.message}")
    return freed


def take_away(tools: Tools, digest: Digest) -> int:
    """Take one copy away, whoever runs from it; the bytes that frees. The caller has the pack's writer lock."""
    copies = MemoryCopies(tools.state)
    freed = copies.empty(digest)
    tools.memory_fs.unmount(copies.folder(digest))
    return freed


def _running(tools: Tools) -> Iterator[LoadedArtifact]:
    for name in tools.services.names():
        with suppress(ColdsnapError):  # a copy is only that: a service of which nothing can be read does without it
            record = tools.services.load(name)
            if record is not None and record.artifact_path is not None:
                yield load_artifact(Path(record.artifact_path))
