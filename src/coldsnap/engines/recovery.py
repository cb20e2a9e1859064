"""Recovery: model bytes from the pinned checkpoint, or a refusal that names the tensor which is another one.

Three things bind a checkpoint to a capture, and each catches what the one before it cannot:

1. the pinned identity (model id, revision, digest of all headers), compared before anything is mapped;
2. the headers of its files. When their digest is another, they are compared tensor by tensor, with those that the
   process read at its capture where it still has them, else with the places that the replay plan names;
3. the SHA-256 of each extent, while its bytes arrive. A fine-tuned twin has the same names, shapes and offsets, and
   is caught here, with every tensor that differs.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

from coldsnap.core.digest import Digest
from coldsnap.core.manifest import ModelSource, RecoveryManifest
from coldsnap.core.replay import ReplayEntry, ReplayPiece
from coldsnap.engines.local_model import checkpoint_files
from coldsnap.engines.safetensors import SafetensorsFile, metadata_sha256
from coldsnap.errors import IntegrityError, Problem, Refused, UserError
from coldsnap.hydrate.extents import ExtentsProof
from coldsnap.hydrate.segments import ExtentsSource, Segment

__all__ = ["OpenFiles", "check_checkpoint", "check_identity", "open_checkpoint", "prove_bytes", "replay"]

OpenFiles: TypeAlias = Mapping[str, tuple[int, int]]
"""File name -> (descriptor, bytes)."""

_NAMED = 8
_READ_BYTES = 4 << 20
_FACTS = 1000  # an error has to fit into a frame of the control socket


def check_identity(captured: ModelSource, started_with: ModelSource) -> None:
    """Raises Refused naming each part of the pinned identity that this process was not started with."""
    problems = [
        Problem(
            field=f"model_source.{field}",
            message="is not the model that this process was started with",
            value=str(getattr(captured, field)),
            cure=f"use the manifest of a capture of {getattr(started_with, field)}",
        )
        for field in ("model_id", "revision", "metadata_sha256")
        if getattr(captured, field) != getattr(started_with, field)
    ]
    if problems:
        raise Refused("recovery", problems)


def check_checkpoint(manifest: RecoveryManifest, folder: Path, *, known: Sequence[SafetensorsFile] = ()) -> None:
    """Compare the headers in ``folder`` with the captured ones. ``known`` are those, where the process has them.

    Raises IntegrityError naming every file and tensor that is missing, new, or another one; UserError without a
    folder, InvalidDocument for a damaged header.
    """
    wanted = sorted({piece.file for entry in manifest.replay_plan for piece in entry.pieces})
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing and folder.is_dir():
        raise _another(manifest, folder, [_file(name, "is missing", None) for name in missing])
    files = checkpoint_files(folder)
    if metadata_sha256(files) == manifest.model_source.metadata_sha256:
        return
    found = {file.name: file for file in files}
    if known and metadata_sha256(known) == manifest.model_source.metadata_sha256:
        problems = list(_compared({file.name: file for file in known}, found))
    else:
        problems = list(_misplaced(manifest.replay_plan, found))
    if not problems:
        message = "differ: every tensor of the plan is in its place, so a number type, a shape or a file is another"
        problems = [_tensor("headers", message, str(metadata_sha256(files)))]
    raise _another(manifest, folder, problems)


def open_checkpoint(files: ExitStack, manifest: RecoveryManifest, folder: Path) -> OpenFiles:
    """Every file of the plan, open for reading until ``files`` is closed. Raises UserError naming one that is not."""
    opened: dict[str, tuple[int, int]] = {}
    for name in sorted({piece.file for entry in manifest.replay_plan for piece in entry.pieces}):
        try:
            fd = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(
                f"the checkpoint file {folder / name} cannot be opened: {error.strerror}",
                cure="fetch the checkpoint again",
                facts={"path": str(folder / name)},
            ) from error
        files.callback(os.close, fd)
        opened[name] = (fd, os.fstat(fd).st_size)
    return opened


def replay(
    manifest: RecoveryManifest,
    sources: OpenFiles,
    folder: Path,
    transfer: Callable[[str, ExtentsSource, Sequence[Segment]], int],
) -> int:
    """Fill every extent of the plan by ``transfer`` (file name, source, segments), and prove it; the bytes moved.

    Raises IntegrityError naming every tensor whose bytes are not the captured ones.
    """
    segments: dict[str, list[Segment]] = defaultdict(list)
    for entry in manifest.replay_plan:
        for piece in entry.pieces:
            segments[piece.file].append(
                Segment(ptr=entry.ptr + piece.extent_offset, size=piece.size, file_offset=piece.file_offset)
            )
    proof = ExtentsProof([(entry.ptr, entry.size, entry.sha256) for entry in manifest.replay_plan])
    done = 0
    try:
        with proof:
            for name, (fd, size) in sources.items():
                try:
                    done += transfer(name, ExtentsSource(fd=fd, bytes=size, proof=proof), segments[name])
                except IntegrityError as error:
                    message = f"the checkpoint file {folder / name}: {error.message}"
                    raise IntegrityError(message, cure=error.cure, facts=error.facts) from error
    except IntegrityError as error:
        if "extents" not in error.facts:
            raise
        documents = [fault.document() for fault in proof.faults[:_FACTS]]
        raise _other_bytes(manifest, folder, {fault.ptr for fault in proof.faults}, documents) from error
    return done


def prove_bytes(manifest: RecoveryManifest, folder: Path, *, num_threads: int = 0) -> None:
    """Read every extent of the plan from the checkpoint and compare its digest, with no memory to put it in.

    For a caller who must know before it gives something up. Raises as ``replay`` and ``open_checkpoint``.
    """

    def is_wrong(entry: ReplayEntry) -> bool:
        state = hashlib.sha256()
        for piece in entry.pieces:
            fd, _ = sources[piece.file]
            for begin in range(0, piece.size, _READ_BYTES):
                state.update(os.pread(fd, min(_READ_BYTES, piece.size - begin), piece.file_offset + begin))
        return Digest.from_hash(state) != entry.sha256

    with ExitStack() as files:
        sources = open_checkpoint(files, manifest, folder)
        threads = files.enter_context(ThreadPoolExecutor(max_workers=num_threads or os.cpu_count() or 1))
        found = threads.map(is_wrong, manifest.replay_plan)
        wrong = {entry.ptr for entry, bad in zip(manifest.replay_plan, found, strict=True) if bad}
    if wrong:
        documents = [{"ptr": f"{ptr:#x}"} for ptr in sorted(wrong)[:_FACTS]]
        raise _other_bytes(manifest, folder, wrong, documents)


def _other_bytes(
    manifest: RecoveryManifest, folder: Path, wrong: Collection[int], documents: Sequence[Mapping[str, object]]
) -> IntegrityError:
    pieces = [piece for entry in manifest.replay_plan if entry.ptr in wrong for piece in entry.pieces]
    tensors = sorted({(piece.file, piece.tensor) for piece in pieces})
    source = manifest.model_source
    return IntegrityError(
        f"the checkpoint in {folder} has the captured headers and other bytes in {_list(tensors)}: it is not "
        f"{source.model_id} at {source.revision}",
        cure="give the captured checkpoint (a fine-tuned one needs a capture of its own), or fetch it again",
        facts={
            "path": str(folder),
            "tensors": [f"{file}: {tensor}" for file, tensor in tensors[:_FACTS]],
            "extents": list(documents),
        },
    )


def _list(tensors: Sequence[tuple[str, str]]) -> str:
    named = ", ".join(f"{tensor} ({file})" for file, tensor in tensors[:_NAMED])
    more = f" and {len(tensors) - _NAMED} more" if len(tensors) > _NAMED else ""
    return f"{len(tensors)} tensor{'s' if len(tensors) != 1 else ''}: {named}{more}"


def _another(manifest: RecoveryManifest, folder: Path, problems: Sequence[Problem]) -> IntegrityError:
    source = manifest.model_source
    named = "; ".join(f"{p.field} {p.message}{f' (got {p.value})' if p.value else ''}" for p in problems[:_NAMED])
    more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
    return IntegrityError(
        f"the checkpoint in {folder} is not the captured one: {named}{more}",
        cure=f"fetch {source.model_id} at {source.revision}",
        facts={
            "path": str(folder),
            "expected": str(source.metadata_sha256),
            "problems": [problem.document() for problem in problems[:_FACTS]],
        },
    )


def _file(name: str, message: str, value: str | None) -> Problem:
    cure = "the captured files, and no other, belong in the folder"
    return Problem(field=name, message=message, value=value, cure=cure)


def _tensor(where: str, message: str, value: str | None) -> Problem:
    return Problem(field=where, message=message, value=value, cure="give the captured file, or capture this one")


def _compared(known: Mapping[str, SafetensorsFile], found: Mapping[str, SafetensorsFile]) -> Iterator[Problem]:
    """What differs between the headers of the capture and those that are there now."""
    for name in sorted(known.keys() | found.keys()):
        before, now = known.get(name), found.get(name)
        if now is None:
            yield _file(name, "is missing", None)
        elif before is None:
            yield _file(name, "was not there at capture", f"{now.bytes} bytes")
        elif before.header_sha256 != now.header_sha256:
            yield from _compared_file(before, now)


def _compared_file(before: SafetensorsFile, now: SafetensorsFile) -> Iterator[Problem]:
    old, new = ({tensor.name: tensor for tensor in file.tensors} for file in (before, now))
    another = False
    for name in sorted(old.keys() | new.keys()):
        where = f"{now.name}: {name}"
        if name not in new:
            another = True
            yield _tensor(where, "is missing", None)
        elif name not in old:
            another = True
            yield _tensor(where, "was not there at capture", f"{new[name].dtype} {_text(new[name].shape)}")
        else:
            for field in ("dtype", "shape"):
                was, value = getattr(old[name], field), getattr(new[name], field)
                if was != value:
                    another = True
                    yield _tensor(where, f"had {field} {_text(was)} at capture", _text(value))
    if another:
        return  # whatever lies behind such a tensor has moved because of it
    moved = [name for name in old if old[name].offset != new[name].offset]
    for name in sorted(moved):
        message = f"was at byte {old[name].offset} at capture"
        yield _tensor(f"{now.name}: {name}", message, str(new[name].offset))
    if not moved:
        message = "has another header with the same tensors: its metadata block differs"
        yield _tensor(now.name, message, str(now.header_sha256))


def _text(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _misplaced(plan: Sequence[ReplayEntry], found: Mapping[str, SafetensorsFile]) -> Iterator[Problem]:
    """Tensors of the plan that are not what or where it says. Those that only moved are told where nothing else is:
    whatever lies behind another tensor has moved because of it."""
    tensors = {name: {tensor.name: tensor for tensor in file.tensors} for name, file in found.items()}
    pieces = {(piece.file, piece.tensor): piece for entry in plan for piece in _farthest(entry)}
    another: list[Problem] = []
    moved: list[Problem] = []
    for (file, name), piece in sorted(pieces.items()):
        where = f"{file}: {name}"
        stored = tensors.get(file, {}).get(name)
        start, reach = piece.file_offset - piece.tensor_offset, piece.tensor_offset + piece.size
        if stored is None:
            another.append(_tensor(where, "is missing", None))
        elif stored.size < reach:
            another.append(_tensor(where, f"held at least {reach} bytes at capture", str(stored.size)))
        elif stored.offset != start:
            moved.append(_tensor(where, f"was at byte {start} at capture", str(stored.offset)))
    yield from another or moved


def _farthest(entry: ReplayEntry) -> Sequence[ReplayPiece]:
    """The pieces of an extent, those that reach farthest into their tensor last."""
    return sorted(entry.pieces, key=lambda piece: piece.tensor_offset + piece.size)
