"""TCP sockets that a worker alone in its world has for peers that never come, and for itself.

PyTorch makes a listener for each process group over gloo, and vLLM several groups, whatever their size; its store is a
listener and a connection of the process to itself. Frozen with the process they would want the same ports of whatever
host it is restored on, and CRIU 4.1.1 cannot dump them at all on a kernel of 6.18, which no longer tells two of a TCP
socket's options.

A thread waits for them, gloo's in an epoll, the store's in a poll. So an eventfd that never says anything takes each
socket's number, and its place in the epoll: gloo does not survive that it is not in there. Accepted ends go first, then
listeners, then the ends that connected: a socket that is waited for stays open until its waiter looks up, which the end
of its peer makes the store's thread do, and that then finds what is no connection and forgets it.
"""

from __future__ import annotations

import ipaddress
import os
import select
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["close_own_tcp"]

_FDS = Path("/proc/self/fd")

_End = tuple[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tcp:
    """A TCP socket of this process; ``peer`` is None for one that is not connected."""

    number: int
    here: _End
    peer: _End | None
    listens: bool


def close_own_tcp(*, but_for: frozenset[int] = frozenset()) -> int:
    """Close the listening TCP sockets of this process, and its connections to itself; how many there were.

    A connection to anybody else stays as it is, for others to refuse. Whoever waits for one of these waits for ever.
    For a process in which nobody will connect to it; the descriptors ``but_for`` are left alone.
    """
    found = [one for one in _tcp_sockets() if one.number not in but_for]
    ends = {(one.here, one.peer) for one in found}
    own = [one for one in found if one.listens or (one.peer is not None and (one.peer, one.here) in ends)]
    ports = {one.here[1] for one in own if one.listens}
    watching = dict(_watched())
    for one in sorted(own, key=lambda one: (one.listens, not one.listens and one.here[1] not in ports)):
        _silence(one.number, watching.get(one.number))
    return len(own)


def _silence(number: int, epoll: int | None) -> None:
    """An eventfd in the place of a socket. A socket leaves an epoll with its last descriptor."""
    silent = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        os.dup2(silent, number, inheritable=False)
    finally:
        os.close(silent)
    if epoll is not None:
        with suppress(FileExistsError):  # it has another descriptor, and is still in there
            select.epoll.fromfd(os.dup(epoll)).register(number, select.EPOLLIN)


def _tcp_sockets() -> Iterator[_Tcp]:
    for path in list(_FDS.iterdir()):
        try:
            if not stat.S_ISSOCK(path.stat().st_mode):
                continue
            one = socket.socket(fileno=os.dup(int(path.name)))
        except OSError:  # closed meanwhile
            continue
        with one:
            if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                continue
            peer: _End | None = None
            with suppress(OSError):  # not connected
                peer = _end(one.getpeername())
            listens = bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            yield _Tcp(number=int(path.name), here=_end(one.getsockname()), peer=peer, listens=listens)


def _end(address: tuple[str, int]) -> _End:
    """Host and port; an IPv4 address in its IPv6 spelling is the IPv4 address."""
    host = ipaddress.ip_address(address[0])
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return str(mapped or host), address[1]


def _watched() -> Iterator[tuple[int, int]]:
    """(descriptor, the epoll that watches it)."""
    for path in list(_FDS.iterdir()):
        with suppress(OSError):  # closed meanwhile
            if str(path.readlink()) == "anon_inode:[eventpoll]":
                for line in Path(f"/proc/self/fdinfo/{path.name}").read_text(encoding="ascii").splitlines():
                    if line.startswith("tfd:"):
                        yield int(line.split()[1]), int(path.name)
