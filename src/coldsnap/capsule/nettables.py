"""The kernel's tables of sockets, parsed: ``/proc/net/{tcp,tcp6,udp,udp6,unix}`` and the peers of Unix sockets.

Pure parsers of text and bytes, plus the one netlink question that ``/proc`` does not answer (which socket a Unix
socket is connected to; sock_diag(7)).
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Final

__all__ = [
    "InetSocket",
    "UnixSocket",
    "parse_inet",
    "parse_unix",
    "parse_unix_diag",
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

# linux/netlink.h, linux/sock_diag.h, linux/unix_diag.h
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_NLM_F_REQUEST, _NLM_F_DUMP = 0x1, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_UDIAG_SHOW_PEER, _UNIX_DIAG_PEER = 0x4, 2
_ANSWER_TIMEOUT_S = 2.0


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


def parse_unix_diag(data: bytes) -> tuple[dict[int, int], bool]:
    """``{inode: peer's inode}`` of one netlink datagram, and whether it ends the answer. Raises OSError on refusal."""
    peers: dict[int, int] = {}
    while len(data) >= 16:
        length, kind = struct.unpack_from("=IH", data)
        if length < 16:
            break
        body = data[16:length]
        if kind == _NLMSG_DONE:
            return peers, True
        if kind == _NLMSG_ERROR:
            raise OSError(-struct.unpack_from("=i", body)[0], "sock_diag refused")
        # unix_diag_msg: family, type, state, pad (4 bytes), inode, cookie (8 bytes); then attributes.
        inode = struct.unpack_from("=I", body, 4)[0]
        attributes = body[16:]
        while len(attributes) >= 4:
            size, name = struct.unpack_from("=HH", attributes)
            if size < 4:
                break
            if name == _UNIX_DIAG_PEER and size >= 8:
                peers[inode] = struct.unpack_from("=I", attributes, 4)[0]
            attributes = attributes[(size + 3) & ~3 :]
        data = data[(length + 3) & ~3 :]
    return peers, False


def read_unix_peers() -> Mapping[int, int] | None:
    """``{inode: peer's inode}`` of every connected Unix socket of this network namespace; None when unknown."""
    request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _UDIAG_SHOW_PEER, 0, 0)
    header = struct.pack("=IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST | _NLM_F_DUMP, 1, 0)
    peers: dict[int, int] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as asking:
            asking.settimeout(_ANSWER_TIMEOUT_S)
            asking.sendto(header + request, (0, 0))
            finished = False
            while not finished:
                found, finished = parse_unix_diag(asking.recv(1 << 20))
                peers |= found
    except (OSError, struct.error):
        return None
    return peers
