"""A listener that some thread waits for in an epoll, closed without the thread noticing."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldsnap.engines.vllm.unlisten import close_listeners


@pytest.fixture(params=[("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)], ids=["4", "6"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
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
        assert close_listeners() == 1
        assert link_of(number) == "anon_inode:[eventfd]"
        assert watched(epoll) == {number}
        assert epoll.poll(0) == []
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address[:2], timeout=60)
        assert close_listeners() == 0
        epoll.unregister(number)  # raises when it is not there, as gloo's own end does


def test_nothing_else_is_touched(listener: socket.socket) -> None:
    ours, theirs = socket.socketpair()
    unix = socket.socket(socket.AF_UNIX)
    unix.bind("")  # a name of the kernel's
    unix.listen()
    read, write = os.pipe()
    client = socket.create_connection(listener.getsockname()[:2])
    served, _ = listener.accept()
    numbers = [ours.fileno(), unix.fileno(), read, client.fileno(), served.fileno()]
    try:
        with select.epoll() as epoll:
            for number in numbers:
                epoll.register(number, select.EPOLLIN)
            before = [link_of(number) for number in numbers]
            assert close_listeners() == 0, "nobody watches the listener"
            assert [link_of(number) for number in numbers] == before
            assert watched(epoll) == set(numbers)
            assert link_of(listener.fileno()).startswith("socket:")
    finally:
        for one in (ours, theirs, unix, client, served):
            one.close()
        os.close(read)
        os.close(write)


def test_a_listener_with_another_descriptor_stays_in_the_epoll(listener: socket.socket) -> None:
    """It cannot be closed here alone; nothing breaks."""
    with socket.socket(fileno=os.dup(listener.fileno())) as other, select.epoll() as epoll:
        epoll.register(listener, select.EPOLLIN)
        assert close_listeners() == 1
        assert other.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
