"""Pure work for many workers, on every core: parsing is Python, and threads would share one.

Processes are started fresh (no state of this one is copied, so threads here do no harm), take small records, and give
small records back. Where no process can be started the same work is done here, only slower.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

__all__ = ["map_in_processes"]

_MAX_PROCESSES = 16
T = TypeVar("T")
R = TypeVar("R")


def map_in_processes(
    function: Callable[[T], R], tasks: Sequence[T], *, num_processes: int = 0, min_tasks: int = 8
) -> Iterator[R]:
    """``function`` of each task, in order. Both must be picklable, the function a module's own.

    ``num_processes`` 0 means one a core. With fewer than ``min_tasks`` tasks, or one process, everything runs here.
    """
    wanted = num_processes or min(len(os.sched_getaffinity(0)), _MAX_PROCESSES)
    done = 0
    if min(wanted, len(tasks)) > 1 and len(tasks) >= min_tasks:
        try:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(min(wanted, len(tasks)), mp_context=context, initializer=_settle) as pool:
                for result in pool.map(function, tasks):
                    done += 1
                    yield result
        except (BrokenProcessPool, OSError):
            pass  # killed, or no process, pipe or semaphore to be had: go on here
    for task in tasks[done:]:
        yield function(task)


def _settle() -> None:
    """Ctrl-C is the parent's business; and what is parsed has no cycles worth a collector's time (a fifth of it)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
