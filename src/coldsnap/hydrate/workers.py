"""Threads that live exactly as long as one call.

The promise everything else in this room builds on: when ``run_together`` returns or raises, no thread
of it runs any more, so nobody writes to memory behind the caller's back. The first error wins and stops
the others; so does a set ``cancel`` event, and so does Ctrl-C in the calling thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from coldsnap.errors import OperationInterrupted

__all__ = ["Progress", "Stop", "num_cores", "run_together"]


class Stop:
    """Tells the threads of one call to come to an end; they ask between two pieces of work."""

    def __init__(self, cancel: threading.Event | None) -> None:
        self._cancel = cancel
        self._set = threading.Event()

    def set(self) -> None:
        """Make every ``requested`` true."""
        self._set.set()

    def requested(self) -> bool:
        """True when another thread failed. Raises OperationInterrupted when the caller cancelled."""
        if self._cancel is not None and self._cancel.is_set():
            raise OperationInterrupted("cancelled while bytes were moving; what was filled so far is not usable")
        return self._set.is_set()


class Progress:
    """Passes byte counts on, one call at a time, from any thread."""

    def __init__(self, callback: Callable[[int], None] | None) -> None:
        self._callback = callback
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """``count`` more bytes are done."""
        if self._callback is not None:
            with self._lock:
                self._callback(count)


def run_together(jobs: Sequence[Callable[[], None]], *, stop: Stop, name: str) -> None:
    """Run every job in a thread of its own and wait for all. Raises the first job's error."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - handed to the calling thread, whatever it is
            errors.append(error)
            stop.set()

    threads = [
        threading.Thread(target=guarded, args=(job,), name=f"{name}-{number}") for number, job in enumerate(jobs)
    ]
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
    except BaseException:  # no more threads to be had
        stop.set()
        _join_all(started, stop)
        raise
    _join_all(started, stop)
    if errors:
        raise errors[0]


def _join_all(threads: Sequence[threading.Thread], stop: Stop) -> None:
    """Wait for all. Ctrl-C, even more than once, only makes them end sooner, and is raised at the end."""
    interrupt: BaseException | None = None
    remaining = list(threads)
    while remaining:
        try:  # around the whole loop: an interrupt may come between any two steps of it
            while remaining:
                remaining[-1].join()
                remaining.pop()
        except BaseException as error:  # noqa: BLE001 - raised below, once nobody writes any more
            interrupt = interrupt or error
            stop.set()
    if interrupt is not None:
        raise interrupt


def num_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0))
