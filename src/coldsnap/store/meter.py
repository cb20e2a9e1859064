"""Progress and cancellation of work that several threads do together."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from coldsnap.errors import OperationInterrupted

__all__ = ["Meter", "num_threads_or_cores", "run_all"]

T = TypeVar("T")


class Meter:
    """Counts bytes for ``progress`` and stops work when ``cancel`` is set. Safe to share between threads.

    ``undone`` says in the error what became of the unfinished work.
    """

    def __init__(self, progress: Callable[[int], None] | None, cancel: threading.Event | None, *, undone: str) -> None:
        self._progress = progress
        self._cancel = cancel
        self._undone = undone
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Another part of the work failed: every ``check`` from now on raises."""
        self._stopped.set()

    def check(self) -> None:
        """Raises OperationInterrupted when the work is to stop."""
        if self._stopped.is_set() or (self._cancel is not None and self._cancel.is_set()):
            raise OperationInterrupted(f"cancelled: {self._undone}")

    def advance(self, num_bytes: int) -> None:
        """``num_bytes`` more are done. Raises OperationInterrupted when the work is to stop."""
        self.check()
        if self._progress is not None:
            self._progress(num_bytes)


def num_threads_or_cores(num_threads: int) -> int:
    """``num_threads``, or for 0 the number of cores this process may use."""
    return num_threads if num_threads > 0 else len(os.sched_getaffinity(0))


class _NotBegun(Exception):
    """A task was not begun, because another had failed."""


def run_all(tasks: Iterable[Callable[[], T]], *, num_threads: int, meter: Meter) -> list[T]:
    """The results of all tasks, in order, run by up to ``num_threads`` threads (0: one per core).

    The first error stops the rest (through ``meter``) and is raised once no thread is running any more. A task that
    had not begun when another failed never does.
    """
    failing = threading.Event()

    def begin(task: Callable[[], T]) -> T:
        if failing.is_set():
            raise _NotBegun
        try:
            return task()
        except BaseException:
            failing.set()
            raise

    pool = ThreadPoolExecutor(max_workers=num_threads_or_cores(num_threads), thread_name_prefix="coldsnap-store")
    try:
        futures = [pool.submit(begin, task) for task in tasks]
        done, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        failed = [one for one in done if one.exception() is not None]
        if failed:
            meter.stop()
            for one in waiting:
                one.cancel()
            wait(futures)
            errors = [one.exception() for one in futures if not one.cancelled()]
            raise _first_error([error for error in errors if not isinstance(error, _NotBegun)])
        return [one.result() for one in futures]
    except BaseException:
        meter.stop()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _first_error(errors: list[BaseException | None]) -> BaseException:
    """The error that started it: those who were stopped because of it only say that they were cancelled."""
    found = [error for error in errors if error is not None]
    return next((error for error in found if not isinstance(error, OperationInterrupted)), found[0])
