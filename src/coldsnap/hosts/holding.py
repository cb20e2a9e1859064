"""Ctrl-C at a moment that can be cleaned up after."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["signals_held_back"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_held_back() -> Iterator[None]:
    """What SIGINT and SIGTERM do waits for the end of the block; only the first of them counts.

    For short work that must not be cut in two, as starting a thread: Python raises KeyboardInterrupt between the
    start and the pool's note of it, and the thread then waits for ever while the interpreter waits for the thread.
    Off the main thread there is nothing to hold back, because Python runs handlers on the main thread alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)

    usual = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}
    for number in usual:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
    if held:
        signal.raise_signal(held[0])
