"""Facts from ``/proc``: the parsers on made-up text, the readers on this very process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.capsule.nettables import parse_inet, parse_unix, parse_unix_diag, read_unix_peers
from coldsnap.capsule.tree import FdKind, OutsidePeer, outside_peers, parse_environ, parse_maps, read_process, read_tree

MAPS = """\
00400000-00452000 r-xp 00000000 08:02 173521      /usr/bin/dbus daemon
7f1000000000-7f1000001000 rw-s 00001000 00:05 42   /memfd:x y (deleted)
7ffd0000-7ffe0000 rw-p 00000000 00:00 0           [stack]
7fff0000-7fff1000 ---p 00000000 00:00 0
"""


def test_maps_keep_spaces_and_know_deleted_files() -> None:
    program, memory, stack, hole = parse_maps(MAPS)
    assert (program.start, program.end, program.perms, program.inode) == (0x400000, 0x452000, "r-xp", 173521)
    assert (program.path, program.deleted) == ("/usr/bin/dbus daemon", False)
    assert (memory.path, memory.deleted, memory.offset) == ("/memfd:x y", True, 0x1000)
    assert stack.path == "[stack]"
    assert hole.path is None


def test_environ_is_pairs_and_the_last_wins() -> None:
    assert parse_environ(b"A=1\0B=x=y\0broken\0A=2\0=odd\0") == {"A": "2", "B": "x=y"}
    assert parse_environ(b"") == {}


@given(st.dictionaries(st.text("ABC_xyz", min_size=1), st.text(st.characters(blacklist_characters="\0"), max_size=9)))
def test_environ_round_trips(variables: dict[str, str]) -> None:
    with contextlib.suppress(UnicodeEncodeError):
        data = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables.items())
        assert parse_environ(data) == variables


def test_inet_tables() -> None:
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    listen = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 9001 1 x\n"
    joined = "   1: 0100007F:1F90 0200000A:C350 01 00000000:00000000 00:00000000 00000000     0        0 9002 1 x\n"
    first, second = parse_inet(head + listen + joined + "rubbish\n  2: zz:1 00:1 01 x x x x x y\n", family="tcp")
    assert (first.state, first.local_host, first.local_port, first.remote_port) == ("listen", "127.0.0.1", 8080, 0)
    assert (second.state, second.remote_host, second.remote_port) == ("established", "10.0.0.2", 50000)
    assert (first.inode, second.inode) == (9001, 9002)
    six = "   0: 0000000000000000FFFF00000100007F:0050 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 7 1\n"
    (only,) = parse_inet(six, family="tcp6")
    assert (only.local_host, only.local_port) in {("::ffff:127.0.0.1", 80), ("::ffff:7f00:1", 80)}
    assert list(parse_inet("", family="tcp")) == []


def test_unix_table() -> None:
    text = """\
Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 17 /run/with space.sock
0000000000000000: 00000003 00000000 00000000 0002 03 18 @abstract
0000000000000000: 00000003 00000000 00000000 0001 03 19
"""
    listening, abstract, unnamed = parse_unix(text)
    assert (listening.listening, listening.path, listening.kind) == (True, "/run/with space.sock", "stream")
    assert (abstract.listening, abstract.path, abstract.kind) == (False, "@abstract", "datagram")
    assert (unnamed.inode, unnamed.path) == (19, None)


def _diag(inode: int, peer: int | None) -> bytes:
    attributes = struct.pack("=HHI", 8, 2, peer) if peer is not None else b""
    body = struct.pack("=BBBBIII", 1, 1, 1, 0, inode, 0, 0) + attributes
    return struct.pack("=IHHII", 16 + len(body), 20, 2, 1, 0) + body


def test_peers_of_unix_sockets() -> None:
    assert parse_unix_diag(_diag(5, 6) + _diag(7, None) + _diag(6, 5)) == ({5: 6, 6: 5}, False)
    assert parse_unix_diag(_diag(5, 6) + struct.pack("=IHHIIi", 20, 3, 2, 1, 0, 0)) == ({5: 6}, True)
    with pytest.raises(OSError, match="refused"):
        parse_unix_diag(struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -2))
    assert parse_unix_diag(b"\0" * 16) == ({}, False)


def test_peers_are_known_here() -> None:
    one, two = socket.socketpair()
    with one, two:
        peers = read_unix_peers()
        if peers is not None:  # a kernel without unix_diag
            assert peers[os.fstat(one.fileno()).st_ino] == os.fstat(two.fileno()).st_ino


def test_descriptors_of_this_process_are_told_by_kind(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:

        def hold(fd: int) -> int:
            stack.callback(os.close, fd)
            return fd

        read_end, write_end = os.pipe()
        expected = {
            hold(os.open(tmp_path / "file", os.O_CREAT | os.O_WRONLY)): FdKind.REGULAR,
            hold(os.open(tmp_path, os.O_RDONLY)): FdKind.DIRECTORY,
            hold(os.open("/dev/null", os.O_RDWR)): FdKind.CHARACTER,
            hold(read_end): FdKind.PIPE,
            hold(write_end): FdKind.PIPE,
            hold(os.eventfd(0)): FdKind.EVENTFD,
            hold(os.memfd_create("x")): FdKind.MEMFD,
            hold(os.pidfd_open(os.getpid())): FdKind.PIDFD,
        }
        held = read_process(os.getpid())
        assert held is not None
        assert expected.items() <= {fd.number: fd.kind for fd in held.fds}.items()
        (tmp_path / "file").unlink()
        facts = read_process(os.getpid())
        assert facts is not None
        gone = next(fd for fd in facts.fds if fd.target == str(tmp_path / "file"))
        assert (gone.deleted, gone.writes, gone.reads) == (True, True, False)


def test_a_process_is_read_whole() -> None:
    facts = read_process(os.getpid())
    assert facts is not None
    assert (facts.pid, facts.ppid) == (os.getpid(), os.getppid())
    assert facts.num_threads >= threading.active_count()
    assert any("pytest" in word for word in facts.cmdline)
    assert any(one.path == "[stack]" for one in facts.maps)
    assert facts.dumpable


def test_a_process_that_is_gone_is_left_out() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    assert read_process(pid) is None
    assert read_tree([pid]).processes == ()


def _others(peers: tuple[OutsidePeer, ...], mine: set[int]) -> list[str]:
    return [peer.what for peer in peers if peer.fd.number in mine]


def test_a_peer_outside_the_tree_is_found_and_one_inside_is_not() -> None:
    ours, theirs = socket.socketpair()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        with ours, theirs, socket.create_server(("127.0.0.1", 0)) as server:
            client = socket.create_connection(server.getsockname())
            accepted, _ = server.accept()
            with client, accepted:
                mine = {ours.fileno(), client.fileno(), accepted.fileno(), server.fileno(), read_end, write_end}
                assert _others(outside_peers(read_tree([os.getpid()])), mine) == []
                accepted.close()
                port = server.getsockname()[1]
                theirs.close()  # the child still holds the other end
                os.close(read_end)
                mine = {ours.fileno(), client.fileno(), write_end}
                tree = read_tree([os.getpid()])
                told = _others(outside_peers(tree), mine)
                assert any(f"127.0.0.1 port {port}" in what for what in told)
                assert any("the reader of pipe" in what for what in told)
                if tree.unix_peers is not None:
                    assert any("unix stream socket" in what for what in told)
                pipe = os.fstat(write_end).st_ino
                known = _others(outside_peers(tree, known_pipes=[pipe]), mine)
                assert not any("pipe" in what for what in known)
                both = _others(outside_peers(read_tree([os.getpid(), child])), mine)
                assert not any("pipe" in what or "unix" in what for what in both)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(write_end)


def test_deleted_mappings_are_seen() -> None:
    import mmap

    with tempfile.TemporaryFile() as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            facts = read_process(os.getpid())
            assert facts is not None
            inode = os.fstat(file.fileno()).st_ino
            assert [one.deleted for one in facts.maps if one.inode == inode] == [True]
