"""Putting moved memory back into the stopped processes of a unit, by as many threads as there are cores.

A program of its own, forked by the init, so that the init goes on watching its controller: it ends with the unit.
Standard library only. Threads, because copying is one system call of which Python's lock is no part; a mapping of
the file, because the kernel then copies straight from the page cache into the process. It is there before the tree
is: while CRIU works, one thread has the mapping's pages made ready.

Measured, seconds of one core for 1 GiB out of a tmpfs (AMD EPYC, Linux 6.18): new pages of the process 0.36, pages of
the mapping 0.10, the copy 0.10 to 0.12. So most of it is the kernel making pages, and what was tried against that:

- Through a buffer with preadv instead of a mapping: 0.67 in all instead of 0.57, with buffers of 128 KiB to 4 MiB.
- MAP_POPULATE for the mapping: the same 0.10, by one thread, with the others waiting.
- Huge pages in the process (CRIU would set them from its image): 0.27 in all when the kernel has some at hand, and
  1.6 to 2.7 when it must move memory about to get them. What came back fast once may not do so twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import itertools
import json
import os
import stat
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from coldsnap.capsule import linux

__all__ = ["Damaged", "become_refill", "refill", "tasks_of"]

_PIECE_BYTES = 8 * 1024 * 1024  # of which one digest is (dumped.PROVED_BYTES)
_MAX_PIECES = 512  # of one call; the kernel takes 1024
_MAX_THREADS = 32


class Damaged(Exception):
    """A file does not hold what it should."""


class _Task:
    """One proved stretch of a runs file and where in its process it belongs."""

    __slots__ = ("name", "offset", "pid", "pieces", "sha256", "size", "source")

    def __init__(self, pid: int, name: str, offset: int, size: int, sha256: str, pieces: list[tuple[int, int]]) -> None:
        self.pid = pid
        self.name = name
        self.offset = offset
        self.size = size
        self.sha256 = sha256
        self.pieces = pieces
        self.source = 0

    def run(self, *, proved: bool) -> None:
        """Prove the bytes unless that was done, and write them. Raises Damaged, OSError."""
        if not proved:
            found = hashlib.sha256((ctypes.c_char * self.size).from_address(self.source)).hexdigest()
            if found != self.sha256:
                raise Damaged(f"{self.name} is damaged between byte {self.offset} and {self.offset + self.size}")
        source = self.source
        for first in range(0, len(self.pieces), _MAX_PIECES):
            some = self.pieces[first : first + _MAX_PIECES]
            expected = sum(size for _, size in some)
            try:
                written = linux.write_memory(self.pid, source, some)
            except OSError as error:
                if error.errno != errno.EFAULT:
                    raise
                written = 0
            if written != expected:
                address = next(_behind(some, written))
                message = f"process {self.pid} has no memory to write at {address:#x}"
                raise OSError(errno.EFAULT, message, self.name)
            source += expected


def _behind(pieces: list[tuple[int, int]], written: int) -> Iterator[int]:
    for address, size in pieces:
        if written < size:
            yield address + written
        written = max(0, written - size)


def tasks_of(one: dict[str, Any]) -> list[_Task]:
    """The work for one process: ``pid``, ``name``, ``pieces`` and ``sha256`` as in ``unit.json``."""
    tasks = []
    pieces = [(address, size) for address, size in reversed(one["pieces"])]
    offset = 0
    for sha256 in one["sha256"]:
        mine: list[tuple[int, int]] = []
        size = 0
        while pieces and size < _PIECE_BYTES:
            address, length = pieces.pop()
            take = min(length, _PIECE_BYTES - size)
            mine.append((address, take))
            size += take
            if take < length:
                pieces.append((address + take, length - take))
        tasks.append(_Task(one["pid"], one["name"], offset, size, sha256, mine))
        offset += size
    return tasks


def refill(images_fd: int, memory: list[dict[str, Any]], go_fd: int, *, proved: bool) -> None:
    """Put everything back, once something can be read from ``go_fd``. Raises Damaged and OSError, naming the file."""
    tasks: list[_Task] = []
    for one in memory:
        base = _map(images_fd, one["name"], sum(size for _, size in one["pieces"]))
        for task in tasks_of(one):
            task.source = base + task.offset
            tasks.append(task)
    go = threading.Event()
    ahead = threading.Thread(target=_make_ready, args=(tasks, go))
    ahead.start()
    told = os.read(go_fd, 1)
    go.set()
    ahead.join()
    if told:
        _put_back(tasks, proved=proved)


def _make_ready(tasks: list[_Task], go: threading.Event) -> None:
    for task in tasks:
        if go.is_set():
            return
        with contextlib.suppress(OSError):  # an older kernel makes them when they are read
            linux.populate(task.source, task.size)


def _put_back(tasks: list[_Task], *, proved: bool) -> None:
    turn = itertools.count()
    failures: list[Exception] = []

    def work() -> None:
        while not failures and (number := next(turn)) < len(tasks):
            try:
                tasks[number].run(proved=proved)
            except (Damaged, OSError) as error:
                failures.append(error)

    num_threads = min(len(tasks), len(os.sched_getaffinity(0)), _MAX_THREADS)
    threads = [threading.Thread(target=work) for _ in range(num_threads - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _map(images_fd: int, name: str, size: int) -> int:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=images_fd)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            raise Damaged(f"{name} has {found.st_size} bytes instead of {size}")
        return linux.map_file(descriptor, size)
    finally:
        os.close(descriptor)


def become_refill(
    images_fd: int, memory: list[dict[str, Any]], go_fd: int, report_fd: int, *, proved: bool
) -> NoReturn:
    """In a forked child: put everything back and end. What went wrong goes to ``report_fd``, as one JSON object."""
    try:
        linux.set_name("coldsnap-refill")
        refill(images_fd, memory, go_fd, proved=proved)
        os._exit(0)
    except Damaged as error:
        _report(report_fd, {"damaged": True, "message": str(error)})
    except OSError as error:
        _report(report_fd, {"errno": error.errno, "message": str(error)})
    finally:
        os._exit(1)


def _report(report_fd: int, message: dict[str, Any]) -> None:
    os.write(report_fd, json.dumps(message).encode())
