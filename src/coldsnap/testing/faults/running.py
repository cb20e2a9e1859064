"""One verb in a process of its own, with at most one fault in it, and what became of it.

The child is forked from a process that has everything imported, so a verb costs what it costs and no start of Python.
It does what the command line does around a verb: SIGTERM is Ctrl-C, and errors end it. It is the controller of whatever
it starts; killing it is killing a controller.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from coldsnap.core.points import install
from coldsnap.errors import ColdsnapError, InternalError, InvalidDocument, Refused
from coldsnap.testing.faults.boundaries import watch
from coldsnap.testing.faults.processes import wait_gone
from coldsnap.testing.faults.strikes import Notes, Strike, Striker

__all__ = ["Child", "Outcome", "start"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a verb ended: ``done``, ``refused`` (coldsnap's own error), ``broken`` (any other), ``killed``, ``hung``."""

    status: str
    kind: str = ""
    text: str = ""
    notes: tuple[str, ...] = ()
    result: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """One line."""
        return " ".join(f"{self.kind}: {self.text}".split())[:160] if self.kind else self.text


@dataclass(frozen=True, slots=True)
class Child:
    """A verb that was started."""

    pid: int
    pipe: int

    def wait(self, timeout_s: float) -> Outcome:
        """Its outcome. One that is not over in time is killed, and ``hung``."""
        hung = not wait_gone(self.pid, timeout_s)
        if hung:
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        with open(self.pipe, "rb") as pipe:
            os.set_blocking(pipe.fileno(), False)  # somebody it started may have a copy of the other end
            said = pipe.read() or b""
        if hung:
            return Outcome(status="hung", text=f"not over after {timeout_s:g} s")
        if said:
            told = json.loads(said)
            return Outcome(**{**told, "notes": tuple(told["notes"])})
        return Outcome(status="killed", text=f"ended with {os.waitstatus_to_exitcode(status)}")


def start(
    verb: Callable[[], Mapping[str, Any] | None],
    *,
    notes: Notes,
    log: Path,
    strike: Strike | None = None,
    watched: Path | None = None,
    limits: Mapping[int, int] | None = None,
    user: int | None = None,
) -> Child:
    """Fork, and run ``verb`` there with ``strike`` due.

    Changes below ``watched`` are write boundaries. ``limits`` are resource limits; ``user`` is who it runs as.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return Child(pid, read_end)
    try:
        os.close(read_end)
        _become_verb(log)
        striker = Striker(lambda: strike, notes, role="controller")
        install(striker)
        if watched is not None:
            watch(striker, watched)
        for name, value in (limits or {}).items():
            resource.setrlimit(name, (value, value))
        if user is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        told = _outcome(verb)
        os.write(write_end, json.dumps(told, default=str).encode())
    finally:
        os._exit(0)


def _become_verb(log: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupted)
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _outcome(verb: Callable[[], Mapping[str, Any] | None]) -> dict[str, Any]:
    try:
        return {"status": "done", "result": dict(verb() or {}), "notes": []}
    except BaseException as error:  # noqa: BLE001 - the outcome of a struck verb is data, whatever it is
        ours = isinstance(error, ColdsnapError) and not isinstance(error, InternalError)
        with suppress(OSError):
            sys.stderr.write(traceback.format_exc())
            sys.stderr.flush()
        return {
            "status": "refused" if ours or isinstance(error, KeyboardInterrupt) else "broken",
            "kind": type(error).__name__,
            "text": _text(error),
            "notes": [str(note) for note in getattr(error, "__notes__", ())],
        }


def _text(error: BaseException) -> str:
    if isinstance(error, InvalidDocument | Refused) and error.problems:
        return f"{error.message}: {error.problems[0]}"
    return error.message if isinstance(error, ColdsnapError) else str(error)
