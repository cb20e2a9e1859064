"""Private Unix sockets between processes of one unit: the two ends, and the longest path one can have."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from coldsnap.engines.frames import time_left
from coldsnap.errors import ResourceBusy, UsageError

__all__ = ["SocketServer", "connect_to", "listen_at"]

_MAX_SOCKET_PATH_BYTES = 107


class SocketServer:
    """Listens at `path` from `start` to `close`: one daemon thread accepts, one short one serves each connection.

    `serve` has the connection to itself, closes it, and raises nothing. With `most_at_once`, further connections
    wait in the backlog while so many are being served.
    """

    def __init__(
        self,
        path: Path,
        serve: Callable[[socket.socket], None],
        *,
        backlog: int,
        names: tuple[str, str],
        most_at_once: int | None = None,
    ) -> None:
        self._path = path
        self._serve = serve
        self._backlog = backlog
        self._accepting, self._serving = names
        self._slots = threading.BoundedSemaphore(most_at_once) if most_at_once is not None else None
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Bind and listen. Raises as `listen_at` does."""
        self._socket = listen_at(self._path, backlog=self._backlog)
        threading.Thread(target=self._accept, args=(self._socket,), name=self._accepting, daemon=True).start()

    def close(self) -> None:
        """Stop listening and remove the socket. Requests being served run to their end. Idempotent."""
        listener, self._socket = self._socket, None
        if listener is not None:
            self._path.unlink(missing_ok=True)
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            if self._slots is not None:
                self._slots.acquire()
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve_one, args=(connection,), name=self._serving, daemon=True).start()

    def _serve_one(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        finally:
            if self._slots is not None:
                self._slots.release()


def listen_at(path: Path, *, backlog: int) -> socket.socket:
    """A socket only this user can connect to. Raises UsageError for a path no socket can have, ResourceBusy else."""
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise UsageError(
            f"control socket path {path} is longer than {_MAX_SOCKET_PATH_BYTES} bytes",
            cure="choose a shorter worker id or run folder",
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise ResourceBusy(
            f"control socket {path} cannot be opened: {error.strerror}",
            cure="every worker needs a socket path of its own in a folder it may write",
            facts={"path": str(path)},
        ) from error
    return listener


def connect_to(path: Path, deadline: float) -> socket.socket:
    """A connection to who listens at `path`, however long it is. Raises OSError, TimeoutError at `deadline`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = -1
    try:
        connection.settimeout(time_left(deadline))
        address = str(path)
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
            folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            address = f"/proc/self/fd/{folder}/{path.name}"
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    finally:
        if folder >= 0:
            os.close(folder)
    return connection
