"""What probes freeze: a process inside a unit that does as it is told, one request a connection.

It touches CUDA with its first call of ``libcuda`` and not before, so it can be frozen before as well as after. Each
line ``{"call", "arguments"}`` is answered with ``{"value"}`` or ``{"call", "code"}``; ``ping`` answers without CUDA.
Standard library only.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
from typing import Any, NoReturn

from coldsnap.capsule.cuda.helper import CALLS_VARIABLE, DEFAULT_CALLS, refusal

__all__ = ["SOCKET_NAME", "main"]

SOCKET_NAME = "subject.sock"
_RUN_DIR = "/run/coldsnap"


def main() -> NoReturn:
    """Serve until killed."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{_RUN_DIR}/{SOCKET_NAME}")
    listener.listen()
    calls: Any = None
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            message = json.loads(lines.readline() or "{}")
            if message.get("call") == "ping":
                reply: dict[str, Any] = {"value": os.getpid()}
            else:
                try:
                    if calls is None:
                        calls = importlib.import_module(os.environ.get(CALLS_VARIABLE, DEFAULT_CALLS)).open_calls()
                    reply = {"value": getattr(calls, message["call"])(*message["arguments"])}
                except Exception as error:  # noqa: BLE001 - whatever it was, the prober is told
                    reply = refusal(str(message.get("call")), error)
            connection.sendall(json.dumps(reply).encode() + b"\n")
