"""A forked child, and the private sockets and event loops of its parent."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from coldsnap.engines.vllm.forks import drop_sockets

_PROGRAM = """
import os, select, socket, sys
from pathlib import Path
from coldsnap.engines.vllm.forks import guard_forks
ours, other = Path(sys.argv[1]), sys.argv[2]
guard_forks({ours})
def pair(path):
    listener = socket.socket(socket.AF_UNIX); listener.bind(str(path)); listener.listen()
    client = socket.socket(socket.AF_UNIX); client.connect(str(path))
    return listener, client, listener.accept()[0]
kept, (listener, client, served) = pair(other), pair(ours)
watching = select.epoll()
watching.register(kept[2], select.EPOLLIN)
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.write(writing, b"x")
    sys.stdin.read()
    os._exit(0)
os.read(reading, 1)  # the child has done what it does first
served.close()
client.settimeout(60)
print("closed" if client.recv(1) == b"" else "open", flush=True)
links = [os.readlink(f"/proc/{child}/fd/{one.fileno()}") for one in (listener, client)]
print(" ".join(link.split(":")[0] for link in links), flush=True)
print(" ".join(os.readlink(f"/proc/{child}/fd/{one.fileno()}").split(":")[0] for one in kept), flush=True)
kept[1].send(b"x")
events = [number == kept[2].fileno() for number, _ in watching.poll(60)]
print(os.readlink(f"/proc/{child}/fd/{watching.fileno()}"), events, flush=True)
"""


def test_a_connection_is_closed_when_the_parent_closes_it_and_others_are_kept(tmp_path: Path) -> None:
    """Not so without the guard: the child's copy would keep it open."""
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "w.sock"), str(tmp_path / "other.sock")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = [process.stdout.readline().strip() for _ in range(4)]
    process.communicate(timeout=60)
    assert said == ["closed", "/dev/null /dev/null", "socket socket socket", "/dev/null [True]"]


def test_an_object_that_thinks_it_owns_a_dropped_socket_closes_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "w.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    number = listener.fileno()
    assert drop_sockets({path}) == 1
    assert str(Path(f"/proc/self/fd/{number}").readlink()) == os.devnull
    listener.close()
    assert drop_sockets({path}) == 0
