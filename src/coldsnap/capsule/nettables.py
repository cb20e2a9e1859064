"""The kernel's tables of sockets, parsed: ``/proc/net/{tcp,tcp6,udp,udp6,unix}`` and the peers of Unix sockets.

Pure parsers of text and bytes, plus two questions by netlink (`sockdiag`): which socket a Unix socket is connected to,
which ``/proc`` does not say, and who listens. To show its table of TCP the kernel looks into every slot that a
connection could have, 10 ms for an empty table and more where memory is large; listeners alone take it less than one.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Final

from coldsnap.capsule.sockdiag import ask_sockets, bodies_in

__all__ = [
    "InetSocket",
    "UnixSocket",
    "parse_inet",
    "parse_inet_diag",
    "parse_unix",
    "parse_unix_diag",
    "read_listeners",
    "read_unix_peers",
]

# include/net/tcp_states.h
_TCP_STATES: Final = {
    0x01: "established",
    0x02: "syn-sent",
    0x03: "syn-received",
    0x04: "fin-wait-1",
    0x05: "fin-wait-2",
    0x06: "time-wait",
    0x07: "close",
    0x08: "close-wait",
    0x09: "last-ack",
    0x0A: "listen",
    0x0B: "closing",
    0x0C: "new-syn-received",
}
_UNIX_KINDS: Final = {1: "stream", 2: "datagram", 5: "seqpacket"}
_ACCEPTING = 0x10000  # __SO_ACCEPTCON
_UNIX_LINE = re.compile(r"^[0-9a-fA-F]+: [0-9a-fA-F]+ \d+ ([0-9a-fA-F]+) ([0-9a-fA-F]+) (\d+) +(\d+)(?: (.*))?$")

_UDIAG_SHOW_PEER, _UNIX_DIAG_PEER = 0x4, 2  # linux/unix_diag.h

# linux/inet_diag.h
_DIAG_FAMILIES: Final = {socket.AF_INET: "tcp", socket.AF_INET6: "tcp6"}
_DIAG_QUESTION = struct.Struct("=BBBxI48x")  # family, protocol, extensions, states, no socket in particular
_DIAG_ANSWER = struct.Struct("=BB2x2s2s16s16s12x16xI")  # family, state, two ports, two addresses, counts, inode
_LISTEN = 0x0A


@dataclass(frozen=True, kw_only=True, slots=True)
class InetSocket:
    """One TCP or UDP socket. ``family`` is the table's name; ``remote_port`` is 0 when there is no peer."""

    family: str
    state: str
    local_host: str
    local_port: int
    remote_host: str
    remote_port: int
    inode: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnixSocket:
    """One Unix socket; ``path`` is None without a name and starts with ``@`` for an abstract one."""

    kind: str
    listening: bool
    inode: int
    path: str | None


def parse_inet(text: str, *, family: str) -> Iterator[InetSocket]:
    """The sockets of ``/proc/net/<family>``. Lines of another shape are passed over."""
    for line in text.splitlines():
        words = line.split()
        if len(words) < 10 or not words[0].endswith(":"):
            continue
        try:
            local_host, local_port = _address(words[1])
            remote_host, remote_port = _address(words[2])
            state, inode = _TCP_STATES.get(int(words[3], 16), words[3]), int(words[9])
        except ValueError:
            continue
        yield InetSocket(
            family=family,
            state=state,
            local_host=local_host,
            local_port=local_port,
            remote_host=remote_host,
            remote_port=remote_port,
            inode=inode,
        )


def _address(word: str) -> tuple[str, int]:
    host, _, port = word.partition(":")
    # Each 32-bit word of the address is printed as the machine holds it: little-endian here and on arm64.
    raw = b"".join(bytes.fromhex(host[start : start + 8])[::-1] for start in range(0, len(host), 8))
    if len(raw) == 4:
        return str(IPv4Address(raw)), int(port, 16)
    if len(raw) == 16:
        return str(IPv6Address(raw)), int(port, 16)
    raise ValueError(f"no address: {word!r}")


def parse_unix(text: str) -> Iterator[UnixSocket]:
    """The sockets of ``/proc/net/unix``."""
    for line in text.splitlines():
        if match := _UNIX_LINE.match(line):
            flags, kind, _state, inode, path = match.groups()
            yield UnixSocket(
                kind=_UNIX_KINDS.get(int(kind, 16), kind),
                listening=bool(int(flags, 16) & _ACCEPTING),
                inode=int(inode),
                path=path or None,
            )


def parse_unix_diag(datagram: bytes) -> tuple[dict[int, int], bool]:
    """``{inode: peer's inode}`` of one netlink datagram, and whether it ends the answer. Raises OSError on refusal."""
    bodies, finished = bodies_in(datagram)
    return dict(pair for body in bodies for pair in _unix_peer(body)), finished


def read_unix_peers() -> Mapping[int, int] | None:
    """``{inode: peer's inode}`` of every connected Unix socket of this network namespace; None when unknown."""
    question = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _UDIAG_SHOW_PEER, 0, 0)
    try:
        return dict(pair for body in ask_sockets(question) for pair in _unix_peer(body))
    except (OSError, struct.error):
        return None


def _unix_peer(body: bytes) -> Iterator[tuple[int, int]]:
    # unix_diag_msg: family, type, state, pad (4 bytes), inode, cookie (8 bytes); then attributes.
    inode = struct.unpack_from("=I", body, 4)[0]
    attributes = body[16:]
    while len(attributes) >= 4:
        size, name = struct.unpack_from("=HH", attributes)
        if size < 4:
            break
        if name == _UNIX_DIAG_PEER and size >= 8:
            yield inode, struct.unpack_from("=I", attributes, 4)[0]
        attributes = attributes[(size + 3) & ~3 :]


def read_listeners() -> tuple[InetSocket, ...] | None:
    """Every TCP socket of this network namespace that listens; None when the kernel does not say."""
    states = 1 << _LISTEN
    questions = [_DIAG_QUESTION.pack(family, socket.IPPROTO_TCP, 0, states) for family in _DIAG_FAMILIES]
    try:
        return tuple(parse_inet_diag(body) for question in questions for body in ask_sockets(question))
    except (OSError, struct.error):
        return None


def parse_inet_diag(body: bytes) -> InetSocket:
    """What one answer about a TCP socket says. Raises struct.error for a short one, OSError for another family."""
    family, state, local_port, remote_port, local, remote, inode = _DIAG_ANSWER.unpack_from(body)
    if family not in _DIAG_FAMILIES:
        raise OSError(f"a TCP socket of family {family} was not asked for")

    def host(raw: bytes) -> str:
        return str(IPv4Address(raw[:4]) if family == socket.AF_INET else IPv6Address(raw))

    return InetSocket(
        family=_DIAG_FAMILIES[family],
        state=_TCP_STATES.get(state, str(state)),
        local_host=host(local),
        local_port=int.from_bytes(local_port, "big"),
        remote_host=host(remote),
        remote_port=int.from_bytes(remote_port, "big"),
        inode=inode,
    )
