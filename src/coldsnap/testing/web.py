"""Loopback servers for tests: they count what passes, keep bodies on disk, and lie when they are told to."""

from __future__ import annotations

import contextlib
import json
import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["Lie", "Reply", "Request", "Web"]

_PIECE = 1 << 18
_DRIP_S = 0.1
_BODY_PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Lie:
    """A wrong answer to the next ``times`` requests whose "METHOD path" matches ``to``.

    ``what``: ``status`` (with ``status`` and ``headers``), ``close`` (no answer, nothing done), ``close-after``
    (the work is done, the answer lost), ``truncate`` (half of the body), ``wrong-bytes``, ``wrong-length`` (a byte
    less, announced so), ``too-long``, ``drip`` (a byte a time), ``drip-head``, ``redirect-loop``, ``silent``
    (until the client leaves).
    """

    what: str
    to: str = ".*"
    times: int = 1_000_000
    status: int = 500
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Request:
    """What a server is asked. ``read`` gives the body piece by piece, ``body`` all of it.

    ``target`` is path and query as they came, ``path`` the path without escapes.
    """

    method: str
    target: str
    path: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]
    read: Callable[[], Iterator[bytes | memoryview]]

    def body(self) -> bytes:
        """The whole body."""
        return b"".join(bytes(piece) for piece in self.read())

    def range(self, size: int) -> tuple[int, int] | None:
        """(first, end) of a Range header, or None without one."""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        return (int(match[1]), min(int(match[2]) + 1 if match[2] else size, size)) if match else None


