"""Checking extents while others are still being read.

The extents of an unproved source are its segments, and the first wrong one ends the transfer. Those of an
``ExtentsProof`` may be larger than a segment; what is known of them outlives this transfer, and the wrong ones
are collected.

An extent is put into the queue when the part at its frontier (see ``extents``) arrives and nobody is hashing it;
the thread that takes it hashes as far as parts have arrived. Extents are hashed side by side, one extent never by
two threads.

The last reader to finish closes the queue. By then every part that arrived is either hashed, or in an
extent that is queued or in a hasher's hands, so nothing is forgotten; an extent that is not complete
then is one whose reader failed, or whose other parts come with another file.
"""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Sequence

from coldsnap.core.digest import Digest
from coldsnap.errors import IntegrityError, InternalError
from coldsnap.hydrate.extents import ExtentsProof, Frontier
from coldsnap.hydrate.memory import StableMemory
from coldsnap.hydrate.scan import read_chunks
from coldsnap.hydrate.segments import Piece, Segment
from coldsnap.hydrate.workers import Stop

__all__ = ["Verifier", "mismatch"]


class Verifier:
    """Hashes extents as their parts arrive and compares each with its digest.

    Without ``proof`` each segment is an extent, and has a digest.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        pieces: Sequence[Piece],
        memory: StableMemory,
        *,
        num_readers: int,
        num_hashers: int,
        proof: ExtentsProof | None = None,
    ) -> None:
        self._memory = memory
        self._queue: queue.SimpleQueue[tuple[int, ...] | None] = queue.SimpleQueue()
        self._num_readers = num_readers
        self.num_hashers = num_hashers
        self._proof = proof or ExtentsProof([(one.ptr, one.size, one.sha256) for one in segments if one.sha256])
        numbers = [self._proof.number(one.ptr, one.size) for one in segments]
        if None in numbers:
            raise InternalError("a segment without an extent reached the verifier")
        self._number = [number for number in numbers if number is not None]
        self._own = {} if proof is not None else dict(zip(self._number, segments, strict=True))
        self._lock = self._proof.lock
        self.verified_bytes = 0

    def arrived(self, piece: Piece) -> None:
        """A reader has filled ``piece``."""
        ready = []
        with self._lock:
            for part in piece.parts:
                number = self._number[part.segment]
                if part.size == self._proof.extent(number)[1]:
                    ready.append(number)
                    continue
                frontier = self._proof.frontier(number)
                frontier.arrived[part.ptr] = part.size
                if not frontier.busy and frontier.ready():
                    frontier.busy = True
                    ready.append(number)
            if ready:
                self._queue.put(tuple(ready))

    def reader_done(self) -> None:
        """A reader will fill no more pieces, for whatever reason. Once per reader."""
        with self._lock:
            self._num_readers -= 1
            if self._num_readers == 0:
                for _ in range(self.num_hashers):
                    self._queue.put(None)

    def hash_arrived(self, stop: Stop) -> None:
        """The work of one hasher: until the readers are done and all that arrived is hashed.

        Raises IntegrityError for the first segment whose bytes are not what was promised, without a proof.
        """
        while (numbers := self._queue.get()) is not None:
            verified = 0
            for number in numbers:
                if stop.requested():
                    return
                verified += self._hash(number, stop)
            with self._lock:
                self.verified_bytes += verified

    def _hash(self, number: int, stop: Stop) -> int:
        """Hash as far as parts have arrived; the extent's bytes if that was the end of it, else 0."""
        ptr, size = self._proof.extent(number)
        with self._lock:
            frontier = self._proof.frontier(number) if self._proof.comes_in_parts(number) else None
        if frontier is None:
            state = hashlib.sha256()
            self._update(state, ptr, size)
            self._compare(number, Digest.from_hash(state))
            return size
        while (part := self._take(frontier)) is not None:
            if stop.requested():
                return 0
            self._update(frontier.state, *part)
            if part[0] + part[1] == ptr + size:
                self._compare(number, Digest.from_hash(frontier.state))
                return size
        return 0

    def _update(self, state: hashlib._Hash, ptr: int, size: int) -> None:
        for chunk in read_chunks(self._memory, ptr, size):
            state.update(chunk)

    def _take(self, frontier: Frontier) -> tuple[int, int] | None:
        """The next part of an extent in our hands, as address and size.

        None when it has not arrived: the extent was given back, and from that moment another thread may have it,
        so nothing about it may be looked at any more.
        """
        with self._lock:
            size = frontier.arrived.pop(frontier.at, None)
            if size is None:
                frontier.busy = False
                return None
            part = (frontier.at, size)
            frontier.at += size
            return part

    def _compare(self, number: int, found: Digest) -> None:
        segment = self._own.get(number)
        if segment is not None and found != segment.sha256:
            raise mismatch(segment, found)
        self._proof.found(number, found)


def mismatch(segment: Segment, found: Digest) -> IntegrityError:
    """The bytes of ``segment`` are not what its digest promised."""
    return IntegrityError(
        f"{segment.size} bytes at file offset {segment.file_offset}, for address 0x{segment.ptr:x}, "
        f"have {found}, and {segment.sha256} was promised",
        cure="the file is damaged or belongs to another manifest: fetch or write it again",
        facts={
            "ptr": segment.ptr,
            "size": segment.size,
            "file_offset": segment.file_offset,
            "expected_sha256": str(segment.sha256),
            "found_sha256": str(found),
        },
    )
