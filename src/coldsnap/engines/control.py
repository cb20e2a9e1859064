"""The private socket between the controller and an engine process: both ends of it.

Frames are those of `coldsnap.core.messages`. Two choices serve the freeze: a connection carries one request
and the worker closes it right after its last frame, and `ControlClient.call` returns only after it has seen
that close. So when a call has returned, no descriptor in the engine's process tree leads to the controller.

Nothing here trusts the other end: frames are bounded, a connection that says nothing is dropped, and every
wait of the client ends at its deadline.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from pydantic import BaseModel, ValidationError

from coldsnap.core.messages import ErrorFrame, Request, Verb, WorkerState, WorkerStatus
from coldsnap.engines.frames import (
    encode_frame,
    error_frame,
    error_from_frame,
    first_problem,
    read_frames,
)
from coldsnap.engines.sockets import SocketServer, connect_to
from coldsnap.errors import ColdsnapError, DeadlineExceeded, EngineError, InternalError, ResourceBusy

__all__ = ["Call", "ControlClient", "ControlServer", "Handler", "Progress"]

_log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0
PROGRESS_INTERVAL_S = 0.1
_MAX_CONNECTIONS = 8

R = TypeVar("R", bound=BaseModel)
Progress = Mapping[str, Any]


class Call:
    """One request being served: what a handler may know about and tell its caller.

    `cancelled` is set when the caller has gone away; a long verb watches it and undoes what it began.
    """

    def __init__(self, request: Request, send: Callable[[dict[str, Any]], None]) -> None:
        self.request = request
        self.cancelled = threading.Event()
        self._send = send
        self._lock = threading.Lock()
        self._last = (-PROGRESS_INTERVAL_S, "")

    def progress(self, phase: str, *, done_bytes: int, total_bytes: int) -> None:
        """Tell the caller how far `phase` is. Thread-safe, never blocks for long, drops what comes too often."""
        with self._lock:
            now = time.monotonic()
            sent_at, last_phase = self._last
            if phase == last_phase and done_bytes < total_bytes and now - sent_at < PROGRESS_INTERVAL_S:
                return
            self._last = (now, phase)
            if self.cancelled.is_set():
                return
            try:
                body = {"phase": phase, "done_bytes": done_bytes, "total_bytes": total_bytes}
                self._send({"id": self.request.id, "progress": body})
            except OSError:
                self.cancelled.set()

    def phase(self, name: str, total_bytes: int) -> Callable[[int], None]:
        """A thread-safe counter of bytes done since its last call, reported as progress of phase `name`."""
        lock = threading.Lock()
        done = 0

        def advance(num_bytes: int) -> None:
            nonlocal done
            with lock:
                done += num_bytes
                so_far = done
            self.progress(name, done_bytes=so_far, total_bytes=total_bytes)

        return advance


class Handler(Protocol):
    """Serves one verb. Raises ColdsnapError; anything else is reported as a bug of ours."""

    def __call__(self, call: Call) -> BaseModel: ...


class ControlServer:
    """The engine process's end: a listening socket, one thread that accepts, one short thread a connection.

    Any number of `status` requests are served beside one other request; a second one is refused with
    ResourceBusy. Use as a context manager, or `start` and `close`.
    """

    def __init__(self, path: Path, handler: Handler) -> None:
        self._handler = handler
        self._busy_with: Verb | None = None
        self._busy_lock = threading.Lock()
        self._server = SocketServer(
            path,
            self._serve,
            backlog=_MAX_CONNECTIONS,
            names=("coldsnap-control", "coldsnap-request"),
            most_at_once=_MAX_CONNECTIONS,
        )

    def start(self) -> None:
        """Bind and listen. Raises UsageError for a path no socket can have, ResourceBusy for a taken one."""
        self._server.start()

    def close(self) -> None:
        """Stop listening and remove the socket. Requests being served run to their end. Idempotent."""
        self._server.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._answer(connection)
        except OSError as error:
            _log.info("a control connection broke: %s", error)

    def _answer(self, connection: socket.socket) -> None:
        lock = threading.Lock()

        def send(frame: dict[str, Any]) -> None:
            with lock:
                connection.sendall(encode_frame(frame))

        try:
            frame = _one_frame(connection, time.monotonic() + REQUEST_TIMEOUT_S)
        except ColdsnapError as error:
            send({"id": 0, "error": error_frame(error).model_dump(mode="json")})
            return
        connection.settimeout(REQUEST_TIMEOUT_S)
        try:
            request = Request.model_validate_json(json.dumps(frame))
        except ValidationError as error:
            malformed = EngineError(f"the control request is malformed: {first_problem(error)}")
            send({"id": 0, "error": error_frame(malformed).model_dump(mode="json")})
            return
        send({"id": request.id, **self._outcome(Call(request, send))})

    def _outcome(self, call: Call) -> dict[str, Any]:
        try:
            with self._only_one(call.request.verb):
                return {"result": self._handler(call).model_dump(mode="json")}
        except ColdsnapError as error:
            return {"error": error_frame(error).model_dump(mode="json")}
        except Exception as error:  # noqa: BLE001 - the engine process outlives any bug in a verb
            _log.exception("control request %r failed by a bug", call.request.verb.value)
            bug = InternalError(f"{type(error).__name__}: {error}", cure="please report it with the engine's log")
            return {"error": error_frame(bug).model_dump(mode="json")}

    @contextmanager
    def _only_one(self, verb: Verb) -> Iterator[None]:
        if verb is Verb.STATUS:
            yield
            return
        with self._busy_lock:
            if self._busy_with is not None:
                raise ResourceBusy(
                    f"the worker is busy with {self._busy_with.value!r} and cannot begin {verb.value!r}",
                    cure="wait for it to end",
                    facts={"busy_with": self._busy_with.value},
                )
            self._busy_with = verb
        try:
            yield
        finally:
            with self._busy_lock:
                self._busy_with = None


class ControlClient:
    """The controller's end. Holds no connection: each call makes one and leaves none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._next_id = 0

    def call(
        self,
        verb: Verb,
        body: BaseModel | None = None,
        *,
        reply: type[R],
        deadline_s: float,
        on_progress: Callable[[Progress], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> R:
        """Ask for `verb` and return its reply.

        Raises what the worker raised, by class of `coldsnap.errors`; DeadlineExceeded when it takes longer than
        `deadline_s`; OperationInterrupted when `cancelled` says so; EngineError when nobody listens or the worker
        breaks the protocol.
        """
        deadline = time.monotonic() + deadline_s
        self._next_id += 1
        request = {
            "id": self._next_id,
            "verb": verb.value,
            # Defaults are left to the worker: one that was captured by an older version knows fewer fields.
            "body": body.model_dump(mode="json", exclude_defaults=True) if body is not None else {},
        }
        try:
            with connect_to(self.path, deadline) as connection:
                connection.sendall(encode_frame(request))
                frames = read_frames(connection, deadline, cancelled=cancelled)
                for frame in frames:
                    if frame.get("id") not in (self._next_id, 0):
                        raise EngineError(f"the worker answered request {frame.get('id')!r}, not {self._next_id}")
                    if "progress" not in frame:
                        for more in frames:  # ends when the worker has closed its end
                            raise EngineError(f"the worker sent more after its last frame: {str(more)[:80]}")
                        return _result(frame, verb, reply)
                    if on_progress is not None:
                        on_progress(frame["progress"])
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the worker did not finish {verb.value!r} within {deadline_s:g} s",
                cure="look at the engine's log",
                facts={"phase": verb.value, "deadline_s": deadline_s},
            ) from error
        except OSError as error:
            raise EngineError(
                f"the worker's control socket {self.path} failed during {verb.value!r}: {error.strerror or error}",
                cure="look at the engine's log",
                facts={"path": str(self.path)},
            ) from error
        raise EngineError(f"the worker closed its control socket before it answered {verb.value!r}")

    def status(self, *, deadline_s: float = 10.0) -> WorkerStatus:
        """The worker's status."""
        return self.call(Verb.STATUS, reply=WorkerStatus, deadline_s=deadline_s)

    def wait_loaded(
        self, *, deadline_s: float, alive: Callable[[], bool] | None = None, poll_s: float = 0.05
    ) -> WorkerStatus:
        """Wait until the worker listens and has left `loading`, and return its status.

        Raises the worker's own error when loading failed, EngineError when `alive` says that the process is
        gone, DeadlineExceeded after `deadline_s`.
        """
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                status = self.status(deadline_s=max(0.1, min(5.0, deadline - time.monotonic())))
            except (EngineError, DeadlineExceeded):
                status = None  # not listening yet, or too busy importing to answer
            if status is not None and status.state is WorkerState.FAILED and status.error is not None:
                raise error_from_frame(status.error)
            if status is not None and status.state is not WorkerState.LOADING:
                return status
            if alive is not None and not alive():
                raise EngineError("the engine process ended while it was loading", cure="look at the engine's log")
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"the engine did not finish loading within {deadline_s:g} s",
                    cure="look at the engine's log",
                    facts={"phase": "load", "deadline_s": deadline_s},
                )
            time.sleep(poll_s)


def _result(frame: Mapping[str, Any], verb: Verb, reply: type[R]) -> R:
    try:
        if "error" in frame:
            raise error_from_frame(ErrorFrame.model_validate_json(json.dumps(frame["error"])))
        return reply.model_validate_json(json.dumps(frame["result"]))
    except KeyError as error:
        raise EngineError(f"the worker's answer to {verb.value!r} holds neither result nor error") from error
    except ValidationError as error:
        raise EngineError(f"the worker's answer to {verb.value!r} is malformed: {first_problem(error)}") from error


def _one_frame(connection: socket.socket, deadline: float) -> dict[str, Any]:
    try:
        for frame in read_frames(connection, deadline):
            return frame
    except TimeoutError as error:
        raise DeadlineExceeded(
            "the control client sent no request in time",
            facts={"phase": "request", "deadline_s": REQUEST_TIMEOUT_S},
        ) from error
    raise EngineError("the control client closed before it sent a request")
