"""What the processes of a tree hold, read from ``/proc``: facts only, no judgement.

``read_tree(pids)`` is a snapshot of living processes; a process that ends meanwhile is left out. Whose business a
fact is (hygiene, a dump's diagnosis, tests) decides what it means. ``outside_peers`` answers the one question that
needs all processes at once: which descriptors lead to somebody who will not be dumped.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

from coldsnap.capsule.nettables import InetSocket, UnixSocket, parse_inet, parse_unix, read_unix_peers

__all__ = [
    "FdFacts",
    "FdKind",
    "MapFacts",
    "OutsidePeer",
    "ProcessFacts",
    "TreeFacts",
    "outside_peers",
    "parse_environ",
    "parse_maps",
    "read_process",
    "read_tree",
]

_PROC = Path("/proc")
_DELETED = " (deleted)"
_INODE = re.compile(r"^(socket|pipe):\[(\d+)\]$")
_End: TypeAlias = tuple[str, str, int, str, int]
_INET_FAMILIES = ("tcp", "tcp6", "udp", "udp6")


class FdKind(StrEnum):
    """What a descriptor is."""

    REGULAR = "regular"
    DIRECTORY = "directory"
    CHARACTER = "character"
    BLOCK = "block"
    FIFO = "fifo"
    PIPE = "pipe"
    SOCKET = "socket"
    MEMFD = "memfd"
    EVENTFD = "eventfd"
    EPOLL = "eventpoll"
    TIMERFD = "timerfd"
    SIGNALFD = "signalfd"
    INOTIFY = "inotify"
    PIDFD = "pidfd"
    IO_URING = "io_uring"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class FdFacts:
    """One open descriptor. ``target`` is what ``/proc/PID/fd`` shows, without ``(deleted)``; ``flags`` as in open(2);
    ``inode`` is set for sockets and pipes."""

    number: int
    target: str
    kind: FdKind
    flags: int
    inode: int | None = None
    deleted: bool = False

    @property
    def writes(self) -> bool:
        """Whether it is open for writing."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    @property
    def reads(self) -> bool:
        """Whether it is open for reading."""
        return self.flags & os.O_ACCMODE != os.O_WRONLY


