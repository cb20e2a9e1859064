"""A process that is the first of its own PID namespace, with mounts, a ``/run/coldsnap`` and a loopback of its own.

When it ends, by whatever means, the kernel ends everything that was started in it and takes its mounts away; and while
it lives, ``/proc`` shows everything that its work left running. It talks with the process that made it in lines of
JSON.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from coldsnap.capsule import linux
from coldsnap.errors import MissingCapability

__all__ = ["Lines", "Pen"]

_CLONE_NEWNET = 0x4000_0000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1
_RUN = Path("/run/coldsnap")
"""What units see as their own; outside of them nothing of coldsnap's is there, so what is found is left over."""


class Lines:
    """One end of the talk."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._in = end.makefile("r", encoding="utf-8")

    def fileno(self) -> int:
        """For poll."""
        return self._end.fileno()

    def say(self, value: Any) -> None:
        """Send one value."""
        self._end.sendall(json.dumps(value).encode() + b"\n")

    def hear(self) -> Any | None:
        """The next value; None when the other end is gone."""
        line = self._in.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        """No more."""
        self._in.close()
        self._end.close()


class Work(Protocol):
    """What runs in a pen."""

    def __call__(self, lines: Lines) -> None: ...


class Pen:
    """Runs ``work(lines)`` as the first process of new namespaces; what it raises is printed to ``log``.

    Raises MissingCapability without root. A context manager: leaving it ends everything inside.
    """

    def __init__(self, work: Work, log: Path) -> None:
        if os.geteuid() != 0:
            raise MissingCapability("namespaces need root", cure="run as root")
        ours, theirs = socket.socketpair()
        number_in, number_out = os.pipe()
        self._keeper = os.fork()
        if self._keeper == 0:
            _guarded(lambda: _outside(work, theirs, ours, number_out), log)
        theirs.close()
        os.close(number_out)
        self.lines = Lines(ours)
        with open(number_in, "rb") as pipe:
            number = pipe.read()
        self._first = -1
        with suppress(ProcessLookupError):  # it is over already, and everything in it
            if number:
                self._first = os.pidfd_open(int(number))

    def __enter__(self) -> Pen:
        return self

    def __exit__(self, *_: object) -> None:
        if self._first >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
            poll = select.poll()
            poll.register(self._first, select.POLLIN)
            poll.poll()  # it is gone when everything in its namespace is
            os.close(self._first)
        os.waitpid(self._keeper, 0)
        self.lines.close()


def _outside(work: Work, theirs: socket.socket, ours: socket.socket, number_out: int) -> None:
    """The keeper: it makes the namespaces, and lives as long as the first process in them."""
    ours.close()
    linux.die_with_parent()
    linux.unshare(linux.CLONE_NEWPID | linux.CLONE_NEWNS | _CLONE_NEWNET)
    pid = os.fork()
    if pid:
        theirs.close()
        os.write(number_out, str(pid).encode())
        os.close(number_out)
        os.waitpid(pid, 0)
        return
    os.close(number_out)
    linux.die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also when the campaign runs in the background
    linux.make_private()
    linux.mount_proc("/proc")
    _RUN.mkdir(mode=0o700, exist_ok=True)
    linux.mount_tmpfs(str(_RUN), size_bytes=0, mode=0o700)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    work(Lines(theirs))


def _guarded(act: Callable[[], None], log: Path) -> None:
    """Run ``act`` in a forked child, which never returns to what it was forked from."""
    status = 1
    try:
        fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        act()
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it is, it must be seen and must not go on
        sys.stderr.write(traceback.format_exc())
    finally:
        sys.stderr.flush()
        os._exit(status)
