"""Lines of JSON over a socket pair, between the controller and the programs it starts inside a unit.

A closed channel is itself a message: the other side is gone. Standard library only, because the unit's init
runs it without site-packages.
"""

from __future__ import annotations

import json
import socket
from typing import Any

__all__ = ["Channel", "Closed"]

_MAX_BUFFERED_BYTES = 64 * 1024 * 1024


class Closed(Exception):
    """The other side is gone."""


class Channel:
    """One end. Not for use by several threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    def close(self) -> None:
        """Tell the other side that this one is done. May be repeated."""
        self._socket.close()

    def send(self, message: dict[str, Any], *, timeout_s: float | None = None) -> None:
        """Send one message. Raises Closed, and TimeoutError when the other side does not read."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except TimeoutError:
            raise
        except OSError as error:
            raise Closed from error

    def receive(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """The next message. Raises Closed, TimeoutError, and ValueError on something that is no message."""
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > _MAX_BUFFERED_BYTES:
                raise ValueError("message too long")
            self._socket.settimeout(timeout_s)
            try:
                piece = self._socket.recv(65536)
            except TimeoutError:
                raise
            except OSError as error:
                raise Closed from error
            if not piece:
                raise Closed
            self._buffer += piece
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("a message is an object")
        return message
