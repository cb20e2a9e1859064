"""The small process that makes CUDA calls about other processes, so that the controller never does.

It reads lines of JSON ``{"id", "call", ...}`` from its channel, runs each in a thread of its own, and answers
``{"id", "value"}`` or ``{"id", "call", "code"}``. When its channel is closed it ends at once, whatever hangs. One
variable may name the module that has the calls, for tests; it is ``libcuda`` otherwise. Standard library only.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import threading
from typing import Any, NoReturn

__all__ = ["CALLS_VARIABLE", "DEFAULT_CALLS", "main", "refusal"]

CALLS_VARIABLE = "COLDSNAP_CUDA_CALLS"
DEFAULT_CALLS = "coldsnap.capsule.cuda.libcuda"


def main(channel_fd: int) -> NoReturn:
    """Serve until the channel is closed."""
    channel = socket.socket(fileno=channel_fd)
    lock = threading.Lock()

    def answer(message: dict[str, Any]) -> None:
        with lock:
            channel.sendall(json.dumps(message).encode() + b"\n")

    try:
        calls = importlib.import_module(os.environ.get(CALLS_VARIABLE, DEFAULT_CALLS)).open_calls()
    except Exception as error:  # noqa: BLE001 - whatever it was, the controller is told
        answer({"id": 0, **refusal("cuInit", error)})
        os._exit(1)
    answer({"id": 0, "value": None})
    for line in channel.makefile("rb"):
        message = json.loads(line)
        threading.Thread(target=_serve, args=(calls, message, answer), daemon=True).start()
    os._exit(0)


def _serve(calls: Any, message: dict[str, Any], answer: Any) -> None:
    try:
        value = getattr(calls, message["call"])(*message["arguments"])
    except Exception as error:  # noqa: BLE001 - as above
        answer({"id": message["id"], **refusal(message["call"], error)})
    else:
        answer({"id": message["id"], "value": value})


def refusal(call: str, error: Exception) -> dict[str, Any]:
    """A failed call as an answer."""
    return {"call": getattr(error, "call", call), "code": getattr(error, "code", f"{type(error).__name__}: {error}")}
