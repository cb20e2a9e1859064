"""Which workers of one engine are quiet, and when the engine itself must be put to sleep and resumed.

vLLM puts all its workers to sleep at once, coldsnap each by itself. So the engine sleeps as soon as the first worker
asks, and resumes when the last one has its memory back: the engine is asleep exactly while one worker is quiet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["QuietWorkers"]


class QuietWorkers:
    """The workers that have been told to be quiet and not yet to resume. Thread-safe; both acts run one at a time."""

    def __init__(self, sleep: Callable[[], None], resume: Callable[[], None]) -> None:
        self._sleep = sleep
        self._resume = resume
        self._quiet: frozenset[str] = frozenset()
        self._lock = threading.Lock()

    @property
    def names(self) -> frozenset[str]:
        """Who is quiet now. Never waits for an act."""
        return self._quiet

    def quiet(self, worker: str) -> None:
        """The engine sleeps when this returns. Idempotent; raises what `sleep` raises, and then nothing changed."""
        with self._lock:
            if not self._quiet:
                self._sleep()
            self._quiet |= {worker}

    def resume(self, worker: str) -> None:
        """This worker has its memory; the last of them resumes the engine.

        Does nothing for a worker that is not quiet. Raises what `resume` raises, and then the worker is still quiet.
        """
        with self._lock:
            left = self._quiet - {worker}
            if self._quiet and not left:
                self._resume()
            self._quiet = left
