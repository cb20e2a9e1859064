"""What a transfer of the proof of shipping is compared with: the least that a program here can do.

    copy and hash                  read a file, SHA-256, write it, fsync: one process and nothing else
    copy and hash over loopback    the same with a bare connection between a process that reads and one that hashes:
                                   no HTTP, and a sender that costs nothing but sendfile
    a plain client                 one GET into a file with one SHA-256 and an fsync, or one POST or PUT of a file with
                                   one SHA-256 on the way, by http.client, of the very server that coldsnap is measured
                                   with: no ranges, retries, resume, marks or bounds

What a server does to take or give bytes is in the last, and in the first two is not. All use pieces of 1 MiB.
"""

from __future__ import annotations

import hashlib
import http.client
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from coldsnap.core.digest import Digest

__all__ = ["SPAWN", "copy_and_hash", "plain_get", "plain_put", "socket_copy_and_hash", "write_random"]

_PIECE = 1 << 20
SPAWN = multiprocessing.get_context("spawn")


def write_random(path: Path, num_bytes: int) -> Digest:
    """A file that no file system can make smaller; its digest."""
    state = hashlib.sha256()
    left = num_bytes
    with path.open("xb") as file:
        while left:
            piece = os.urandom(min(_PIECE * 8, left))
            state.update(piece)
            file.write(piece)
            left -= len(piece)
        os.fsync(file.fileno())
    return Digest.from_hex(state.hexdigest())


def copy_and_hash(source: Path, target: Path) -> float:
    """Seconds of the first; ``target`` is gone afterwards."""
    begun = time.perf_counter()
    state = hashlib.sha256()
    buffer = memoryview(bytearray(_PIECE))
    with source.open("rb", buffering=0) as file, target.open("xb", buffering=0) as out:
        while num_bytes := file.readinto(buffer):
            state.update(buffer[:num_bytes])
            out.write(buffer[:num_bytes])
        os.fsync(out.fileno())
    seconds = time.perf_counter() - begun
    target.unlink()
    return seconds


def socket_copy_and_hash(source: Path, target: Path) -> float:
    """Seconds of the second; ``target`` is gone afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = SPAWN.Process(target=_send, args=(str(source), listener.getsockname()[1]))
        sender.start()
        connection, _ = listener.accept()
        begun = time.perf_counter()
        state = hashlib.sha256()
        buffer = memoryview(bytearray(_PIECE))
        with connection, target.open("xb", buffering=0) as out:
            connection.sendall(b"!")
            while num_bytes := connection.recv_into(buffer):
                state.update(buffer[:num_bytes])
                out.write(buffer[:num_bytes])
            os.fsync(out.fileno())
        seconds = time.perf_counter() - begun
        sender.join()
    target.unlink()
    return seconds


def _send(source: str, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection, Path(source).open("rb") as file:
        connection.recv(1)
        connection.sendfile(file)


def plain_get(url: str, target: Path, digest: Digest) -> None:
    """The third, for what is at ``url``. Raises AssertionError for other bytes."""
    with target.open("xb", buffering=0) as out:
        answer = _asked("GET", url)
        state = hashlib.sha256()
        buffer = memoryview(bytearray(_PIECE))
        while num_bytes := answer.readinto(buffer):
            state.update(buffer[:num_bytes])
            out.write(buffer[:num_bytes])
        os.fsync(out.fileno())
    _check(state.hexdigest() == digest.hex, f"{url} gives other bytes")


def plain_put(url: str, source: Path, digest: Digest, *, session: bool) -> None:
    """The third, for ``source``. ``session``: an OCI registry names the address of the body first."""
    state = hashlib.sha256()

    def pieces() -> Iterator[memoryview]:
        buffer = memoryview(bytearray(_PIECE))
        with source.open("rb", buffering=0) as file:
            while num_bytes := file.readinto(buffer):
                state.update(buffer[:num_bytes])
                yield buffer[:num_bytes]

    if session:
        location = _asked("POST", url).headers["Location"]
        url = f"{location}{'&' if urlsplit(location).query else '?'}digest={digest}"
    _asked("PUT", url, body=pieces(), size=source.stat().st_size).read()
    _check(state.hexdigest() == digest.hex, f"{source} has other bytes")


def _asked(
    method: str, url: str, *, body: Iterator[memoryview] | None = None, size: int = 0
) -> http.client.HTTPResponse:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    headers = {} if method == "GET" else {"Content-Length": str(size)}
    connection.request(method, target, body=body, headers=headers)
    answer = connection.getresponse()
    _check(answer.status < 300, f"{method} {url} is answered {answer.status}")
    return answer


def _check(good: bool, message: str) -> None:
    if not good:
        raise AssertionError(message)
