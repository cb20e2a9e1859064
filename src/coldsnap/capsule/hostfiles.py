"""Files of the host that a frozen tree still needs: what it maps and has open, and whether it is still the same.

The clean pages of a mapped library are in no process image; a restored process reads them from the file again. With
another file at the same path it would run other code, at best crash. So a capture records path, size and
SHA-256 of every such file, and `explain`, `prepare` and `restore` compare them.

Hashing costs about a second for the 0.6 GB of a torch process on 2 cores; `proofs` is a file that remembers the
digest of a file's identity (device, inode, size, mtime, ctime), so that only the first look pays, and later ones
take milliseconds. CRIU's own check (size and build id) is weaker and comes only in the middle of a restore.

A path counts only where the unit and this process see the same file there: what a unit sees through a mount of
its own is placement, and its private tmpfs travels in the capsule. Files open for writing are recorded without a
digest. What is imported lazily after a restore is not seen here.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from pydantic import Field

from coldsnap.capsule.aside import num_cores
from coldsnap.capsule.tree import FdKind, TreeFacts
from coldsnap.core.bindings import HostFile, HostFilesBinding
from coldsnap.core.canonical import canonical_json
from coldsnap.core.digest import Digest
from coldsnap.core.names import Items
from coldsnap.core.parsing import Record, parse_document
from coldsnap.errors import ColdsnapError, HostError, Problem
from coldsnap.store.documents import read_private, try_replace
from coldsnap.store.faults import translated

__all__ = ["PROOFS_NAME", "check_host_files", "host_files"]

PROOFS_NAME = "host-files.json"
"""Name of the file of proofs, in a state root's ``prepared`` folder."""

_LIMIT_BYTES = 16 * 1024 * 1024
_PIECE_BYTES = 4 * 1024 * 1024
_CLOCK_TICK_NS = 20_000_000  # file times advance in steps of up to 10 ms
_CURE = "restore where the same versions are installed at the same paths, or capture again here"


class _Proof(Record):
    path: str
    device: int
    inode: int
    bytes: int = Field(ge=0)
    mtime_ns: int
    ctime_ns: int
    sha256: Digest


class _Proofs(Record):
    format: Literal[1] = 1
    kind: Literal["coldsnap-host-file-proofs"] = "coldsnap-host-file-proofs"
    files: Items[_Proof]


def host_files(tree: TreeFacts, *, proofs: Path | None = None, num_threads: int = 0) -> tuple[HostFile, ...]:
    """The host files that the living processes of ``tree`` map or have open, sorted by path.

    Raises HostError when one cannot be read.
    """
    hasher = _Hasher(proofs, num_threads)
    wanted = dict(sorted(_seen(tree).items()))
    digests = hasher.digests([path for path, written in wanted.items() if not written])
    return tuple(HostFile(path=path, bytes=_stat(path).st_size, sha256=digests.get(path)) for path in wanted)


def check_host_files(
    binding: HostFilesBinding, *, proofs: Path | None = None, num_threads: int = 0
) -> tuple[Problem, ...]:
    """Every file of the binding that is not here as it was; sizes first, and digests only where sizes agree."""
    problems: dict[str, Problem] = {}
    same_size = []
    for file in binding.files:
        try:
            status = Path(file.path).stat()
        except OSError as error:
            message = f"the captured processes map this file, and it cannot be read: {error.strerror}"
            problems[file.path] = Problem(field=file.path, message=message, cure=_CURE)
            continue
        if not stat.S_ISREG(status.st_mode) or status.st_size != file.bytes:
            message = f"the captured processes map this file with {file.bytes} bytes"
            problems[file.path] = Problem(field=file.path, message=message, value=f"{status.st_size} bytes", cure=_CURE)
        elif file.sha256 is not None:
            same_size.append(file)
    try:
        digests = _Hasher(proofs, num_threads).digests([file.path for file in same_size])
    except HostError as error:
        return (*problems.values(), Problem(field="host files", message=error.message, cure=error.cure))
    for file in same_size:
        if digests[file.path] != file.sha256:
            message = f"is another file than the captured processes map, which has digest {file.sha256}"
            problems[file.path] = Problem(field=file.path, message=message, value=str(digests[file.path]), cure=_CURE)
    return tuple(problems[file.path] for file in binding.files if file.path in problems)


