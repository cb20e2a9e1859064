"""What a forked child must not have of its parent: ends of the unit's private sockets, and its event loops.

The front forks the engine process while its sockets are answered by threads. A connection that happened to be open
stays open in the child, so whoever is at its other end would wait for ever to see it closed; and the child would
carry listening sockets of the front into its image. An epoll descriptor is worse: it is one object with the parent's,
and names what it watches by the parent's numbers, which mean other files in the child, so that CRIU cannot dump it.
`exec` closes all that, a fork does not.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

__all__ = ["drop_epolls", "drop_sockets", "guard_forks"]

_EPOLL = "anon_inode:[eventpoll]"


def guard_forks(sockets: Collection[Path]) -> None:
    """From now on, no child of this process keeps an end of a Unix socket that is bound at one of these paths, or an
    epoll descriptor."""
    os.register_at_fork(after_in_child=lambda: _in_child(sockets))


def _in_child(sockets: Collection[Path]) -> None:
    with suppress(ValueError):  # not the main thread: then it has none
        signal.set_wakeup_fd(-1)  # the parent's event loop would be told of the child's signals
    drop_sockets(sockets)
    drop_epolls()


def drop_sockets(sockets: Collection[Path]) -> int:
    """Put `/dev/null` in the place of each such socket; how many there were.

    Its number stays taken: an object of the parent that still thinks it owns it may close it at any time.
    """
    return _drop(lambda number: stat.S_ISSOCK(os.fstat(number).st_mode) and _leads_to(number, sockets))


def drop_epolls() -> int:
    """The same for each epoll descriptor."""
    return _drop(lambda number: str(Path(f"/proc/self/fd/{number}").readlink()) == _EPOLL)


def _drop(unwanted: Callable[[int], bool]) -> int:
    dropped = 0
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # the descriptor of this very listing is gone by now
                if unwanted(int(entry.name)):
                    os.dup2(null, int(entry.name), inheritable=False)
                    dropped += 1
    finally:
        os.close(null)
    return dropped


def _leads_to(descriptor: int, sockets: Collection[Path]) -> bool:
    end = socket.socket(fileno=descriptor)
    try:
        if end.family != socket.AF_UNIX:
            return False
        names = [end.getsockname()]
        with suppress(OSError):  # a listening socket has no peer
            names.append(end.getpeername())
        return any(isinstance(name, str) and Path(name) in sockets for name in names)
    finally:
        end.detach()
