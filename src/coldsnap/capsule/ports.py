"""Whether a port can be served on. CRIU restores a listener onto an occupied port without a word (two engines then
share it at random), so occupancy is ours to check first.

The kernel is asked, no socket is bound: a trial bind would itself hold the port for a moment, and says nothing about
the owner.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from coldsnap.capsule.nettables import InetSocket, parse_inet, read_listeners
from coldsnap.errors import ResourceBusy, UsageError

__all__ = ["check_port_free", "conflicting_listeners"]

_PROC = Path("/proc")
_COMMAND_CHARS = 120


def check_port_free(host: str, port: int) -> None:
    """Raises ResourceBusy naming the owner when something listens on ``port`` of ``host`` or of every address.

    ``host`` is a name or an address; a wildcard conflicts with a listener on any address. Raises UsageError for a
    name that does not resolve or a port out of range.
    """
    if not 1 <= port <= 65535:
        raise UsageError(f"port {port} is out of range", cure="choose one from 1 to 65535")
    listeners = read_listeners()
    if not (taken := conflicting_listeners(_tables() if listeners is None else listeners, _addresses(host), port)):
        return
    owner = next((found for one in taken if (found := _owner(one.inode)) is not None), None)
    who = f"process {owner[0]} ({owner[1]})" if owner else "a process of another namespace"
    raise ResourceBusy(
        f"port {port} on {taken[0].local_host} is taken by {who}",
        cure="stop it, or choose another port",
        facts={"host": host, "port": port, "pid": owner[0] if owner else None, "command": owner[1] if owner else None},
    )


def conflicting_listeners(
    sockets: Iterable[InetSocket], addresses: Iterable[IPv4Address | IPv6Address], port: int
) -> list[InetSocket]:
    """The listeners that a server on one of these addresses would share ``port`` with. Pure."""
    wanted = {_plain(one) for one in addresses}
    return [
        one
        for one in sockets
        if one.state == "listen"
        and one.local_port == port
        and any(_overlap(_plain(ip_address(one.local_host)), mine) for mine in wanted)
    ]


def _tables() -> Iterator[InetSocket]:
    """The slow way, for kernels that do not answer."""
    for family in ("tcp", "tcp6"):
        path = _PROC / "net" / family
        if path.exists():
            yield from parse_inet(path.read_text(), family=family)


def _plain(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    return mapped if isinstance(address, IPv6Address) and (mapped := address.ipv4_mapped) else address


def _overlap(theirs: IPv4Address | IPv6Address, mine: IPv4Address | IPv6Address) -> bool:
    # `::` takes IPv4 too unless it was told not to, which the table does not show: count it as taken.
    if theirs.is_unspecified:
        return theirs.version == 6 or mine.version == 4 or mine.is_unspecified
    if mine.is_unspecified:
        return mine.version == 6 or theirs.version == 4
    return theirs == mine


def _addresses(host: str) -> Iterator[IPv4Address | IPv6Address]:
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM)  # noqa: S104  (the meaning of "")
    except OSError as error:
        raise UsageError(f"host {host!r} does not resolve: {error}", cure="name an address of this machine") from error
    for _family, _kind, _protocol, _name, address in found:
        yield ip_address(str(address[0]).partition("%")[0])


def _owner(inode: int) -> tuple[int, str] | None:
    wanted = f"socket:[{inode}]"
    for folder in _PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if any(str(fd.readlink()) == wanted for fd in (folder / "fd").iterdir()):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return int(folder.name), command[:_COMMAND_CHARS]
        except OSError:
            continue
    return None
