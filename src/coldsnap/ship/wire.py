"""Connections: opened, watched, pooled. Every byte that comes in passes one place that knows how patient we are.

A server can be slow in many places: while the connection is made, between the lines of an answer's head, in the
middle of a body, one byte a second. ``_Watched`` stands below all of http.client's reading and gives each wait what is
left of its bound; only time spent waiting counts, so a slow disk on our side is not held against the server.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from coldsnap.ship.limits import Limits

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Connection", "Pool", "Proxy", "TooSlow", "origin_of"]

Proxy = Callable[[str], str | None]
"""URL -> the proxy to reach it through, ``http://host:port``, or None."""

SEND_BYTES = 1 << 20


class TooSlow(TimeoutError):
    """A bound of the limits was used up; the text says which."""


class _Watched(io.RawIOBase):
    """The reading half of a socket. In the head of an answer one deadline holds for all of it, after that a rate."""

    def __init__(self, raw: socket.SocketIO, sock: socket.socket, limits: Limits) -> None:
        self._raw = raw
        self._sock = sock
        self._limits = limits
        self._head_ends: float | None = time.monotonic() + limits.answer_s
        self._bound_s = -1.0
        self._waited_s = 0.0
        self._window_bytes = 0

    def head_is_done(self) -> None:
        """From now on the rate counts."""
        self._head_ends = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int | None:
        began = time.monotonic()
        bound_s = self._limits.idle_s
        if self._head_ends is not None:
            bound_s = min(bound_s, self._head_ends - began)
            if bound_s <= 0:
                raise TooSlow(f"its answer did not begin within {self._limits.answer_s:g} s")
        if bound_s != self._bound_s:
            self._sock.settimeout(bound_s)
            self._bound_s = bound_s
        try:
            count = self._raw.readinto(buffer) or 0
        except TimeoutError as error:
            raise TooSlow(f"nothing came for {bound_s:.3g} s") from error
        if self._head_ends is None:
            self._waited_s += time.monotonic() - began
            self._window_bytes += count
            if self._waited_s >= self._limits.slow_s:
                if self._window_bytes < self._limits.slow_bytes:
                    raise TooSlow(f"{self._window_bytes} bytes came in {self._waited_s:.3g} s")
                self._waited_s, self._window_bytes = 0.0, 0
        return count

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


class _Socket:
    """What http.client asks of a socket when it makes an answer."""

    def __init__(self, sock: socket.socket, limits: Limits) -> None:
        self._sock = sock
        self._limits = limits
        self.watched: _Watched | None = None

    def makefile(self, mode: str) -> io.BufferedReader:
        """For reading, whatever the mode: it is "rb"."""
        self.watched = _Watched(self._sock.makefile("rb", buffering=0), self._sock, self._limits)
        return io.BufferedReader(self.watched, 1 << 16)


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: Any, *args: Any, limits: Limits, **kwargs: Any) -> None:
        self._watch = _Socket(sock, limits)
        super().__init__(self._watch, *args, **kwargs)  # type: ignore[arg-type] # makefile is all it uses

    def begin(self) -> None:
        super().begin()
        if self._watch.watched is not None:
            self._watch.watched.head_is_done()


class Connection:
    """One connection to one origin. ``used`` says that an earlier answer came over it."""

    def __init__(self, url: str, limits: Limits, context: ssl.SSLContext | None, proxy: str | None) -> None:
        parts = urlsplit(url)
        self.origin = origin_of(url)
        self.used = False
        self.absolute = proxy is not None and parts.scheme == "http"
        host, port = parts.hostname or "", parts.port
        via = urlsplit(proxy) if proxy is not None else None
        at_host, at_port = (via.hostname or "", via.port) if via is not None else (host, port)
        kwargs: dict[str, Any] = {"timeout": limits.connect_s, "blocksize": SEND_BYTES}
        if parts.scheme == "https":
            self.http: http.client.HTTPConnection = http.client.HTTPSConnection(
                at_host, at_port, context=context or ssl.create_default_context(), **kwargs
            )
            if via is not None:
                self.http.set_tunnel(host, port or 443)
        else:
            self.http = http.client.HTTPConnection(at_host, at_port, **kwargs)

        def response(sock: socket.socket, *args: Any, **kwargs: Any) -> _Response:
            return _Response(sock, *args, limits=limits, **kwargs)

        self.http.response_class = response  # type: ignore[assignment] # a factory does as well
        self._limits = limits

    def open(self) -> None:
        """Connect, if it is not."""
        if self.http.sock is None:
            self.http.connect()
        self.http.sock.settimeout(self._limits.idle_s)

    def close(self) -> None:
        """Give the socket back."""
        self.http.close()


class Pool:
    """Idle connections by origin. Any number of threads may take and give."""

    def __init__(self, limits: Limits, *, context: ssl.SSLContext | None = None, proxy: Proxy | None = None) -> None:
        self._limits = limits
        self._context = context
        self._proxy = proxy
        self._idle: dict[str, list[Connection]] = {}
        self._lock = threading.Lock()

    def take(self, url: str, *, fresh: bool = False) -> Connection:
        """A connection that can speak to the origin of ``url``; ``fresh`` ones have carried nothing."""
        with self._lock:
            waiting = self._idle.get(origin_of(url), [])
            if waiting and not fresh:
                return waiting.pop()
        return Connection(url, self._limits, self._context, self._proxy(url) if self._proxy is not None else None)

    def give(self, connection: Connection) -> None:
        """Keep a connection whose last answer was read to its end."""
        connection.used = True
        with self._lock:
            waiting = self._idle.setdefault(connection.origin, [])
            if len(waiting) < 2 * self._limits.num_streams:
                waiting.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close all that are idle."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()


def origin_of(url: str) -> str:
    """Scheme, host and port, with the port always written."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
