"""Who is in the way of a port."""

# ruff: noqa: S104 - the wildcard address is a value to compare here, nothing is bound to it

from __future__ import annotations

import os
import socket
import sys
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.capsule.nettables import InetSocket
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


def test_an_owner_is_named_and_a_free_port_passes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ResourceBusy, match=f"port {port} on 127.0.0.1 is taken by process {os.getpid()}") as caught:
            check_port_free("localhost", port)
        assert caught.value.facts["pid"] == os.getpid()
        assert str(caught.value.facts["command"]).startswith(sys.orig_argv[0])
        check_port_free("127.0.0.2", port)
    check_port_free("127.0.0.1", port)


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
