"""A listener that some thread waits for in an epoll, closed without the thread noticing."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldsnap.engines.vllm.unlisten import close_own_tcp

# Another process: it says where it listens, is told where we do, and stays connected until its input ends.
_PEER = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
accepted, _ = listener.accept()
connected = socket.create_connection(("127.0.0.1", int(sys.stdin.readline())))
sys.stdin.read()
"""


_others: frozenset[int] = frozenset()


@pytest.fixture(autouse=True)
def others() -> None:
    """What the test process had open before the test: sockets of other tests are not to be closed."""
    global _others
    numbers = [int(path.name) for path in list(Path("/proc/self/fd").iterdir())]
    _others = frozenset(one for one in numbers if Path(f"/proc/self/fd/{one}").is_socket())


def close() -> int:
    return close_own_tcp(but_for=_others)


@pytest.fixture(params=[("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)], ids=["4", "6"])
def listener(request: pytest.FixtureRequest, others: None) -> Iterator[socket.socket]:
    host, family = request.param
    with socket.create_server((host, 0), family=family) as listener:
        yield listener


def link_of(number: int) -> str:
    return str(Path(f"/proc/self/fd/{number}").readlink())


def watched(epoll: select.epoll) -> set[int]:
    lines = Path(f"/proc/self/fdinfo/{epoll.fileno()}").read_text().splitlines()
    return {int(line.split()[1]) for line in lines if line.startswith("tfd:")}


def test_a_watched_listener_is_closed_and_its_watcher_waits_for_something_silent(listener: socket.socket) -> None:
    address, number = listener.getsockname(), listener.fileno()
    with select.epoll() as epoll:
        epoll.register(listener, select.EPOLLIN)
        assert close() == 1
        assert link_of(number) == "anon_inode:[eventfd]"
        assert watched(epoll) == {number}
        assert epoll.poll(0) == []
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address[:2], timeout=60)
        assert close() == 0
        epoll.unregister(number)  # raises when it is not there, as gloo's own end does


def test_a_listener_that_nobody_watches_is_closed_too(listener: socket.socket) -> None:
    """The store's own, which its thread has in a poll."""
    assert close() == 1
    assert link_of(listener.fileno()) == "anon_inode:[eventfd]"


def test_a_connection_of_the_process_to_itself_is_closed(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()[:2], timeout=60) as client:
        served, _ = listener.accept()
        with served:
            assert close() == 3
            for one in (listener, client, served):
                assert link_of(one.fileno()) == "anon_inode:[eventfd]"
            assert close() == 0


def test_an_ipv4_client_of_an_ipv6_listener_is_the_same_process() -> None:
    """How torch's store is: it listens on all addresses, and its client asks for 127.0.0.1."""
    with (
        socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener,
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=60) as client,
    ):
        served, address = listener.accept()
        with served:
            assert address[0] == "::ffff:127.0.0.1"
            assert close() == 3
            assert link_of(client.fileno()) == link_of(served.fileno()) == "anon_inode:[eventfd]"


def test_a_thread_in_a_poll_goes_on_waiting(listener: socket.socket) -> None:
    """It sees its connection end, as the store's thread does, and then nothing."""
    with socket.create_connection(listener.getsockname()[:2], timeout=60):
        served, _ = listener.accept()
        with served:
            poll = select.poll()
            poll.register(listener, select.POLLIN)
            poll.register(served, select.POLLIN)
            assert close() == 3
            assert poll.poll(0) == []
            with pytest.raises(OSError, match="Socket operation on non-socket"):
                served.recv(1)


def test_nothing_else_is_touched() -> None:
    """A connection to another process is one to the outside, whichever end is ours."""
    read, write = os.pipe()
    ours, theirs = socket.socketpair()
    unix = socket.socket(socket.AF_UNIX)
    unix.bind("")  # a name of the kernel's
    unix.listen()
    with subprocess.Popen([sys.executable, "-c", _PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        client = socket.create_connection(("127.0.0.1", int(peer.stdout.readline())), timeout=60)
        listener = socket.create_server(("127.0.0.1", 0))
        peer.stdin.write(f"{listener.getsockname()[1]}\n".encode())
        peer.stdin.flush()
        served, _ = listener.accept()
        listener.close()
        numbers = [ours.fileno(), unix.fileno(), read, client.fileno(), served.fileno()]
        try:
            with select.epoll() as epoll:
                for number in numbers:
                    epoll.register(number, select.EPOLLIN)
                before = [link_of(number) for number in numbers]
                assert close() == 0
                assert [link_of(number) for number in numbers] == before
                assert watched(epoll) == set(numbers)
        finally:
            for one in (ours, theirs, unix, client, served):
                one.close()
            os.close(read)
            os.close(write)
            peer.stdin.close()


def test_every_descriptor_of_a_listener_is_replaced(listener: socket.socket) -> None:
    number = listener.fileno()
    with socket.socket(fileno=os.dup(number)) as other, select.epoll() as epoll:
        epoll.register(listener, select.EPOLLIN)
        assert close() == 2
        assert link_of(number) == link_of(other.fileno()) == "anon_inode:[eventfd]"
        assert watched(epoll) == {number}


def test_no_descriptor_is_left_behind(listener: socket.socket) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
