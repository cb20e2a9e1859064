"""Who is in the way of a port."""

# ruff: noqa: S104 - the wildcard address is a value to compare here, nothing is bound to it

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.capsule import nettables, ports
from coldsnap.capsule.nettables import InetSocket, parse_inet_diag, read_listeners
from coldsnap.capsule.ports import check_port_free, conflicting_listeners
from coldsnap.errors import ResourceBusy, UsageError


def _listener(host: str, port: int = 80, state: str = "listen") -> InetSocket:
    return InetSocket(
        family="tcp", state=state, local_host=host, local_port=port, remote_host="0.0.0.0", remote_port=0, inode=1
    )


@pytest.mark.parametrize(
    ("theirs", "mine", "conflict"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("0.0.0.0", "127.0.0.1", True),
        ("127.0.0.1", "0.0.0.0", True),
        ("::", "127.0.0.1", True),
        ("::", "::1", True),
        ("::1", "127.0.0.1", False),
        ("127.0.0.1", "::", True),
        ("0.0.0.0", "::1", False),
        ("::ffff:127.0.0.1", "127.0.0.1", True),
        ("0.0.0.0", "0.0.0.0", True),
        ("0.0.0.0", "::", True),
    ],
)
def test_which_addresses_share_a_port(theirs: str, mine: str, conflict: bool) -> None:
    assert bool(conflicting_listeners([_listener(theirs)], [ip_address(mine)], 80)) is conflict


@given(st.integers(1, 65535), st.integers(1, 65535), st.sampled_from(["listen", "established", "time-wait"]))
def test_only_a_listener_on_that_very_port_conflicts(wanted: int, theirs: int, state: str) -> None:
    found = conflicting_listeners([_listener("0.0.0.0", theirs, state)], [ip_address("127.0.0.1")], wanted)
    assert bool(found) == (wanted == theirs and state == "listen")


@pytest.fixture(params=["netlink", "no netlink", "no inet_diag"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the kernel tells who listens; where it refuses a question, the tables are read."""

    def refuse(*_: object) -> None:
        raise OSError(2, "sock_diag refused")

    if request.param == "no netlink":
        monkeypatch.setattr(nettables, "ask_sockets", refuse)
    elif request.param == "no inet_diag":
        monkeypatch.setattr(nettables, "parse_inet_diag", refuse)
    else:
        monkeypatch.setattr(ports, "parse_inet", refuse)
    return str(request.param)


def test_the_kernel_tells_the_same_both_ways() -> None:
    hosts = (("127.0.0.1", socket.AF_INET), ("0.0.0.0", socket.AF_INET), ("::1", socket.AF_INET6))
    with contextlib.ExitStack() as closing:
        ours = [closing.enter_context(socket.create_server((host, 0), family=family)) for host, family in hosts]
        connected = closing.enter_context(socket.create_connection(ours[0].getsockname()))
        mine = {os.fstat(one.fileno()).st_ino for one in (*ours, connected)}
        asked = read_listeners()
        assert asked is not None, "the kernels of these tests have inet_diag"
        tables = [one for one in ports._tables() if one.state == "listen"]
        by_inode = {one.inode: one for one in asked}
        assert {inode: one for inode, one in by_inode.items() if inode in mine} == {
            one.inode: one for one in tables if one.inode in mine
        }
        assert {one.state for one in asked} == {"listen"}
        assert len(mine & by_inode.keys()) == len(ours), "what is only connected does not listen"


def test_an_answer_is_read_by_its_offsets() -> None:
    """linux/inet_diag.h: family, state, timer, retrans; ports and addresses in the network's order; then counts."""
    body = struct.pack("=BBBB", 10, 10, 0, 0) + struct.pack(">HH", 8000, 9) + ip_address("fe80::1").packed
    body += ip_address("::2").packed + bytes(12) + bytes(16) + struct.pack("=I", 77) + b"attributes"
    assert parse_inet_diag(body) == InetSocket(
        family="tcp6",
        state="listen",
        local_host="fe80::1",
        local_port=8000,
        remote_host="::2",
        remote_port=9,
        inode=77,
    )
    with pytest.raises(struct.error):
        parse_inet_diag(body[:71])
    with pytest.raises(OSError, match="family 1 "):
        parse_inet_diag(b"\x01" + body[1:])


@pytest.mark.usefixtures("way")
def test_an_owner_is_named_and_a_free_port_passes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ResourceBusy, match=f"port {port} on 127.0.0.1 is taken by process {os.getpid()}") as caught:
            check_port_free("localhost", port)
        assert caught.value.facts["pid"] == os.getpid()
        assert str(caught.value.facts["command"]).startswith(sys.orig_argv[0])
        check_port_free("127.0.0.2", port)
    check_port_free("127.0.0.1", port)


@pytest.mark.usefixtures("way")
def test_a_listener_that_would_share_its_port_is_still_in_the_way() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        with pytest.raises(ResourceBusy):
            check_port_free("0.0.0.0", server.getsockname()[1])


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 0), ("127.0.0.1", 65536), ("no such host", 80)])
def test_what_is_no_address_is_the_callers_mistake(host: str, port: int) -> None:
    with pytest.raises(UsageError):
        check_port_free(host, port)
