"""A transfer's work, handed out from both ends: windows from the front of the file, blocks from its back.

Whoever registers windows and whoever reads blocks meet where their speeds say, and nobody has to know
these beforehand.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence

from coldsnap.hydrate.cuda.plan import Block, Window, blocks_of

__all__ = ["Work"]


class Work:
    """Windows that nobody has taken yet. Thread-safe."""

    def __init__(self, windows: Sequence[Window], *, block_bytes: int) -> None:
        self._lock = threading.Lock()
        self._windows = deque(windows)
        self._blocks: Iterator[Block] = iter(())
        self._block_bytes = block_bytes
        self.registered_bytes = 0
        self.ring_bytes = 0

    def take_window(self) -> Window | None:
        """The first window; None when there is none any more."""
        with self._lock:
            if not self._windows:
                return None
            window = self._windows.popleft()
            self.registered_bytes += window.payload_bytes
            return window

    def put_back(self, window: Window) -> None:
        """This window cannot go the way it was taken for."""
        with self._lock:
            self.registered_bytes -= window.payload_bytes
            self._windows.appendleft(window)

    def take_block(self) -> Block | None:
        """A block of the last window; None when there is none any more."""
        with self._lock:
            block = next(self._blocks, None)
            if block is None:
                if not self._windows:
                    return None
                self._blocks = blocks_of(self._windows.pop().rows, block_bytes=self._block_bytes)
                block = next(self._blocks)
            self.ring_bytes += block.payload_bytes
            return block

    @property
    def is_done(self) -> bool:
        """Whether everything was taken."""
        with self._lock:
            return not self._windows
