"""What an artifact needs and this host does not have, brought here.

    a capsule   -> <state root>/capsules/<hex>/, put together aside and named as a whole
    a pack      -> the store, under the digest's lock

Only capsules and packs of units that are placed on this host are asked for; a capsule that is prepared is not needed.
Every byte is proved while it arrives, and interrupted objects go on where they were. ``origins.py`` says from where.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldsnap.capsule.aside import throw_away, write_file
from coldsnap.capsule.image import open_capsule
from coldsnap.capsule.layout import DOCUMENT_LIMIT_BYTES, OCI_LAYOUT, ImageManifest, blob_path, image_index
from coldsnap.capsule.prepared import is_prepared
from coldsnap.core.artifact import ObjectRecord
from coldsnap.core.digest import Digest
from coldsnap.core.parsing import parse_document
from coldsnap.core.request import OperationRequest
from coldsnap.core.selection import Provider
from coldsnap.errors import OutOfSpace, PayloadRejected
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.assembly import capsule_folder
from coldsnap.ops.operation import Operation
from coldsnap.ops.origins import Sources, capsule_sources, pack_sources
from coldsnap.ops.report import Advance
from coldsnap.ops.tools import Tools
from coldsnap.ship.base import Item, Kind
from coldsnap.ship.pull import resumable_bytes
from coldsnap.store.faults import translated
from coldsnap.store.locks import hold
from coldsnap.store.staging import sync_folder

__all__ = ["Fetched", "fetch_missing", "missing_bytes"]

FETCH_PACKS = "fetch-packs"
FETCH_CAPSULES = "fetch-capsules"
_SPARE_BYTES = 64 * 1024 * 1024
_LOCK_S = 24 * 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """One object that was brought here, and from where."""

    item: Item
    bytes: int
    source: str

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "kind": self.item.kind.value,
            "sha256": str(self.item.digest),
            "bytes": self.bytes,
            "from": self.source,
        }


def missing_bytes(tools: Tools, loaded: LoadedArtifact, request: OperationRequest, *, packs: bool) -> int:
    """Roughly what a fetch will write: packs exactly, capsules as large as their files at most."""
    total = sum(pack.bytes for pack in _missing_packs(tools, loaded, request).values()) if packs else 0
    for unit in _missing_capsules(tools, loaded, request):
        total += sum(size for size, _ in loaded.expected_files(unit).values())
    return total


def fetch_missing(
    tools: Tools, op: Operation, loaded: LoadedArtifact, request: OperationRequest, *, provider: Provider
) -> tuple[Fetched, ...]:
    """Bring every capsule, and for ``native`` every pack, that this host needs and does not have. Idempotent.

    Raises Refused when nobody is known to have something, RemoteError, PayloadRejected for an object that is not what
    its digest says, OutOfSpace before a byte of it is moved.
    """
    fetched: list[Fetched] = []
    capsules = _missing_capsules(tools, loaded, request)
    packs = _missing_packs(tools, loaded, request) if provider is Provider.NATIVE else {}
    if packs:
        with op.span(FETCH_PACKS) as span:
            for pack in packs.values():
                fetched += _fetch_pack(tools, loaded, request, pack)
            span.set(bytes=sum(one.bytes for one in fetched))
    if capsules:
        with op.span(FETCH_CAPSULES) as span:
            begun = len(fetched)
            for unit in capsules:
                fetched += _fetch_capsule(tools, loaded, unit)
            span.set(bytes=sum(one.bytes for one in fetched[begun:]))
    if fetched:
        op.keep(fetched=[one.document() for one in fetched])
    return tuple(fetched)


# -- what is missing ----------------------------------------------------------------------------------------------


def _here(tools: Tools, request: OperationRequest) -> set[str]:
    """The units that are placed on this host."""
    return {unit.id for unit in request.launch.units if unit.host == tools.host.id}


def _missing_capsules(tools: Tools, loaded: LoadedArtifact, request: OperationRequest) -> list[str]:
    here = _here(tools, request)
    return [
        unit.id
        for unit in loaded.artifact.launch.units
        if unit.id in here
        and not capsule_folder(tools, loaded.capsule_digest(unit.id)).is_dir()
        and not is_prepared(tools.state, loaded.capsule_digest(unit.id), loaded.expected_files(unit.id))
    ]


def _missing_packs(tools: Tools, loaded: LoadedArtifact, request: OperationRequest) -> Mapping[Digest, ObjectRecord]:
    """Each distinct pack that a worker of this host reads from the store, where it is not."""
    here = _here(tools, request)
    staged = {entry.worker for entry in request.policy.weights.native.staged}
    units = {worker.id: worker.unit for worker in loaded.artifact.launch.execution.workers}
    return {
        pack.sha256: pack
        for worker, pack in loaded.packs().items()
        if units[worker] in here and worker not in staged and not os.path.lexists(tools.store.path(pack.sha256))
    }


# -- packs --------------------------------------------------------------------------------------------------------


def _fetch_pack(
    tools: Tools, loaded: LoadedArtifact, request: OperationRequest, pack: ObjectRecord
) -> Iterator[Fetched]:
    item = Item(Kind.PACK, pack.sha256)
    with tools.store.writing(pack.sha256):
        if os.path.lexists(tools.store.path(pack.sha256)):
            return  # somebody else fetched it while we waited
        sources = pack_sources(tools, loaded, request, item, pack.bytes)
        _check_space(tools, item, pack.bytes)
        with (
            tools.reporter.phase(f"fetch pack of {pack.owner.id}", total_bytes=pack.bytes) as advance,
            sources.pulled(item, pack.bytes, tools.state.staging, progress=advance) as staged,
        ):
            tools.store.commit(staged, pack.sha256, written=pack.sha256)
    yield Fetched(item=item, bytes=pack.bytes, source=sources.name)


def _check_space(tools: Tools, item: Item, size: int) -> None:
    free = shutil.disk_usage(tools.state.path).free + resumable_bytes(tools.state.staging, item, size)
    if size + _SPARE_BYTES > free:
        raise OutOfSpace(
            f"{item} has {size} bytes and {free} are free below {tools.state.path}",
            cure="free some space (`coldsnap gc --dry-run` shows what can go), or use another --state-root",
            facts={"needed": size + _SPARE_BYTES, "free": free},
        )


# -- capsules -----------------------------------------------------------------------------------------------------


def _fetch_capsule(tools: Tools, loaded: LoadedArtifact, unit: str) -> Iterator[Fetched]:
    """A whole image layout, put together aside and renamed; blobs that are there already are kept across attempts."""
    digest = loaded.capsule_digest(unit)
    folder = capsule_folder(tools, digest)
    aside = folder.with_name(f".{folder.name}.fetch.partial")
    lock = tools.state.locks / f"capsule-{digest.hex}.lock"
    with ExitStack() as stack:
        stack.enter_context(hold(lock, deadline_s=_LOCK_S, purpose=f"fetching capsule {digest}"))
        if folder.is_dir():
            return
        sources = capsule_sources(tools, loaded, unit)
        for place in (aside, aside / "blobs", aside / "blobs" / "sha256"):
            with translated("create", place):
                place.mkdir(mode=0o700, exist_ok=True)
        manifest = Item(Kind.MANIFEST, digest)
        done = 0
        with tools.reporter.phase(f"fetch capsule {unit}") as advance:
            _bring(tools, sources, manifest, None, aside, advance)
            parsed = _manifest(aside, digest)
            blobs = {Item(Kind.BLOB, one.digest): one.size for one in (parsed.config, *parsed.layers)}
            missing = {one: n for one, n in blobs.items() if not _has(aside, one, n)}
            for item, num_bytes in missing.items():
                _check_space(tools, item, num_bytes)
            for item, num_bytes in missing.items():
                _bring(tools, sources, item, num_bytes, aside, advance)
                done += num_bytes
        size = blob_path(aside, digest).stat().st_size
        _finish(loaded, unit, digest, size, aside, folder)
    yield Fetched(item=manifest, bytes=done + size, source=sources.name)


def _has(aside: Path, item: Item, size: int | None) -> bool:
    """Whether an earlier attempt brought a blob whole: it was named when proved, and unpacking proves it again."""
    try:
        found = blob_path(aside, item.digest).lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and size in (None, found.st_size)


def _bring(tools: Tools, sources: Sources, item: Item, size: int | None, aside: Path, advance: Advance) -> None:
    if _has(aside, item, size):
        return
    path = blob_path(aside, item.digest)
    with sources.pulled(item, size, tools.state.staging, progress=advance) as staged:
        with translated("keep", path):
            os.fsync(staged.fd)
            staged.path.rename(path)
        sync_folder(path.parent)


def _manifest(aside: Path, digest: Digest) -> ImageManifest:
    subject = f"the manifest of capsule {digest}"
    path = blob_path(aside, digest)
    with translated("read", path):
        data = path.read_bytes()
    if Digest.of(data) != digest:
        path.unlink()
        message = f"the manifest of capsule {digest} was damaged on this disk"
        raise PayloadRejected("digest_mismatch", message, cure="run it again: it is fetched anew")
    return parse_document(ImageManifest, data, subject=subject, limit_bytes=DOCUMENT_LIMIT_BYTES)


def _finish(loaded: LoadedArtifact, unit: str, digest: Digest, size: int, aside: Path, folder: Path) -> None:
    """The layout's own documents, a look at what the digest binds, and the name."""
    machine = next(one.architecture for one in loaded.artifact.compatibility.units if one.unit == unit)
    index = image_index(manifest=digest, manifest_bytes=size, machine=machine, tag=unit)
    for name, data in (("oci-layout", OCI_LAYOUT), ("index.json", index)):
        with translated("write", aside / name):
            (aside / name).unlink(missing_ok=True)
            write_file(aside / name, data)
    try:
        open_capsule(aside, digest)
    except PayloadRejected:
        throw_away(aside)  # a blob of an earlier attempt did not survive; the next attempt fetches all of them
        raise
    with translated("name", folder):
        sync_folder(aside)
        aside.rename(folder)
    sync_folder(folder.parent)
