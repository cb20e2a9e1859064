"""One attempt at one object: streams that write ranges, and a hash that follows them in order.

The hash runs in the caller's thread and reads back what a stream wrote a moment ago, so network, disk and SHA-256 each
have a core where there are enough. There is one stream at first. Another joins, up to the limit, whenever the hash
spent most of a while waiting for bytes: over a link with latency that is soon, and on a loopback never, where more
streams only fight over the cores that the server needs too.

A stream asks for several missing ranges in a row at once, because a store may look up, redirect and count every
request; each range is marked as soon as it is there.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from coldsnap.core.digest import Digest
from coldsnap.errors import RemoteError
from coldsnap.ship.base import PIECE_BYTES, Item, Progress, Source
from coldsnap.ship.faults import TRANSIENT, remote_error
from coldsnap.ship.limits import Limits, pause, stop_if_cancelled
from coldsnap.store.faults import translated
from coldsnap.store.staging import write_all
from coldsnap.store.writeback import begin_writeback

__all__ = ["TAIL_HEAD_BYTES", "Attempt", "wants_stream"]

TAIL_HEAD_BYTES = 8
_WAIT_S = 0.1
_LEAVE_S = 2.0
_WINDOW_S = 0.25


def wants_stream(*, waited_s: float, elapsed_s: float) -> bool:
    """Whether another stream is worth it, when the hash waited for bytes so long of the time that passed."""
    return elapsed_s >= _WINDOW_S and waited_s > 0.5 * elapsed_s


@dataclass
class Attempt:
    """``prepare``, then ``run``. The file's layout is in ``pull.py``."""

    source: Source
    item: Item
    size: int
    fd: int
    limits: Limits
    progress: Progress
    cancel: threading.Event | None
    _done: bytearray = field(default_factory=bytearray)
    _resumed: bytes = b""
    _range: int = 0
    _next: int = 0
    _reached: dict[int, int] = field(default_factory=dict)
    _threads: list[threading.Thread] = field(default_factory=list)
    _fault: BaseException | None = None
    _turn: threading.Condition = field(default_factory=threading.Condition)
    _stop: threading.Event = field(default_factory=threading.Event)

    def prepare(self, path: Path) -> bool:
        """Reserve the file and read its tail; whether there are ranges of an earlier attempt. Raises OutOfSpace."""
        length = os.fstat(self.fd).st_size
        self._range = self.limits.range_bytes
        if length > self.size + TAIL_HEAD_BYTES:
            stated = int.from_bytes(os.pread(self.fd, TAIL_HEAD_BYTES, self.size), "big")
            count = -(-self.size // stated) if stated else 0
            if stated and length == self.size + TAIL_HEAD_BYTES + count:
                self._range = stated
                self._done = bytearray(os.pread(self.fd, count, self.size + TAIL_HEAD_BYTES))
                self._resumed = bytes(self._done)
                return any(self._done)
        count = -(-self.size // self._range)
        with translated(f"reserve {self.size} bytes for", path):
            os.ftruncate(self.fd, 0)
            try:
                os.posix_fallocate(self.fd, 0, self.size + TAIL_HEAD_BYTES + count)
            except OSError:
                os.ftruncate(self.fd, 0)
                raise
            os.pwrite(self.fd, self._range.to_bytes(TAIL_HEAD_BYTES, "big"), self.size)
        self._done = bytearray(count)
        self._resumed = bytes(count)
        return False

    def run(self) -> Digest:
        """Bring what is missing and give the digest of everything."""
        try:
            if 0 in self._done:
                self._add_stream()
            return self._hash()
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(_LEAVE_S)  # one that waits for a silent server still holds the file's lock

    # -- the hash ---------------------------------------------------------------------------------------------

    def _hash(self) -> Digest:
        state = hashlib.sha256()
        buffer = memoryview(bytearray(min(PIECE_BYTES, max(self.size, 1))))
        offset = 0
        begun, waited_s = time.monotonic(), 0.0
        while offset < self.size:
            stop_if_cancelled(self.cancel)
            reached, pause_s = self._await(offset)
            waited_s += pause_s
            if (elapsed_s := time.monotonic() - begun) >= _WINDOW_S:
                if wants_stream(waited_s=waited_s, elapsed_s=elapsed_s):
                    self._add_stream()
                begun, waited_s = time.monotonic(), 0.0
            while offset < reached:
                with translated("read back", self.item.digest.hex):
                    count = os.preadv(self.fd, [buffer[: reached - offset]], offset)
                state.update(buffer[:count])
                offset += count
        return Digest.from_hash(state)

    def _await(self, offset: int) -> tuple[int, float]:
        """To where the file is written from ``offset`` on, at most a wait and a range from now; the seconds waited."""
        index = offset // self._range
        start, end = self._bounds(index)
        if self._resumed[index] and offset == start:
            self.progress(end - start)
        with self._turn:
            if (reached := self._written(index)) > offset:
                return reached, 0.0
            if self._fault is not None:
                raise self._fault
            begun = time.monotonic()
            self._turn.wait(_WAIT_S)
            return self._written(index), time.monotonic() - begun

    def _written(self, index: int) -> int:
        start, end = self._bounds(index)
        return end if self._done[index] else self._reached.get(index, start)

    def _bounds(self, index: int) -> tuple[int, int]:
        return index * self._range, min((index + 1) * self._range, self.size)

    # -- the streams ------------------------------------------------------------------------------------------

    def _add_stream(self) -> None:
        if len(self._threads) >= self.limits.num_streams or self._next >= len(self._done):
            return
        name = f"pull-{len(self._threads)}"
        thread = threading.Thread(target=self._stream, args=(os.dup(self.fd),), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _take(self) -> tuple[int, int] | None:
        """The next missing ranges in a row that nobody brings, as many as one request asks for: first and end."""
        with self._turn:
            while self._next < len(self._done) and self._done[self._next]:
                self._next += 1
            if self._next >= len(self._done) or self._stop.is_set():
                return None
            first = self._next
            most = first + max(1, self.limits.request_bytes // self._range)
            while self._next < min(most, len(self._done)) and not self._done[self._next]:
                self._next += 1
            return first, self._next

    def _stream(self, fd: int) -> None:
        try:
            while (run := self._take()) is not None:
                self._bring(fd, *run)
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            with self._turn:
                self._fault = self._fault or error
                self._turn.notify_all()
            self._stop.set()
        finally:
            os.close(fd)

    def _bring(self, fd: int, first: int, last: int) -> None:
        """A row of ranges, from where it came to after each failure; failures count only while nothing arrives."""
        offset, end = first * self._range, self._bounds(last - 1)[1]
        failures = 0
        while offset < end:
            before = offset
            try:
                for piece in self.source.read(self.item, offset, end - offset):
                    with translated("write", self.item.digest.hex):
                        write_all(fd, piece, offset)
                    self._arrived(fd, offset, offset + len(piece))
                    offset += len(piece)
                    self.progress(len(piece))
                    if self._stop.is_set():
                        raise remote_error("broken", f"{self.item} was given up", place=self.source.name)
            except RemoteError as error:
                failures = 1 if offset > before else failures + 1
                asked = error.facts.get("retry_after_s")
                asked_s = float(asked) if isinstance(asked, int | float) else None
                if error.reason not in TRANSIENT or failures >= self.limits.attempts or self._stop.is_set():
                    raise
                if asked_s is not None and asked_s > self.limits.retry_after_s:
                    raise
                pause(self.limits, failures, asked_s=asked_s, cancel=self._stop)

    def _arrived(self, fd: int, start: int, end: int) -> None:
        """Bytes of a row are written up to ``end``: mark the ranges that this made whole, and wake the hash."""
        index = start // self._range
        while index < len(self._done) and self._bounds(index)[1] <= end:
            os.pwrite(fd, b"\1", self.size + TAIL_HEAD_BYTES + index)
            with self._turn:
                self._done[index] = 1
                self._turn.notify_all()
            begin_writeback(fd, index * self._range, self._range)
            index += 1
        with self._turn:
            self._reached[index] = end
            self._turn.notify_all()
