"""Listening TCP sockets that a worker alone in its world has for peers that never come.

PyTorch makes a listener for each process group over gloo, and vLLM several groups, whatever their size. Frozen with the
process they would want the same ports of whatever host it is restored on, and CRIU 4.1.1 cannot dump them at all on a
kernel of 6.18, which no longer tells two of a TCP socket's options.

Gloo's thread waits for such a socket in an epoll, and takes it out again at its end, where it does not survive that the
socket is not in there. So an eventfd that never says anything takes the socket's number and its place in the epoll.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["close_listeners"]

_FDS = Path("/proc/self/fd")


def close_listeners() -> int:
    """Close every listening TCP socket of this process that some epoll of it watches; how many there were.

    Whoever waits in that epoll waits for ever. For a process in which nobody will connect to it.
    """
    watching = dict(_watched())
    closed = 0
    for number in [one for one in watching if _is_listener(one)]:
        silent = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            os.dup2(silent, number, inheritable=False)  # the socket leaves the epoll with its last descriptor
        finally:
            os.close(silent)
        with suppress(FileExistsError):  # it has another descriptor, and is still in there
            _epoll(watching[number]).register(number, select.EPOLLIN)
        closed += 1
    return closed


def _watched() -> Iterator[tuple[int, int]]:
    """(descriptor, the epoll that watches it)."""
    for path in list(_FDS.iterdir()):
        with suppress(OSError):  # closed meanwhile
            if str(path.readlink()) == "anon_inode:[eventpoll]":
                for line in Path(f"/proc/self/fdinfo/{path.name}").read_text(encoding="ascii").splitlines():
                    if line.startswith("tfd:"):
                        yield int(line.split()[1]), int(path.name)


def _is_listener(number: int) -> bool:
    try:
        one = socket.socket(fileno=os.dup(number))
    except OSError:  # no socket
        return False
    with one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            return False
        return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _epoll(number: int) -> select.epoll:
    """The epoll by its number, which stays open when this object goes."""
    return select.epoll.fromfd(os.dup(number))
