"""The pack: a worker's model bytes in an order that depends on nothing but the bytes.

Two passes over memory. The first hashes every extent, in parallel, because the order is by digest. The second
writes in that order and hashes again, and an extent with another digest than before ends it: somebody
still writes to the weights, and the file would hold a mixture that never was a model.

A caller with a use of its own for the digests calls ``hash_sources`` and ``write_hashed``, so that a capture reads
its memory twice and not three times.

``rewrite_pack`` is the second pass alone: a native manifest says what the order and the digests are.
"""

from __future__ import annotations

import hashlib
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from coldsnap.core.digest import Digest
from coldsnap.core.extents import ModelExtent, file_layout, pack_order
from coldsnap.core.points import reached
from coldsnap.errors import IntegrityError, PayloadRejected, ResourceBusy, UsageError
from coldsnap.store.assembly import DigestTally, assemble
from coldsnap.store.faults import translated
from coldsnap.store.meter import Meter, run_all
from coldsnap.store.payloads import LOCK_DEADLINE_S, PayloadStore
from coldsnap.store.residual import ResidualSource, WrittenResidual, write_residual
from coldsnap.store.sources import Buffer, PackSource, chunks_of
from coldsnap.store.staging import StagedFile

__all__ = [
    "HashedSource",
    "PackSource",
    "PackedExtent",
    "ResidualSource",
    "WrittenPack",
    "WrittenResidual",
    "hash_sources",
    "rewrite_pack",
    "write_hashed",
    "write_pack",
    "write_residual",
]