@dataclass(kw_only=True)
class Reply:
    """An answer: JSON, bytes, or a part of a file."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    data: bytes = b""
    file: Path | None = None
    first: int = 0
    end: int = 0

    @classmethod
    def of(cls, value: Any, status: int = 200, **headers: str) -> Reply:
        """A JSON document."""
        return cls(status=status, data=json.dumps(value).encode(), headers={"Content-Type": "application/json", **headers})  # fmt: skip # noqa: E501

    @classmethod
    def of_file(cls, path: Path, request: Request, **headers: str) -> Reply:
        """A file, or the range of it that was asked for."""
        size = path.stat().st_size
        wanted = request.range(size)
        headers = {"Accept-Ranges": "bytes", **headers}
        if wanted is None:
            return cls(file=path, end=size, headers=headers)
        if wanted[0] >= size:
            return cls(status=416, headers={"Content-Range": f"bytes */{size}"})
        headers["Content-Range"] = f"bytes {wanted[0]}-{wanted[1] - 1}/{size}"
        return cls(status=206, file=path, first=wanted[0], end=wanted[1], headers=headers)

    @property
    def size(self) -> int:
        """The bytes of the body."""
        return self.end - self.first if self.file is not None else len(self.data)

    def pieces(self) -> Iterator[bytes]:
        """The body."""
        if self.file is None:
            yield self.data
            return
        with self.file.open("rb") as file:
            file.seek(self.first)
            left = self.end - self.first
            while left and (piece := file.read(min(_PIECE, left))):
                left -= len(piece)
                yield piece


class Web:
    """A server on a free port of 127.0.0.1 while it is a context. Subclasses answer in ``handle``.

    ``asked`` are the requests as "METHOD path", ``received_bytes`` and ``sent_bytes`` count bodies,
    ``seen_headers`` every header value that came, ``busy`` the requests that are being answered. ``tripwire`` is called
    for every request and piece.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.received_bytes = 0
        self.sent_bytes = 0
        self.busy = 0
        self.seen_headers: list[tuple[str, str, str]] = []
        self.lies: list[Lie] = []
        self.tripwire: Callable[[], None] = lambda: None
        self.lock = threading.RLock()
        self._used: dict[int, int] = {}
        self._server: ThreadingHTTPServer | None = None
        self.certificate: Path | None = None
        """A file with certificate and key, to be asked over TLS; set before the server starts."""

    def handle(self, request: Request) -> Reply:
        """The honest answer."""
        raise NotImplementedError

    @property
    def host(self) -> str:
        """Address and port."""
        assert self._server is not None
        return f"127.0.0.1:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        """Where it is."""
        return f"{'https' if self.certificate is not None else 'http'}://{self.host}"

    def __enter__(self) -> Any:
        web = self

        class Handler(_Handler):
            owner = web

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if self.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    def lie_for(self, line: str) -> Lie | None:
        """The lie that this request gets, if any; it is used up by that."""
        with self.lock:
            for index, lie in enumerate(self.lies):
                if re.search(lie.to, line) and self._used.get(index, 0) < lie.times:
                    self._used[index] = self._used.get(index, 0) + 1
                    return lie
        return None

    def reset(self) -> None:
        """Be honest again, and count from zero."""
        with self.lock:
            self.lies.clear()
            self._used.clear()
            self.asked.clear()
            self.received_bytes = self.sent_bytes = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Web
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class says
        return

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError, ValueError):  # a client may leave at any time
            super().handle()

    def do_GET(self) -> None:
        with self.owner.lock:
            self.owner.busy += 1
        try:
            self._answer()
        finally:
            with self.owner.lock:
                self.owner.busy -= 1

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815 - the standard library's names

    def _read(self) -> Iterator[bytes | memoryview]:
        left = int(self.headers.get("Content-Length", "0"))
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield self._count(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return
        buffer = memoryview(bytearray(min(_BODY_PIECE, left)))
        while left:
            count = self.rfile.readinto1(buffer[: min(len(buffer), left)])
            if not count:
                raise ConnectionError("the client left")
            left -= count
            yield self._count(buffer[:count])

    def _count(self, piece: bytes | memoryview) -> bytes | memoryview:
        self.owner.tripwire()
        with self.owner.lock:
            self.owner.received_bytes += len(piece)
        return piece

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        line = f"{self.command} {unquote(parts.path)}"
        body = self._read()
        request = Request(
            method=self.command,
            target=self.path,
            path=unquote(parts.path),
            query=parse_qs(parts.query, keep_blank_values=True),
            headers={name.lower(): value for name, value in self.headers.items()},
            read=lambda: body,
        )
        self.owner.tripwire()
        with self.owner.lock:
            self.owner.asked.append(line)
            self.owner.seen_headers += [(line, name, value) for name, value in request.headers.items()]
        lie = self.owner.lie_for(line)
        if lie is not None and lie.what in ("close", "silent"):
            if lie.what == "silent":
                while self.rfile.read1(_PIECE):  # until the client gives up
                    pass
            self.close_connection = True
            return
        if lie is not None and lie.what in ("status", "redirect-loop"):
            for _ in body:
                pass
            headers = {"Location": self.path} if lie.what == "redirect-loop" else dict(lie.headers)
            reply = Reply(status=302 if lie.what == "redirect-loop" else lie.status, headers=headers)
        else:
            reply = self.owner.handle(request)
            for _ in body:
                pass
        if lie is not None and lie.what == "close-after":
            self.close_connection = True
            return
        self._send(reply, lie.what if lie is not None else "")

    def _send(self, reply: Reply, lie: str) -> None:
        size = reply.size + {"wrong-length": -1, "too-long": 1}.get(lie, 0)
        if lie == "wrong-length" and "Content-Range" in reply.headers:
            first, last = re.findall(r"\d+", reply.headers["Content-Range"])[:2]
            reply.headers["Content-Range"] = f"bytes {first}-{int(last) - 1}/*"
        head = [f"HTTP/1.1 {reply.status} .", *(f"{name}: {value}" for name, value in reply.headers.items())]
        head += [f"Content-Length: {reply.headers.pop('X-Size', size)}", "", ""]
        data = "\r\n".join(head).encode("latin-1")
        self._trickle(data) if lie == "drip-head" else self.wfile.write(data)
        if self.command == "HEAD":
            return
        if not lie and reply.file is not None and self.owner.certificate is None:
            self._send_file(reply, reply.file)
            return
        sent, limit = 0, size // 2 if lie == "truncate" else size
        for number, piece in enumerate(reply.pieces()):
            if lie == "wrong-bytes" and number == 0 and piece:
                piece = bytes([piece[0] ^ 1]) + piece[1:]
            piece = piece[: limit - sent]
            self._trickle(piece) if lie == "drip" else self.wfile.write(piece)
            sent += len(piece)
            self.owner.tripwire()
            with self.owner.lock:
                self.owner.sent_bytes += len(piece)
        if lie == "too-long":
            self.wfile.write(b"!")
        if lie == "truncate":
            self.close_connection = True

    def _send_file(self, reply: Reply, path: Path) -> None:
        """The kernel moves the bytes: a test of speed measures the client."""
        offset = reply.first
        with path.open("rb") as file:
            while offset < reply.end:
                count = os.sendfile(self.connection.fileno(), file.fileno(), offset, min(1 << 20, reply.end - offset))
                if count == 0:
                    raise ConnectionError("the file became shorter")
                offset += count
                self.owner.tripwire()
                with self.owner.lock:
                    self.owner.sent_bytes += count

    def _trickle(self, data: bytes) -> None:
        for offset in range(len(data)):
            self.wfile.write(data[offset : offset + 1])
            time.sleep(_DRIP_S)
