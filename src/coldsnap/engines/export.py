"""`export`: a worker's memory becomes a pack, a residual and two manifests.

The order is the promise. First every model range is compared with the checkpoint bytes it is said to come from, and
what differs is demoted to the residual, because a replay would not bring it back. Then the split into model and
residual ranges is proved to cover every preserved byte, and a local checkpoint to be the pinned one still. Only then
is anything written, and the manifests, which prove the cover once more from their own rows, are written last.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from coldsnap.core.cover import RangeGroup, cover_problems
from coldsnap.core.digest import Digest
from coldsnap.core.extents import PAGE_BYTES, Allocation, AllocationIndex, residual_ranges
from coldsnap.core.manifest import (
    MODEL_WEIGHTS_BLOB,
    RESIDUAL_BLOB,
    Blob,
    ModelSource,
    NativeManifest,
    RecoveryManifest,
    native_manifest_bytes,
    recovery_manifest_bytes,
)
from coldsnap.core.messages import ExportBody, Exported, ExportedFile
from coldsnap.core.points import reached
from coldsnap.core.replay import ReplayEntry, ReplayPiece
from coldsnap.engines.control import Call
from coldsnap.engines.local_model import resolve_local
from coldsnap.engines.observer import Label, Observation, ObservedExtent, Write, reason_bytes
from coldsnap.engines.timing import timed
from coldsnap.errors import InvalidDocument, OperationInterrupted, UserError
from coldsnap.hydrate.memory import StableMemory
from coldsnap.hydrate.scan import read_chunks
from coldsnap.store.documents import write_new
from coldsnap.store.pack import HashedSource, PackSource, WrittenPack, hash_sources, write_hashed
from coldsnap.store.payloads import PayloadStore
from coldsnap.store.residual import ResidualSource, WrittenResidual, write_residual
from coldsnap.store.stateroot import StateRoot

__all__ = ["DIFFERS", "NATIVE_MANIFEST", "RECOVERY_MANIFEST", "export_memory"]

DIFFERS = "differs from the checkpoint it was copied from"
NATIVE_MANIFEST = "native-manifest.json"
RECOVERY_MANIFEST = "manifest.json"
_CHUNK_BYTES = 4 << 20
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class _Split:
    """Every preserved byte, divided: `residual` holds (ptr, size, allocation_ptr) in address order."""

    extents: Sequence[ObservedExtent]
    residual: Sequence[tuple[int, int, int]]
    reasons: dict[str, int]


def export_memory(
    body: ExportBody,
    *,
    memory: StableMemory,
    observation: Observation,
    source: ModelSource,
    model_path: Path,
    worker: str,
    rank: int,
    call: Call,
) -> Exported:
    """Write the pack into the store and the other files into `body.out_dir`.

    Raises InvalidDocument when the split does not cover the memory, UserError when the checkpoint is gone or is not
    the pinned one any more, IntegrityError when bytes change meanwhile, OutOfSpace, OperationInterrupted when the
    caller went away.
    """
    seconds: dict[str, float] = {}
    out = Path(body.out_dir)
    with timed(seconds, "prove"):
        held = _hashed(observation.extents, memory, body.num_threads, call)
        differing = _differing(observation.extents, held, model_path, body.num_threads, call)
        split = _split(memory.allocations, observation, differing)
        if source.revision.startswith("sha256:"):  # a local folder: nobody else vouches for its content
            resolve_local(model_path, revision=source.revision, num_threads=body.num_threads)
    reached("export.proved")
    with timed(seconds, "pack"):
        pack = _write_pack(body, [one for one in held if one.ptr not in differing], call)
    reached("export.packed")
    with timed(seconds, "residual"):
        residual = _write_residual(body, split, memory, out / RESIDUAL_BLOB, call)
    reached("export.saved")
    with timed(seconds, "manifests"):
        native, recovery = _manifests(body, split, memory.allocations, pack, residual, source, worker, rank)
        native_file = _document(out / NATIVE_MANIFEST, native_manifest_bytes(native))
        recovery_file = _document(out / RECOVERY_MANIFEST, recovery_manifest_bytes(recovery))
    reached("export.done")
    return Exported(
        pack=ExportedFile(path=str(pack.path), bytes=pack.bytes, sha256=pack.digest) if pack is not None else None,
        pack_shared=pack.shared if pack is not None else False,
        residual=ExportedFile(path=str(out / RESIDUAL_BLOB), bytes=residual.bytes, sha256=residual.sha256)
        if residual is not None
        else None,
        native_manifest=native_file,
        recovery_manifest=recovery_file,
        model_bytes=sum(extent.range.size for extent in split.extents),
        residual_bytes=sum(size for _, size, _ in split.residual),
        num_model_extents=len(split.extents),
        residual_reasons=split.reasons,
        seconds=seconds,
    )


def _hashed(
    extents: Sequence[ObservedExtent], memory: StableMemory, num_threads: int, call: Call
) -> list[HashedSource]:
    """What memory holds now, in the order of `extents`: for the comparison, and for the order of the pack."""
    sources = [
        PackSource(
            ptr=extent.range.ptr,
            size=extent.range.size,
            semantic_id=extent.range.semantic_id,
            read=partial(_reader, memory, extent.range.ptr, extent.range.size),
        )
        for extent in extents
    ]
    advance = call.phase("hash", sum(source.size for source in sources))
    return hash_sources(sources, num_threads=num_threads, progress=advance, cancel=call.cancelled)


def _differing(
    extents: Sequence[ObservedExtent], held: Sequence[HashedSource], folder: Path, num_threads: int, call: Call
) -> frozenset[int]:
    """Addresses of the extents whose bytes are not those of the checkpoint now."""
    advance = call.phase("prove", sum(extent.range.size for extent in extents))
    with ExitStack() as stack:
        files: dict[str, int] = {}
        for name in sorted({write.file for extent in extents for write in extent.writes}):
            try:
                files[name] = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise UserError(
                    f"the checkpoint file {folder / name} cannot be opened: {error.strerror}",
                    cure="keep the checkpoint in place until the capture is done",
                    facts={"path": str(folder / name)},
                ) from error
            stack.callback(os.close, files[name])

        def stored(extent: ObservedExtent) -> Digest:
            return _stored_digest(extent.writes, files, call, advance)

        threads = stack.enter_context(ThreadPoolExecutor(max_workers=num_threads or os.cpu_count() or 1))
        found = threads.map(stored, extents)
        return frozenset(
            extent.range.ptr for extent, ours, theirs in zip(extents, held, found, strict=True) if ours.sha256 != theirs
        )


def _stored_digest(
    writes: Sequence[Write], files: Mapping[str, int], call: Call, advance: Callable[[int], None]
) -> Digest:
    """The SHA-256 of an extent as the checkpoint has it; its copies, in address order, fill it once.

    The buffer is a mapping of its own and not heap: a freed heap block would keep model bytes in the process,
    and they would land in its image.
    """
    state = hashlib.sha256()
    with mmap.mmap(-1, _BUFFER_BYTES) as buffer, memoryview(buffer) as view:
        for write in writes:
            done = 0
            while done < write.size:
                if call.cancelled.is_set():
                    raise OperationInterrupted("the export was cancelled before anything was written")
                with view[: min(_BUFFER_BYTES, write.size - done)] as part:
                    count = os.preadv(files[write.file], [part], write.file_offset + done)
                if count == 0:
                    break  # the file is shorter than it was: another digest
                with view[:count] as part:
                    state.update(part)
                advance(count)
                done += count
    return Digest.from_hash(state)


def _split(allocations: Sequence[Allocation], observation: Observation, differing: frozenset[int]) -> _Split:
    """Divide every byte, and prove it. Raises InvalidDocument with every gap and overlap."""
    kept = [extent for extent in observation.extents if extent.range.ptr not in differing]
    demoted = [
        Label(ptr=extent.range.ptr, size=extent.range.size, reason=DIFFERS)
        for extent in observation.extents
        if extent.range.ptr in differing
    ]
    residual = residual_ranges(allocations, [(extent.range.ptr, extent.range.size) for extent in kept])
    index = AllocationIndex(allocations)
    model_rows = [
        (extent.range.ptr, extent.range.size, _allocation_ptr(index, extent.range.ptr, extent.range.size))
        for extent in kept
    ]
    problems = cover_problems(
        [(one.ptr, one.size) for one in allocations],
        [
            RangeGroup(field="model_weight_extents", rows=model_rows),
            RangeGroup(field="residual_extents", rows=list(residual)),
        ],
        page_bytes=PAGE_BYTES,
    )
    if problems:
        raise InvalidDocument("cover proof", problems)
    reasons = reason_bytes([(ptr, size) for ptr, size, _ in residual], [*observation.labels, *demoted])
    return _Split(extents=kept, residual=residual, reasons=reasons)


def _allocation_ptr(index: AllocationIndex, ptr: int, size: int) -> int:
    found = index.holding(ptr, size)
    return found.ptr if found is not None else 0


def _reader(memory: StableMemory, ptr: int, size: int) -> Iterator[memoryview]:
    return read_chunks(memory, ptr, size, _CHUNK_BYTES)


def _write_pack(body: ExportBody, kept: Sequence[HashedSource], call: Call) -> WrittenPack | None:
    if not kept:
        return None
    return write_hashed(
        PayloadStore(StateRoot.open(Path(body.state_root))),
        kept,
        progress=call.phase("pack", sum(one.size for one in kept)),
        cancel=call.cancelled,
    )


def _write_residual(
    body: ExportBody, split: _Split, memory: StableMemory, path: Path, call: Call
) -> WrittenResidual | None:
    sources = [
        ResidualSource(ptr=ptr, size=size, read=partial(_reader, memory, ptr, size)) for ptr, size, _ in split.residual
    ]
    total = sum(source.size for source in sources)
    return write_residual(path, sources, progress=call.phase("residual", total), cancel=call.cancelled)


def _manifests(
    body: ExportBody,
    split: _Split,
    allocations: Sequence[Allocation],
    pack: WrittenPack | None,
    residual: WrittenResidual | None,
    source: ModelSource,
    worker: str,
    rank: int,
) -> tuple[NativeManifest, RecoveryManifest]:
    index = AllocationIndex(allocations)
    observed = {extent.range.ptr: extent for extent in split.extents}
    model_extents = tuple(
        one.in_allocation(_allocation_ptr(index, one.ptr, one.size)) for one in (pack.extents if pack else ())
    )
    residual_extents = tuple(
        one.in_allocation(_allocation_ptr(index, one.ptr, one.size)) for one in (residual.extents if residual else ())
    )
    residual_blob = (
        Blob(name=RESIDUAL_BLOB, bytes=residual.bytes, sha256=residual.sha256) if residual is not None else None
    )
    native = NativeManifest(
        capture_id=body.capture_id,
        worker=worker,
        rank=rank,
        entries=tuple(allocations),
        model_weight_extents=model_extents,
        residual_extents=residual_extents,
        model_weights=Blob(name=MODEL_WEIGHTS_BLOB, bytes=pack.bytes, sha256=pack.digest) if pack is not None else None,
        residual=residual_blob,
    )
    recovery = RecoveryManifest(
        capture_id=body.capture_id,
        worker=worker,
        rank=rank,
        model_source=source,
        entries=tuple(allocations),
        replay_plan=tuple(
            ReplayEntry(
                semantic_id=one.semantic_id,
                sha256=one.sha256,
                ptr=one.ptr,
                size=one.size,
                pieces=_pieces(observed[one.ptr]),
            )
            for one in sorted(model_extents, key=lambda extent: extent.ptr)
        ),
        residual_extents=residual_extents,
        residual=residual_blob,
    )
    return native, recovery


def _pieces(extent: ObservedExtent) -> tuple[ReplayPiece, ...]:
    return tuple(
        ReplayPiece(
            file=write.file,
            tensor=write.tensor,
            file_offset=write.file_offset,
            tensor_offset=write.tensor_offset,
            extent_offset=write.ptr - extent.range.ptr,
            size=write.size,
        )
        for write in extent.writes
    )


def _document(path: Path, data: bytes) -> ExportedFile:
    write_new(path, data)
    return ExportedFile(path=str(path), bytes=len(data), sha256=Digest.of(data))