_TASK_BYTES = 8 << 20
_TASK_SOURCES = 256
_TURN_POLL_S = 0.2
_HASH_BYTES = 1 << 20  # small enough to stay in the cache between SHA-256 and CRC-32


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedExtent:
    """Where an extent's bytes are in the pack, and what they are."""

    ptr: int
    size: int
    semantic_id: str
    sha256: Digest
    offset: int
    crc32: int

    def in_allocation(self, allocation_ptr: int) -> ModelExtent:
        """The manifest's row for this extent."""
        return ModelExtent(
            ptr=self.ptr,
            size=self.size,
            allocation_ptr=allocation_ptr,
            semantic_id=self.semantic_id,
            sha256=self.sha256,
            offset=self.offset,
            crc32=self.crc32,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenPack:
    """A pack in the store. ``shared``: the store held it already. ``extents`` are in the pack's order."""

    digest: Digest
    bytes: int
    path: Path
    shared: bool
    extents: tuple[PackedExtent, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HashedSource:
    """A source, and what its bytes were when they were hashed."""

    source: PackSource
    sha256: Digest
    crc32: int

    @property
    def ptr(self) -> int:
        """The source's address."""
        return self.source.ptr

    @property
    def size(self) -> int:
        """The source's bytes."""
        return self.source.size

    @property
    def semantic_id(self) -> str:
        """The source's tensors."""
        return self.source.semantic_id


def hash_sources(
    sources: Sequence[PackSource],
    *,
    num_threads: int = 0,
    progress: Callable[[int], None] | None = None,
    cancel: threading.Event | None = None,
) -> list[HashedSource]:
    """The first pass alone, for a caller with a use of its own for the digests; in the order of ``sources``.

    Raises UsageError for an empty source, and as ``read`` does.
    """
    for source in sources:
        if source.size < 1:
            message = f"the extent at {source.ptr:#x} has {source.size} bytes"
            raise UsageError(message, cure="leave empty tensors out")
    meter = Meter(progress, cancel, undone="no pack was written")
    tasks = [partial(_hash_sources, group, meter) for group in _groups(sources)]
    found = run_all(tasks, num_threads=num_threads, meter=meter)
    by_number = dict(pair for group in found for pair in group)
    return [by_number[number] for number in range(len(sources))]


def write_pack(
    store: PayloadStore,
    sources: Sequence[PackSource],
    *,
    num_threads: int = 0,
    progress: Callable[[int], None] | None = None,
    cancel: threading.Event | None = None,
) -> WrittenPack:
    """Write the sources as a pack, durably, and record its proof. Equal bytes give one object on a host.

    ``progress`` counts every model byte twice, once a pass. Raises UsageError for no source at all or an empty
    one, IntegrityError when an extent changes meanwhile, OutOfSpace, OperationInterrupted. Nothing is left then.
    """
    hashed = hash_sources(sources, num_threads=num_threads, progress=progress, cancel=cancel)
    return write_hashed(store, hashed, progress=progress, cancel=cancel)


def write_hashed(
    store: PayloadStore,
    hashed: Sequence[HashedSource],
    *,
    progress: Callable[[int], None] | None = None,
    cancel: threading.Event | None = None,
) -> WrittenPack:
    """The second pass of ``write_pack``, with the same promises. ``progress`` counts every model byte once."""
    if not hashed:
        raise UsageError("a pack holds at least one extent", cure="a worker without model bytes has no pack")
    meter = Meter(progress, cancel, undone="the unfinished pack was removed")
    reached("pack.hashed")
    ordered = pack_order(hashed)
    layout = file_layout(one.size for one in ordered)

    def changed(index: int, digest: Digest) -> IntegrityError:
        one = ordered[index]
        return IntegrityError(
            f"the extent at {one.ptr:#x} ({one.size} bytes) changed while the pack was written",
            cure="stop whatever still writes to the weights before the capture",
            facts={"ptr": one.ptr, "size": one.size, "before": str(one.sha256), "after": str(digest)},
        )

    with _written(store, [one.source for one in ordered], [one.sha256 for one in ordered], changed, meter) as found:
        staged, digest = found
        with store.lock(digest):
            path, shared = store.commit_locked(staged, digest, written=digest)
    extents = tuple(
        PackedExtent(
            ptr=one.ptr,
            size=one.size,
            semantic_id=one.semantic_id,
            sha256=one.sha256,
            offset=offset,
            crc32=one.crc32,
        )
        for one, offset in zip(ordered, layout.offsets, strict=True)
    )
    return WrittenPack(digest=digest, bytes=layout.bytes, path=path, shared=shared, extents=extents)


def rewrite_pack(
    store: PayloadStore,
    extents: Sequence[ModelExtent],
    read: Callable[[ModelExtent], Iterator[Buffer]],
    *,
    digest: Digest,
    progress: Callable[[int], None] | None = None,
    cancel: threading.Event | None = None,
    deadline_s: float = LOCK_DEADLINE_S,
) -> WrittenPack:
    """Write the pack of these extents, a native manifest's in its order, from bytes that should still be theirs.

    ``read`` gives an extent's bytes. Of several processes and threads that want this pack, one writes it, and the
    others wait for up to ``deadline_s`` and find it there; a proved one that is there already is left alone.

    Raises UsageError for no extent, IntegrityError for the first extent that is not what the manifest says,
    PayloadRejected when the file as a whole is not ``digest``, ResourceBusy, OutOfSpace, OperationInterrupted. No
    file is left then. ``progress`` counts every model byte once.
    """
    if not extents:
        raise UsageError("a pack holds at least one extent", cure="a worker without model bytes has no pack")
    meter = Meter(progress, cancel, undone="the unfinished pack was removed")
    layout = file_layout(one.size for one in extents)

    def differs(index: int, found: Digest) -> IntegrityError:
        one = extents[index]
        return IntegrityError(
            f"the extent at {one.ptr:#x} ({one.size} bytes) is {found} in memory, and the manifest says {one.sha256}",
            cure="the weights in memory are not the captured ones any more: restore the service again",
            facts={"ptr": one.ptr, "size": one.size, "expected": str(one.sha256), "found": str(found)},
        )

    def result(path: Path, *, shared: bool) -> WrittenPack:
        packed = tuple(
            PackedExtent(
                ptr=one.ptr,
                size=one.size,
                semantic_id=one.semantic_id,
                sha256=one.sha256,
                offset=one.offset,
                crc32=one.crc32,
            )
            for one in extents
        )
        return WrittenPack(digest=digest, bytes=layout.bytes, path=path, shared=shared, extents=packed)

    with _turn(store, digest, deadline_s, meter):
        with suppress(PayloadRejected), store.admit(digest, layout.bytes, cancel=cancel) as admitted:
            return result(admitted.path, shared=True)
        sources = [
            PackSource(ptr=one.ptr, size=one.size, semantic_id=one.semantic_id, read=partial(read, one))
            for one in extents
        ]
        written = _written(store, sources, [one.sha256 for one in extents], differs, meter)
        with written as (staged, found), store.lock(digest):
            path, shared = store.commit_locked(staged, digest, written=found)
        return result(path, shared=shared)


@contextmanager
def _turn(store: PayloadStore, digest: Digest, deadline_s: float, meter: Meter) -> Iterator[None]:
    """Our turn to write this pack; waiting for it can be cancelled."""
    give_up = time.monotonic() + deadline_s
    with ExitStack() as stack:
        while True:
            meter.check()
            left = give_up - time.monotonic()
            try:
                stack.enter_context(store.writing(digest, deadline_s=max(0.0, min(_TURN_POLL_S, left))))
                break
            except ResourceBusy:
                if left <= 0:
                    raise
        yield


@contextmanager
def _written(
    store: PayloadStore,
    ordered: Sequence[PackSource],
    digests: Sequence[Digest],
    fault: Callable[[int, Digest], IntegrityError],
    meter: Meter,
) -> Iterator[tuple[StagedFile, Digest]]:
    """A staged file with these sources in this order, and its digest. Raises ``fault`` for one of another digest."""

    def compare(index: int, digest: Digest) -> None:
        if digest != digests[index]:
            raise fault(index, digest)

    layout = file_layout(one.size for one in ordered)
    with store.stage(layout.bytes) as staged:
        reached("pack.staged")
        tally = DigestTally([one.size for one in ordered], compare)
        with translated("write", staged.path):
            digest = assemble(staged.fd, ordered, tally, meter)
        reached("pack.written")
        yield staged, digest


def _groups(sources: Sequence[PackSource]) -> Iterator[list[tuple[int, PackSource]]]:
    """Sources with their numbers in lots worth a thread's while, the largest first so that no thread is left with one
    at the end."""
    lot: list[tuple[int, PackSource]] = []
    size = 0
    for number, source in sorted(enumerate(sources), key=lambda one: -one[1].size):
        lot.append((number, source))
        size += source.size
        if size >= _TASK_BYTES or len(lot) >= _TASK_SOURCES:
            yield lot
            lot, size = [], 0
    if lot:
        yield lot


def _hash_sources(sources: Sequence[tuple[int, PackSource]], meter: Meter) -> list[tuple[int, HashedSource]]:
    hashed: list[tuple[int, HashedSource]] = []
    for number, source in sources:
        state, crc = hashlib.sha256(), 0
        for chunk in chunks_of(source):
            for start in range(0, len(chunk), _HASH_BYTES):
                part = chunk[start : start + _HASH_BYTES]
                state.update(part)
                crc = zlib.crc32(part, crc)
            meter.advance(len(chunk))
        hashed.append((number, HashedSource(source=source, sha256=Digest.from_hash(state), crc32=crc)))
    return hashed
