"""Asking the kernel about sockets by netlink: sock_diag(7), as `ss` does. What the bodies mean is `nettables`'s.

Raises OSError where the kernel refuses, or does not answer.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

__all__ = ["ask_sockets", "bodies_in"]

# linux/netlink.h, linux/sock_diag.h
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_NLM_F_REQUEST, _NLM_F_DUMP = 0x1, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_HEADER = struct.Struct("=IHHII")  # length with this header, type, flags, sequence, port
_RECEIVE_BYTES = 1 << 20
_ANSWER_TIMEOUT_S = 2.0


def ask_sockets(question: bytes) -> Iterator[bytes]:
    """The body of every answer to one question about all sockets of this network namespace."""
    flags = _NLM_F_REQUEST | _NLM_F_DUMP
    header = _HEADER.pack(_HEADER.size + len(question), _SOCK_DIAG_BY_FAMILY, flags, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as asking:
        asking.settimeout(_ANSWER_TIMEOUT_S)
        asking.sendto(header + question, (0, 0))
        finished = False
        while not finished:
            bodies, finished = bodies_in(asking.recv(_RECEIVE_BYTES))
            yield from bodies


def bodies_in(datagram: bytes) -> tuple[list[bytes], bool]:
    """The bodies in one datagram, and whether it ends the answer. Raises OSError on refusal."""
    bodies: list[bytes] = []
    while len(datagram) >= _HEADER.size:
        length, kind, *_ = _HEADER.unpack_from(datagram)
        if length < _HEADER.size:
            break
        body = datagram[_HEADER.size : length]
        if kind == _NLMSG_DONE:
            return bodies, True
        if kind == _NLMSG_ERROR:
            raise OSError(-struct.unpack_from("=i", body)[0], "sock_diag refused")
        bodies.append(body)
        datagram = datagram[(length + 3) & ~3 :]
    return bodies, False