@dataclass(frozen=True, kw_only=True, slots=True)
class MapFacts:
    """One mapping. ``path`` is None for anonymous memory; kernel names such as ``[heap]`` are kept."""

    start: int
    end: int
    perms: str
    offset: int
    inode: int
    path: str | None
    deleted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessFacts:
    """One process."""

    pid: int
    ppid: int
    cmdline: tuple[str, ...]
    environ: Mapping[str, str]
    fds: tuple[FdFacts, ...]
    maps: tuple[MapFacts, ...]
    num_threads: int
    dumpable: bool = True
    """False when the kernel let us read no descriptors or maps (a process that just ended, or a zombie)."""
    inside_pid: int = 0
    """The PID that the process itself sees, in the innermost PID namespace; a restore brings it back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeFacts:
    """All processes of a tree, and the sockets that they hold, by inode. ``unix_peers`` is None when unknown."""

    processes: tuple[ProcessFacts, ...]
    inet: Mapping[int, InetSocket] = field(default_factory=dict)
    unix: Mapping[int, UnixSocket] = field(default_factory=dict)
    unix_peers: Mapping[int, int] | None = None

    def descriptors(self) -> Iterator[tuple[ProcessFacts, FdFacts]]:
        """Every descriptor with its process."""
        return ((process, fd) for process in self.processes for fd in process.fds)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsidePeer:
    """A descriptor whose other end is held outside the tree. ``what`` names that end for people."""

    pid: int
    fd: FdFacts
    what: str


def read_tree(pids: Iterable[int]) -> TreeFacts:
    """The facts of these processes and of the sockets they hold, in the order given."""
    processes = tuple(facts for pid in pids if (facts := read_process(pid)) is not None)
    held = {fd.inode for process in processes for fd in process.fds if fd.kind is FdKind.SOCKET}
    if not held:
        return TreeFacts(processes=processes)
    # The network namespace of the tree, which is not always the reader's.
    net = _PROC / str(processes[0].pid) / "net"
    inet = {
        one.inode: one
        for family in _INET_FAMILIES
        for one in parse_inet(_text(net / family), family=family)
        if one.inode in held
    }
    unix = {one.inode: one for one in parse_unix(_text(net / "unix")) if one.inode in held}
    return TreeFacts(processes=processes, inet=inet, unix=unix, unix_peers=read_unix_peers() if unix else {})


def read_process(pid: int) -> ProcessFacts | None:
    """The facts of one process, None when it is gone."""
    folder = _PROC / str(pid)
    try:
        status = (folder / "status").read_text(errors="replace")
        cmdline = (folder / "cmdline").read_bytes()
    except OSError:
        return None
    try:
        fds: tuple[FdFacts, ...] = tuple(_read_fds(folder))
        maps = tuple(parse_maps((folder / "maps").read_text(errors="surrogateescape")))
        environ, dumpable = parse_environ((folder / "environ").read_bytes()), True
    except OSError:
        fds, maps, environ, dumpable = (), (), {}, False
    return ProcessFacts(
        pid=pid,
        ppid=_status_number(status, "PPid"),
        cmdline=tuple(os.fsdecode(word) for word in cmdline.removesuffix(b"\0").split(b"\0")) if cmdline else (),
        environ=environ,
        fds=fds,
        maps=maps,
        num_threads=_status_number(status, "Threads"),
        dumpable=dumpable,
        inside_pid=_inside_pid(status),
    )


def parse_environ(data: bytes) -> dict[str, str]:
    """``/proc/PID/environ``; the last of two equal names wins, as for a shell."""
    words = (os.fsdecode(word) for word in data.split(b"\0"))
    return {name: value for name, equals, value in (word.partition("=") for word in words) if equals and name}


def parse_maps(text: str) -> Iterator[MapFacts]:
    """``/proc/PID/maps``."""
    for line in text.splitlines():
        words = line.split(maxsplit=5)
        if len(words) < 5:
            continue
        start, _, end = words[0].partition("-")
        path, deleted = _undeleted(words[5]) if len(words) == 6 else (None, False)
        yield MapFacts(
            start=int(start, 16),
            end=int(end, 16),
            perms=words[1],
            offset=int(words[2], 16),
            inode=int(words[4]),
            path=path,
            deleted=deleted,
        )


def outside_peers(tree: TreeFacts, *, known_pipes: Iterable[int] = ()) -> tuple[OutsidePeer, ...]:
    """Connected sockets and pipes whose other end no process of the tree holds.

    Listening and unconnected sockets have no peer. ``known_pipes`` are inodes that are somebody's business already
    (the unit's stdout).
    """
    found: list[OutsidePeer] = []
    held = {fd.inode for _, fd in tree.descriptors() if fd.kind is FdKind.SOCKET}
    ends = {
        (one.family, one.local_host, one.local_port, one.remote_host, one.remote_port) for one in tree.inet.values()
    }
    known = set(known_pipes)
    for process, fd in tree.descriptors():
        what: str | None = None
        if fd.kind is FdKind.PIPE and fd.inode not in known:
            what = _outside_pipe(tree, fd)
        elif fd.kind is FdKind.SOCKET and fd.inode is not None:
            what = _outside_socket(tree, fd.inode, held, ends)
        if what is not None:
            found.append(OutsidePeer(pid=process.pid, fd=fd, what=what))
    return tuple(found)


def _outside_socket(tree: TreeFacts, inode: int, held: set[int | None], ends: set[_End]) -> str | None:
    if (one := tree.inet.get(inode)) is not None:
        reverse = (one.family, one.remote_host, one.remote_port, one.local_host, one.local_port)
        if one.remote_port and reverse not in ends:
            return f"{one.family} {one.state} connection to {one.remote_host} port {one.remote_port}"
    elif inode in tree.unix and tree.unix_peers is not None:
        peer = tree.unix_peers.get(inode)
        if peer is not None and peer not in held:
            return f"unix {tree.unix[inode].kind} socket {peer}"
    return None


def _outside_pipe(tree: TreeFacts, fd: FdFacts) -> str | None:
    ours = [other for _, other in tree.descriptors() if other.kind is FdKind.PIPE and other.inode == fd.inode]
    if any(other.reads for other in ours) and any(other.writes for other in ours):
        return None
    return f"the {'reader' if fd.writes else 'writer'} of pipe {fd.inode}"


def _read_fds(folder: Path) -> Iterator[FdFacts]:
    for number in sorted(int(path.name) for path in (folder / "fd").iterdir()):
        path = folder / "fd" / str(number)
        try:
            target, deleted = _undeleted(str(path.readlink()))
            mode = path.stat().st_mode
            info = (folder / "fdinfo" / str(number)).read_text()
        except FileNotFoundError:
            continue
        match = _INODE.match(target)
        flags = next((int(line.split()[1], 8) for line in info.splitlines() if line.startswith("flags:")), 0)
        yield FdFacts(
            number=number,
            target=target,
            kind=_kind(target, mode),
            flags=flags,
            inode=int(match[2]) if match else None,
            deleted=deleted,
        )


def _kind(target: str, mode: int) -> FdKind:
    if target.startswith("anon_inode:"):
        name = target.removeprefix("anon_inode:").strip("[]")
        return FdKind(name) if name in set(FdKind) else FdKind.OTHER
    if target.startswith("/memfd:"):
        return FdKind.MEMFD
    if target.startswith("pipe:"):
        return FdKind.PIPE
    kinds = {
        stat.S_IFREG: FdKind.REGULAR,
        stat.S_IFDIR: FdKind.DIRECTORY,
        stat.S_IFCHR: FdKind.CHARACTER,
        stat.S_IFBLK: FdKind.BLOCK,
        stat.S_IFIFO: FdKind.FIFO,
        stat.S_IFSOCK: FdKind.SOCKET,
    }
    return kinds.get(stat.S_IFMT(mode), FdKind.OTHER)


def _undeleted(target: str) -> tuple[str, bool]:
    return target.removesuffix(_DELETED), target.endswith(_DELETED)


def _status_number(status: str, name: str) -> int:
    match = re.search(rf"^{name}:\s*(\d+)", status, re.MULTILINE)
    return int(match[1]) if match else 0


def _inside_pid(status: str) -> int:
    match = re.search(r"^NSpid:.*?(\d+)[ \t]*$", status, re.MULTILINE)
    return int(match[1]) if match else _status_number(status, "Pid")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
