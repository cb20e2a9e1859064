"""An HTTP listener on a running event loop that can be opened, and closed without a trace.

Closed means: no socket, no connection, no task that a frozen process would carry along. The loop is asyncio's,
because uvloop brings io_uring descriptors, which cannot be frozen.

Closing has three ends in view. Requests in flight may end, for as long as the caller allows; then the application is
told to cut them off, and has ``FAREWELL_S`` to say so to its clients. A client that holds things up by itself, because
it does not read what is there for it or does not send what it announced, is given ``STALLED_S`` and is then cut.

Needs uvicorn, and so is imported by engines that have it and by nothing else.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from coldsnap.errors import EngineError, ResourceBusy

__all__ = ["Listening", "Stalls", "bind"]

_BACKLOG = 128
FAREWELL_S = 5.0
STALLED_S = 3.0
_LOOK_S = 0.1
_LONGEST_GAP_S = 0.5
# struct tcp_info of linux/tcp.h: 8 bytes of flags, 24 u32, two pacing rates (u64), then tcpi_bytes_acked and
# tcpi_bytes_received (u64 each, since Linux 4.1). What a struct has after these is not asked for.
_TCP_INFO_BYTES_ACKED_AT = 8 + 24 * 4 + 2 * 8
_TCP_INFO_BYTES = _TCP_INFO_BYTES_ACKED_AT + 2 * 8


class Stalls:
    """Which connections wait for a client that has moved no byte for `limit_s` seconds."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._last_seen: dict[Hashable, tuple[float, float, int]] = {}

    def look(self, connection: Hashable, now: float, waits: bool, moved: int) -> bool:
        """Whether `connection` has stalled, by this look and the ones before it.

        `now` is a monotonic clock in seconds; `waits` says whether its client keeps us waiting; `moved` counts the
        bytes that have ever crossed it, both ways. What lies in our own buffer would not do as a measure: the next
        piece of an answer fills it up as fast as a steady reader empties it. Of the time between two looks no more
        than `_LONGEST_GAP_S` counts: when nobody looked for longer, this machine stood still, and a client of it too.
        """
        looked, stalled_s, before = self._last_seen.get(connection, (now, 0.0, moved))
        stalled_s += min(now - looked, _LONGEST_GAP_S)
        if not waits or moved != before:
            stalled_s = 0.0
        self._last_seen[connection] = (now, stalled_s, moved)
        return stalled_s >= self._limit_s


class _Server(uvicorn.Server):  # type: ignore[misc] # uvicorn is not type-checked here
    """Says when it listens, and leaves the process's signals to the process."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.listens.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Listening:
    """One bound socket from `open` to `close`, both on the loop that serves it."""

    def __init__(self, bound: socket.socket, config: uvicorn.Config, cut_off: Callable[[], None]) -> None:
        """`cut_off` ends every request now, with a word to its client; it is called on the loop."""
        self._socket = bound
        self._cut_off = cut_off
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Serve; a client can connect when this returns. Raises EngineError when the server does not come up."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        listens = asyncio.create_task(self._server.listens.wait())
        await asyncio.wait({self._serving, listens}, return_when=asyncio.FIRST_COMPLETED)
        if not self._server.listens.is_set():
            listens.cancel()
            self._socket.close()
            error = self._serving.exception()
            raise EngineError(f"the HTTP server did not start: {error}") from error

    async def close(self, drain_s: float) -> None:
        """Stop listening, let requests end for `drain_s` seconds, cut off the rest; nothing is open afterwards.

        Returns after `drain_s + FAREWELL_S` seconds at the latest, and earlier when only stalled clients are left.
        """
        if self._serving is None:
            return
        self._server.config.timeout_graceful_shutdown = drain_s + FAREWELL_S
        cut = asyncio.get_running_loop().call_later(drain_s, self._cut_off)
        watch = asyncio.create_task(self._cut_stalled())
        self._server.should_exit = True
        try:
            await self._serving
        finally:
            cut.cancel()
            watch.cancel()
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            self._socket.close()
            await asyncio.sleep(0)  # an aborted transport closes its socket at the next turn of the loop

    async def _cut_stalled(self) -> None:
        stalls = Stalls(STALLED_S)
        while True:
            now = time.monotonic()
            for connection in list(self._server.server_state.connections):
                if stalls.look(connection, now, _waits_for_client(connection), _bytes_moved(connection)):
                    connection.transport.abort()
            await asyncio.sleep(_LOOK_S)


def _waits_for_client(connection: Any) -> bool:
    """Whether there are bytes that this client has not read, or a body that it has not sent."""
    cycle = getattr(connection, "cycle", None)  # a WebSocket has none
    unsent = cycle is not None and cycle.more_body and not cycle.response_complete
    return bool(connection.transport.get_write_buffer_size()) or unsent


def _bytes_moved(connection: Any) -> int:
    """What the client has acknowledged and sent since it connected, by the kernel's own count."""
    client: socket.socket | None = connection.transport.get_extra_info("socket")
    if client is None or client.fileno() < 0:
        return 0
    try:
        info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:  # the connection has just ended
        return 0
    acknowledged, received = struct.unpack_from("=QQ", info, _TCP_INFO_BYTES_ACKED_AT)
    return int(acknowledged + received)


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket that listens there. Raises ResourceBusy when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ResourceBusy(
            f"cannot listen on {host}:{port}: {error.strerror}",
            cure="choose another port, or stop what listens there",
            facts={"host": host, "port": port},
        ) from error
    return listener
