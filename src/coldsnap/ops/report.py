"""How a verb tells its caller what it is doing, without printing.

``cli`` shows phases as progress bars; libraries and tests pass ``Silent``. A reporter never raises and
may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["Advance", "Reporter", "Silent"]


class Advance(Protocol):
    """Called with the number of bytes done since the last call."""

    def __call__(self, num_bytes: int, /) -> None: ...


class Reporter(Protocol):
    """See the module's head."""

    @contextmanager
    def phase(self, title: str, *, total_bytes: int | None = None) -> Iterator[Advance]:
        """A step with a beginning and an end; without ``total_bytes`` its length is unknown."""
        raise NotImplementedError
        yield

    def note(self, text: str) -> None:
        """Something worth a line."""

    def warn(self, text: str) -> None:
        """Something the reader should act on, though the operation goes on."""


class Silent:
    """A reporter that says nothing."""

    @contextmanager
    def phase(self, title: str, *, total_bytes: int | None = None) -> Iterator[Advance]:
        yield lambda num_bytes, /: None

    def note(self, text: str) -> None:
        return

    def warn(self, text: str) -> None:
        return
