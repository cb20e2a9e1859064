"""A process tree to freeze: parent and child, threads, timer, epoll, pipes, shared memory, a lock, a Unix socket.

Run as ``python -I -S process_tree.py READY_FIFO MEGABYTES [TRICK]``. It answers JSON lines on
``/run/coldsnap/control.sock``; every connection is one question:

- ``state``: counters that only go up, PIDs, and a checksum of its memory;
- ``trick NAME``: do something that CRIU cannot dump (``tcp``, ``io_uring``); ``untrick`` undoes it;
- ``say WORDS``: print to stdout; ``fork``: start one more child; ``end CODE``: exit.
"""

# It runs alone, without the package, and prints because that is what is tested.
# ruff: noqa: S108, T201, PTH108, PTH208

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
import zlib
from typing import Any

RUN = "/run/coldsnap"
held: list[Any] = []
counters = {"questions": 0, "thread": 0, "ticks": 0}


def child(requests: int, answers: int) -> None:
    """Answer each byte with how many there were so far."""
    count = 0
    while os.read(requests, 1):
        count += 1
        os.write(answers, b"%d\n" % count)
    os._exit(0)


def spin(turn: threading.Semaphore, done: threading.Semaphore) -> None:
    """A thread that works when it is told to."""
    while True:
        turn.acquire()
        counters["thread"] += 1
        done.release()


def trick(name: str) -> str:
    """Hold something that cannot be dumped."""
    if name == "tcp":
        server = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(server.getsockname())
        held.extend((server, client))
    elif name == "io_uring":
        parameters = (ctypes.c_uint32 * 64)()
        ring = ctypes.CDLL(None, use_errno=True).syscall(425, 4, parameters)
        if ring < 0:
            return os.strerror(ctypes.get_errno())
        held.append(ring)
    return "ok"


def untrick() -> str:
    """Let go of what a trick holds."""
    for one in held:
        if isinstance(one, int):
            os.close(one)
        else:
            one.close()
    held.clear()
    return "ok"


def main() -> None:
    """Build the tree, then answer questions until told to end."""
    fifo, megabytes = sys.argv[1], int(sys.argv[2])
    memory = bytearray(megabytes << 20)
    for start in range(0, len(memory), 4096):
        memory[start : start + 8] = start.to_bytes(8, "little")

    to_child, requests = os.pipe()[::-1]
    answers, from_child = os.pipe()
    child_pid = os.fork()
    if child_pid == 0:
        child(requests, from_child)

    turn, done = threading.Semaphore(0), threading.Semaphore(0)
    for _ in range(3):
        threading.Thread(target=spin, args=(turn, done), daemon=True).start()

    signal.signal(signal.SIGALRM, lambda *_: counters.__setitem__("ticks", counters["ticks"] + 1))
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)

    lock = os.open(f"{RUN}/lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, b"kept in the private folder")
    named = os.open("/dev/shm/named", os.O_CREAT | os.O_RDWR, 0o600)
    os.ftruncate(named, 8192)
    shared = mmap.mmap(named, 8192)
    unlinked = os.open("/dev/shm/unlinked", os.O_CREAT | os.O_RDWR, 0o600)
    os.ftruncate(unlinked, 4096)
    ghost = mmap.mmap(unlinked, 4096)
    os.unlink("/dev/shm/unlinked")
    shared[:5], ghost[:5] = b"named", b"ghost"

    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(f"{RUN}/control.sock")
    server.listen(8)
    epoll = select.epoll()
    epoll.register(server, select.EPOLLIN)

    def state() -> dict[str, Any]:
        turn.release()
        done.acquire()
        os.write(to_child, b".")
        return {
            **counters,
            "child": int(os.read(answers, 32)),
            "pids": [os.getpid(), child_pid],
            "clock": time.monotonic(),
            "session": os.getsid(0),
            "memory": zlib.crc32(memory),
            "shared": [shared[:5].decode(), ghost[:5].decode()],
            "arguments": sys.argv[2:],
            "settings": open(f"{RUN}/settings.json").read(),
            "lock": open(f"{RUN}/lock").read(),
            "fds": sorted(int(name) for name in os.listdir("/proc/self/fd")),
        }

    print("the tree is ready", flush=True)
    os.close(os.open(fifo, os.O_WRONLY))

    while True:
        epoll.poll()
        with server.accept()[0] as client, client.makefile("rw") as lines:
            counters["questions"] += 1
            verb, _, rest = lines.readline().strip().partition(" ")
            answer: Any
            if verb == "state":
                answer = state()
            elif verb == "trick":
                answer = trick(rest)
            elif verb == "untrick":
                answer = untrick()
            elif verb == "say":
                print(rest, flush=True)
                answer = "ok"
            elif verb == "fork":
                answer = os.fork()
                if answer == 0:
                    signal.pause()
            elif verb == "end":
                os._exit(int(rest))
            else:
                answer = f"no such verb: {verb}"
            lines.write(json.dumps(answer) + "\n")
            lines.flush()


main()
