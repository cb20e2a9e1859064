"""A point in time that several phases share: what one phase used, the next cannot."""

from __future__ import annotations

import time

from coldsnap.errors import DeadlineExceeded

__all__ = ["Deadline"]


class Deadline:
    """``seconds`` from now, for the work called ``what``."""

    def __init__(self, what: str, seconds: float) -> None:
        self.what = what
        self.seconds = seconds
        self.started = time.monotonic()

    def remaining(self, phase: str) -> float:
        """Seconds left, above zero. Raises DeadlineExceeded naming the phase that had to stop."""
        left = self.started + self.seconds - time.monotonic()
        if left <= 0:
            raise self.exceeded(phase)
        return left

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def exceeded(self, phase: str) -> DeadlineExceeded:
        """The error of this deadline, for a phase that noticed by itself."""
        return DeadlineExceeded(
            f"{self.what} took longer than {self.seconds:g} s, in its phase {phase!r}",
            cure="allow more time, or see what keeps the machine busy",
            facts={"phase": phase, "deadline_s": self.seconds},
        )
