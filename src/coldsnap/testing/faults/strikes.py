"""One fault as a record, and the hook that carries it out inside the process it is meant for.

A strike names a crash point (``coldsnap.core.points``) or the number of a write boundary, and an act. The same record
works in the controller, where it is given, and in an engine process, which reads it from a file each time it is at a
point: a restored process has no other way to be told. What was reached, and that the strike fell, is noted in a file,
one line each, appended with one ``write``.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from coldsnap.core.parsing import Record
from coldsnap.testing.faults.processes import kill_criu_soon, newest_engine, newest_init

__all__ = ["Act", "Notes", "Strike", "Striker", "read_strike", "write_strike"]

_write, _open, _close = os.write, os.open, os.close  # the real ones, whatever is put around them later


class Act(StrEnum):
    """What happens at the point."""

    KILL = "kill"
    """SIGKILL to the process that is there."""
    INTERRUPT = "interrupt"
    """SIGINT to it."""
    BUG = "bug"
    """An exception that nobody expects."""
    FULL = "full"
    """OSError ENOSPC."""
    BROKEN = "broken"
    """OSError EIO."""
    MEMORY = "memory"
    """MemoryError."""
    STALL = "stall"
    """Nothing for ``seconds``."""
    STOP = "stop"
    """SIGSTOP to it: it is there and never answers again."""
    KILL_INIT = "kill-init"
    """SIGKILL to the newest unit's init."""
    KILL_ENGINE = "kill-engine"
    """SIGKILL to the newest unit's engine process."""
    STOP_ENGINE = "stop-engine"
    """SIGSTOP to it."""
    KILL_CRIU = "kill-criu"
    """SIGKILL to CRIU as soon as it runs."""


SIGKILLS = frozenset({Act.KILL, Act.KILL_INIT, Act.KILL_ENGINE, Act.KILL_CRIU})
"""Acts that send SIGKILL."""


class Strike(Record):
    """Do ``act`` when ``point`` is reached for the ``nth`` time, or at the ``nth`` write boundary.

    ``boundary`` makes ``nth`` count write boundaries; 0 then notes all of them and does nothing. ``tear`` leaves only a
    part of what is being written there, ``after`` lets the call happen first.
    """

    token: str
    act: Act
    point: str | None = None
    boundary: bool = False
    nth: int = 1
    tear: bool = False
    after: bool = False
    seconds: float = 0.0
    seed: int = 0


def write_strike(path: Path, strike: Strike) -> None:
    """Put the strike where an engine process looks for it."""
    aside = path.with_suffix(".new")
    aside.write_text(strike.model_dump_json())
    aside.rename(path)


def read_strike(path: Path) -> Strike | None:
    """The strike that is due, or None."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return Strike.model_validate_json(data)


class Notes:
    """Lines that several processes append to. A line is lost rather than a process disturbed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, *words: object) -> None:
        """One line."""
        with suppress(OSError):
            fd = _open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                _write(fd, (" ".join(map(str, words)) + "\n").encode())
            finally:
                _close(fd)

    def lines(self) -> list[list[str]]:
        """What was noted, split at spaces."""
        try:
            return [line.split() for line in self._path.read_text().splitlines()]
        except OSError:
            return []

    def clear(self) -> None:
        """Forget everything."""
        self._path.unlink(missing_ok=True)


class Striker:
    """A hook for ``points.install``; ``find`` gives the strike that is due now."""

    def __init__(self, find: Callable[[], Strike | None], notes: Notes, *, role: str) -> None:
        self._find = find
        self._notes = notes
        self._role = role
        self._lock = threading.Lock()
        self._token = ""
        self._count = 0

    def __call__(self, name: str) -> None:
        """A point was reached."""
        self._notes.add("point", self._role, name)
        strike = self._find()
        if strike is not None and not strike.boundary and strike.point == name and self._is_turn(strike):
            self.carry_out(strike)

    def boundary(self) -> Strike | None:
        """A write boundary was reached: the strike, when this is its turn. The caller carries it out."""
        strike = self._find()
        if strike is None or not strike.boundary:
            return None
        if strike.nth == 0:
            self._notes.add("write", self._role)
            return None
        return strike if self._is_turn(strike) else None

    def carry_out(self, strike: Strike) -> None:
        """Note it, then do it."""
        self._notes.add("struck", strike.token)
        _carry_out(strike)

    def _is_turn(self, strike: Strike) -> bool:
        with self._lock:
            if strike.token != self._token:
                self._token, self._count = strike.token, 0
            self._count += 1
            return self._count == strike.nth


def _carry_out(strike: Strike) -> None:
    match strike.act:
        case Act.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Act.INTERRUPT:
            os.kill(os.getpid(), signal.SIGINT)
        case Act.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Act.STALL:
            time.sleep(strike.seconds)
        case Act.BUG:
            raise RuntimeError(f"injected at {strike.point}")
        case Act.MEMORY:
            raise MemoryError(f"injected at {strike.point}")
        case Act.FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case Act.BROKEN:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        case Act.KILL_CRIU:
            kill_criu_soon()
        case Act.KILL_INIT:
            _signal(newest_init(), signal.SIGKILL)
        case Act.KILL_ENGINE:
            _signal(newest_engine(), signal.SIGKILL)
        case Act.STOP_ENGINE:
            _signal(newest_engine(), signal.SIGSTOP)


def _signal(pid: int | None, number: signal.Signals) -> None:
    if pid is None:
        raise AssertionError("there is no such process to hit: the case is wrong")
    with suppress(ProcessLookupError):
        os.kill(pid, number)
