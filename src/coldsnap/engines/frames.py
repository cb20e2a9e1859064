"""Frames of the control socket as bytes, and errors as frames.

A frame is one line of canonical JSON (`coldsnap.core.messages`). An error crosses the socket as the name of its
class in `coldsnap.errors` with its message, cure and facts, and is the same class again on the other side.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from coldsnap import errors
from coldsnap.core.messages import MAX_FRAME_BYTES, ErrorFrame
from coldsnap.errors import ColdsnapError, EngineError, OperationInterrupted, Problem

__all__ = ["encode_frame", "error_frame", "error_from_frame", "first_problem", "read_frames", "time_left"]

_CANCEL_POLL_S = 0.2
_RECEIVE_BYTES = 1 << 16


def encode_frame(frame: Mapping[str, Any]) -> bytes:
    """One line of canonical JSON. Raises EngineError when it would be longer than a frame may be."""
    data = json.dumps(frame, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
    if len(data) > MAX_FRAME_BYTES:
        raise EngineError(
            f"a control frame of {len(data)} bytes is over the limit of {MAX_FRAME_BYTES}",
            facts={"bytes": len(data), "limit_bytes": MAX_FRAME_BYTES},
        )
    return data


def error_frame(error: ColdsnapError) -> ErrorFrame:
    """The error as a frame. Facts that are not JSON travel as their text; problems travel as facts."""
    facts = {name: _plain(value) for name, value in error.facts.items()}
    problems = getattr(error, "problems", None)
    if problems is not None:
        facts["subject"] = getattr(error, "subject", "")
        facts["problems"] = [p.document() for p in problems]
    return ErrorFrame(kind=type(error).__name__, message=error.message, cure=error.cure, facts=facts)


def error_from_frame(frame: ErrorFrame) -> ColdsnapError:
    """The error a frame carries; a kind this program does not know becomes EngineError."""
    found = getattr(errors, frame.kind, None) if frame.kind in errors.__all__ else None
    facts = dict(frame.facts)
    if not (isinstance(found, type) and issubclass(found, ColdsnapError)):
        return EngineError(f"{frame.kind}: {frame.message}", cure=frame.cure, facts=facts)
    if issubclass(found, errors.InvalidDocument | errors.Refused):
        try:
            problems = tuple(Problem(**problem) for problem in facts.pop("problems"))
            return found(str(facts.pop("subject")), problems, cure=frame.cure, facts=facts)
        except (KeyError, TypeError):
            return EngineError(f"{frame.kind}: {frame.message}", cure=frame.cure, facts=facts)
    if issubclass(found, errors.PayloadRejected | errors.SignatureRejected):
        return found(str(facts.pop("reason", "")), frame.message, cure=frame.cure, facts=facts)
    if issubclass(found, errors.RemoteError):
        reason, place = str(facts.pop("reason", "")), str(facts.pop("place", ""))
        return found(reason, frame.message, place=place, cure=frame.cure, facts=facts)
    return found(frame.message, cure=frame.cure, facts=facts)


def _plain(value: object) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)


def first_problem(error: ValidationError) -> str:
    """The first thing pydantic found wrong, as one line."""
    problem = error.errors()[0]
    return f"{'.'.join(str(part) for part in problem['loc']) or 'frame'}: {problem['msg']}"


def read_frames(
    connection: socket.socket, deadline: float, *, cancelled: Callable[[], bool] | None = None
) -> Iterator[dict[str, Any]]:
    """Frames until the other end closes.

    Raises TimeoutError at the deadline, OperationInterrupted soon after `cancelled` says so, EngineError on nonsense.
    """
    buffer = bytearray()
    searched = 0
    while True:
        end = buffer.find(b"\n", searched)
        if end < 0:
            searched = len(buffer)
            if searched > MAX_FRAME_BYTES:
                raise EngineError(f"a control frame is longer than the limit of {MAX_FRAME_BYTES} bytes")
            received = _receive(connection, deadline, cancelled)
            if not received:
                if buffer:
                    raise EngineError(f"the control socket was closed in the middle of a frame: {bytes(buffer[:80])!r}")
                return
            buffer += received
            continue
        line, searched = bytes(buffer[:end]), 0
        del buffer[: end + 1]
        try:
            frame = json.loads(line)
        except (ValueError, RecursionError) as error:  # the second from a deep one
            raise EngineError(f"a control frame is not JSON: {line[:80]!r}") from error
        if not isinstance(frame, dict):
            raise EngineError(f"a control frame is not an object: {line[:80]!r}")
        yield frame


def _receive(connection: socket.socket, deadline: float, cancelled: Callable[[], bool] | None) -> bytes:
    while True:
        left = time_left(deadline)
        connection.settimeout(left if cancelled is None else min(left, _CANCEL_POLL_S))
        try:
            return connection.recv(_RECEIVE_BYTES)
        except TimeoutError:
            if cancelled is not None and cancelled():
                raise OperationInterrupted("stopped waiting for the worker") from None


def time_left(deadline: float) -> float:
    """Seconds until `deadline` on the monotonic clock. Raises TimeoutError when it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