def _seen(tree: TreeFacts) -> dict[str, bool]:
    """Path -> whether somebody writes to it."""
    seen: dict[str, bool] = {}
    for process in tree.processes:
        uses = [
            (mapping.path, "w" in mapping.perms and "s" in mapping.perms)
            for mapping in process.maps
            if not mapping.deleted
        ]
        uses += [(fd.target, fd.writes) for fd in process.fds if fd.kind is FdKind.REGULAR and not fd.deleted]
        for path, writes in uses:
            if path is not None and path.startswith("/") and (path in seen or _is_shared(process.pid, path)):
                seen[path] = writes or seen.get(path, False)
    return seen


def _is_shared(pid: int, path: str) -> bool:
    """Whether the process and we see the same regular file at ``path``."""
    try:
        here, there = Path(path).stat(), Path(f"/proc/{pid}/root{path}").stat()
    except OSError:
        return False
    return stat.S_ISREG(here.st_mode) and os.path.samestat(here, there)


class _Hasher:
    """SHA-256 of files, remembered by identity."""

    def __init__(self, proofs: Path | None, num_threads: int) -> None:
        self._path = proofs
        self._num_threads = num_threads or num_cores()
        self._known = {proof.path: proof for proof in _read_proofs(proofs)}

    def digests(self, paths: Iterable[str]) -> dict[str, Digest]:
        found: dict[str, Digest] = {}
        unproved = []
        for path in paths:
            proof = self._known.get(path)
            if proof is not None and _identity(_stat(path)) == _identity_of(proof):
                found[path] = proof.sha256
            else:
                unproved.append(path)
        if unproved:
            largest_first = sorted(unproved, key=lambda path: -_stat(path).st_size)
            with ThreadPoolExecutor(self._num_threads, thread_name_prefix="host-files") as pool:
                for proof in pool.map(_prove, largest_first):
                    found[proof.path] = proof.sha256
                    self._known[proof.path] = proof
            self._remember()
        return found

    def _remember(self) -> None:
        if self._path is None:
            return
        record = _Proofs(files=tuple(proof for _, proof in sorted(self._known.items())))
        try_replace(self._path, canonical_json(record.model_dump(mode="json")) + b"\n")


def _read_proofs(path: Path | None) -> tuple[_Proof, ...]:
    if path is None:
        return ()
    try:
        data = read_private(path, _LIMIT_BYTES, only_ours=True)
        return parse_document(_Proofs, data, subject=path.name, limit_bytes=_LIMIT_BYTES).files
    except ColdsnapError:
        return ()  # none yet, or one that is not to be believed: hash again


def _stat(path: str) -> os.stat_result:
    with translated("look at", path):
        return Path(path).stat()


def _prove(path: str) -> _Proof:
    with translated("read", path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb", buffering=0) as file:
            _wait_for_the_clock(fd)
            before = os.fstat(fd)
            state = hashlib.sha256()
            while piece := file.read(_PIECE_BYTES):
                state.update(piece)
            if _identity(os.fstat(fd)) != _identity(before):
                raise HostError(f"{path} changed while it was read", cure="wait until its upgrade has ended")
    device, inode, size, mtime_ns, ctime_ns = _identity(before)
    return _Proof(
        path=path,
        device=device,
        inode=inode,
        bytes=size,
        mtime_ns=mtime_ns,
        ctime_ns=ctime_ns,
        sha256=Digest.from_hash(state),
    )


def _wait_for_the_clock(fd: int) -> None:
    """A change in the same tick as the file's last one would leave its times as they are; let the tick pass."""
    age_ns = time.time_ns() - os.fstat(fd).st_ctime_ns
    if 0 <= age_ns < _CLOCK_TICK_NS:
        time.sleep((_CLOCK_TICK_NS - age_ns) / 1e9)


def _identity(status: os.stat_result) -> tuple[int, int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _identity_of(proof: _Proof) -> tuple[int, int, int, int, int]:
    return proof.device, proof.inode, proof.bytes, proof.mtime_ns, proof.ctime_ns
