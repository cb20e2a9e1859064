"""Admission: no file is used before its digest is proved, and a proof is remembered only for the very same file.

The file is opened once, following no link, and stays open for whoever uses it: what was proved is what is
read, whatever happens to the name. Its identity (device, inode, size, mtime) is read before and after the
proof. A change in the same clock tick as the file's last one would leave mtime as it was; so a proof of a
file that is younger than a tick waits until it is older, and so does the record of one.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from coldsnap.core.digest import Digest
from coldsnap.core.points import reached
from coldsnap.core.validation import (
    VALIDATION_RECORD_LIMIT_BYTES,
    VALIDATION_SUFFIX,
    ContentIdentity,
    Evidence,
    ValidationRecord,
    parse_validation_record,
    validation_record_bytes,
)
from coldsnap.errors import ColdsnapError, InvalidDocument, PayloadRejected
from coldsnap.store.documents import read_private, try_replace
from coldsnap.store.faults import translated
from coldsnap.store.locks import is_named
from coldsnap.store.meter import Meter
from coldsnap.store.proof import digest_of_file, extent_faults, layout_faults

__all__ = ["AdmittedFile", "admit_file", "content_identity", "is_proved", "record_path", "remember"]

_CLOCK_TICK_NS = 20_000_000  # file times advance in steps of up to 10 ms (CONFIG_HZ=100)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmittedFile:
    """A proved file, open for reading as ``fd`` until its context ends.

    ``from_record``: an earlier proof was believed. ``recorded``: a record of the proof lies beside the file.
    """

    path: Path
    fd: int
    digest: Digest
    bytes: int
    evidence: Evidence
    from_record: bool
    recorded: bool


@contextmanager
def admit_file(
    path: Path,
    digest: Digest,
    size_bytes: int,
    *,
    extents: Sequence[tuple[int, int, Digest]] | None = None,
    num_threads: int = 0,
    progress: Callable[[int], None] | None = None,
    cancel: threading.Event | None = None,
    record: bool = True,
    provider: str = "native",
    turn: AbstractContextManager[None] | None = None,
) -> Iterator[AdmittedFile]:
    """Prove that ``path`` is a regular file of ``size_bytes`` with this digest, and hold it open.

    ``extents`` are all of the file's (offset, size, sha256), from a manifest that the artifact's digests bind; the
    proof then runs in parallel over them. ``record`` False neither believes nor writes a record. ``turn`` is entered
    around a proof, so that of several processes only one computes it.

    Raises PayloadRejected with the contract's reason, InvalidDocument for extents that are no layout of the file.
    """
    if not isinstance(digest, Digest) or type(size_bytes) is not int or size_bytes < 0:
        message = f"{path}: expected a digest and a size, not {digest!r} and {size_bytes!r}"
        raise PayloadRejected("invalid_expected_digest", message, cure="take both from the artifact")
    if extents is not None and (faults := layout_faults(extents, size_bytes)):
        raise InvalidDocument(f"extents of {path}", faults)
    meter = Meter(progress, cancel, undone=f"{path} was not proved and not changed")
    fd = _open(path)
    try:
        evidence = _recorded_evidence(path, fd, digest, size_bytes) if record else None
        from_record, recorded = evidence is not None, evidence is not None
        if evidence is None:
            _check_size(path, fd, size_bytes)
            with turn or nullcontext():
                evidence = _recorded_evidence(path, fd, digest, size_bytes) if record else None
                from_record, recorded = evidence is not None, evidence is not None
                if evidence is None:
                    identity = content_identity(fd)
                    evidence = _prove(path, fd, digest, size_bytes, extents, num_threads, meter)
                    _check_unchanged(path, fd, identity)
                    reached("pack.proved")
                    recorded = record and remember(path, fd, digest, evidence, provider=provider)
        yield AdmittedFile(
            path=path,
            fd=fd,
            digest=digest,
            bytes=size_bytes,
            evidence=evidence,
            from_record=from_record,
            recorded=recorded,
        )
    finally:
        os.close(fd)


def is_proved(path: Path, digest: Digest, size_bytes: int) -> bool:
    """Whether an earlier proof would be believed, so that :func:`admit_file` need not read the file. Reads no byte."""
    try:
        fd = _open(path)
    except PayloadRejected:
        return False
    try:
        return _recorded_evidence(path, fd, digest, size_bytes) is not None
    finally:
        os.close(fd)


def record_path(path: Path) -> Path:
    """Where the validation record of ``path`` lies: beside it."""
    return path.with_name(path.name + VALIDATION_SUFFIX)


def content_identity(fd: int) -> ContentIdentity:
    """The identity of an open file as it is now."""
    found = os.fstat(fd)
    return ContentIdentity(device=found.st_dev, inode=found.st_ino, size=found.st_size, mtime_ns=found.st_mtime_ns)


def remember(path: Path, fd: int, digest: Digest, evidence: Evidence, *, provider: str) -> bool:
    """Write the record of a proof just made of ``fd``. False when the place takes none: the proof still holds."""
    _wait_for_the_clock(fd)
    identity = content_identity(fd)
    record = ValidationRecord(
        provider=provider,
        blob=path.name,
        bytes=identity.size,
        sha256=digest,
        content_identity=identity,
        content_evidence=evidence,
        validated_unix_ns=time.time_ns(),
    )
    return try_replace(record_path(path), validation_record_bytes(record))


def _open(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        message = f"{path} cannot be opened as a file of its own: {os.strerror(error.errno or 0)}"
        cure = "put the real file there; links are not followed"
        facts = {"path": str(path), "errno": errno.errorcode.get(error.errno or 0, str(error.errno))}
        raise PayloadRejected("unusable_path", message, cure=cure, facts=facts) from error
    found = os.fstat(fd)
    fault = None
    if not stat.S_ISREG(found.st_mode):
        fault = "is not a regular file"
    elif found.st_uid not in (os.geteuid(), 0):
        fault = f"belongs to user {found.st_uid}, not to us"
    elif found.st_mode & 0o022:
        fault = f"can be changed by other users (mode {stat.S_IMODE(found.st_mode):#o})"
    if fault is not None:
        os.close(fd)
        cure = "put a regular file there that only we can write to"
        raise PayloadRejected("unusable_path", f"{path} {fault}", cure=cure, facts={"path": str(path)})
    return fd


def _recorded_evidence(path: Path, fd: int, digest: Digest, size_bytes: int) -> Evidence | None:
    """The evidence of a record that vouches for the open file; None when there is none to be believed."""
    try:
        data = read_private(record_path(path), VALIDATION_RECORD_LIMIT_BYTES, only_ours=True)
        record = parse_validation_record(data)
    except ColdsnapError:
        return None  # no record, or one that others may have written: prove the file again
    if not record.vouches_for(sha256=digest, size_bytes=size_bytes, identity=content_identity(fd)):
        return None
    return record.content_evidence


def _check_size(path: Path, fd: int, size_bytes: int) -> None:
    found = os.fstat(fd).st_size
    if found != size_bytes:
        message = f"{path} holds {found} bytes, not {size_bytes}"
        cure = "fetch or write the file again"
        facts = {"path": str(path), "expected": size_bytes, "found": found}
        raise PayloadRejected("size_mismatch", message, cure=cure, facts=facts)


def _prove(
    path: Path,
    fd: int,
    digest: Digest,
    size_bytes: int,
    extents: Sequence[tuple[int, int, Digest]] | None,
    num_threads: int,
    meter: Meter,
) -> Evidence:
    _wait_for_the_clock(fd)
    facts: dict[str, object] = {"path": str(path), "expected": str(digest)}
    cure = "the file is damaged or is another one; fetch or write it again"
    with translated("read", path):
        if extents is None:
            found = digest_of_file(fd, size_bytes, meter)
            if found != digest:
                message = f"{path} has the digest {found}, not {digest}"
                raise PayloadRejected("digest_mismatch", message, cure=cure, facts={**facts, "found": str(found)})
            return Evidence.FULL_SHA256
        faults = extent_faults(fd, extents, num_threads=num_threads, meter=meter)
    if faults:
        message = f"{path} is not {digest}: {len(faults)} of its {len(extents)} extents are damaged, first {faults[0]}"
        facts["extents"] = [fault.field for fault in faults]
        raise PayloadRejected("digest_mismatch", message, cure=cure, facts=facts)
    return Evidence.EXTENTS_SHA256


def _wait_for_the_clock(fd: int) -> None:
    age_ns = time.time_ns() - os.fstat(fd).st_mtime_ns
    if 0 <= age_ns < _CLOCK_TICK_NS:
        time.sleep((_CLOCK_TICK_NS - age_ns) / 1e9)


def _check_unchanged(path: Path, fd: int, before: ContentIdentity) -> None:
    if content_identity(fd) != before or not is_named(fd, path):
        message = f"{path} was changed or replaced while it was being proved"
        cure = "find what writes to it, then try again"
        raise PayloadRejected("changed_during_validation", message, cure=cure, facts={"path": str(path)})
