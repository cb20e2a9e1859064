"""Seconds of the steps of one verb, by name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["timed"]


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Put the duration of the block into `seconds[name]`, also when it raises."""
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[name] = time.monotonic() - began
