"""What the engine processes ask of the front: the front's private socket, both ends of it.

The API process owns what a worker cannot do alone: requests, the listener, putting the whole engine to sleep. One
connection carries one request and is closed after it, so that nothing is open between two processes that are frozen.
Frames and errors are those of the control socket; any number of requests are served beside each other.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coldsnap.core.digest import Digest
from coldsnap.core.messages import Answer, ErrorFrame, Prompt
from coldsnap.engines.frames import encode_frame, error_frame, error_from_frame, first_problem, read_frames
from coldsnap.engines.sockets import SocketServer, connect_to
from coldsnap.errors import ColdsnapError, DeadlineExceeded, EngineError, InternalError

__all__ = ["FRONT_SOCKET", "FrontClient", "FrontServer", "FrontState", "Phase", "Service", "inner_socket_name"]

_log = logging.getLogger(__name__)

FRONT_SOCKET = "front.sock"
_BACKLOG = 16
_REQUEST_TIMEOUT_S = 10.0
_PATIENCE_S = 3600.0
_POLL_S = 0.05


def inner_socket_name(worker: str) -> str:
    """File name of the socket of a worker's engine process, beside `FRONT_SOCKET`; the worker's own is the front's."""
    return f"i-{Digest.of(worker.encode()).hex[:16]}.sock"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Phase = Literal["loading", "up", "quiet", "failed"]


class FrontState(_Record):
    """Where the engine as a whole is. `quiet`: at least one worker is; `error` is set in phase `failed`."""

    phase: Phase
    in_flight: int = Field(ge=0)
    serving: bool
    error: ErrorFrame | None = None


class Service(Protocol):
    """What the front does for its workers. Thread-safe; calls block, and raise ColdsnapError."""

    def state(self) -> FrontState:
        """At once, whatever else goes on."""
        ...

    def answer(self, prompt: Prompt) -> Answer:
        """As `EngineWorker.answer`. Raises EngineError in any phase but `up`."""
        ...

    def open(self, host: str, port: int) -> None:
        """As `EngineWorker.start_serving`."""
        ...

    def close(self, *, drain_s: float) -> int:
        """As `EngineWorker.stop_serving`."""
        ...

    def quiet(self, worker: str) -> None:
        """The engine holds no request, no KV and no cache afterwards, and touches no weight until `resume`."""
        ...

    def resume(self, worker: str) -> None:
        """`worker` has its weights again; the engine goes on when every quiet worker has."""
        ...

    def fail(self, error: ColdsnapError) -> None:
        """The engine is lost, for this reason, which a worker knows. The first one counts."""
        ...


class _Ask(StrEnum):
    STATE = "state"
    ANSWER = "answer"
    OPEN = "open"
    CLOSE = "close"
    QUIET = "quiet"
    RESUME = "resume"
    FAIL = "fail"


class _Question(_Record):
    ask: _Ask
    body: dict[str, Any] = Field(default_factory=dict)


class _Nothing(_Record):
    pass


class _Address(_Record):
    host: str
    port: int = Field(ge=1, le=65535)


class _Drain(_Record):
    drain_s: float = Field(ge=0)


class _Drained(_Record):
    requests: int = Field(ge=0)


class _WorkerName(_Record):
    worker: str


B = TypeVar("B", bound=BaseModel)
R = TypeVar("R", bound=BaseModel)


class FrontServer:
    """Serves `service` at `path` from `start` to `close`; a thread accepts, and one more runs for each request."""

    def __init__(self, path: Path, service: Service) -> None:
        self._service = service
        self._server = SocketServer(path, self._serve, backlog=_BACKLOG, names=("coldsnap-front", "coldsnap-ask"))
        self._asks: Mapping[_Ask, Callable[[Mapping[str, Any]], BaseModel]] = {
            _Ask.STATE: lambda body: self._service.state(),
            _Ask.ANSWER: lambda body: self._service.answer(_read(Prompt, body)),
            _Ask.OPEN: self._open,
            _Ask.CLOSE: lambda body: _Drained(requests=self._service.close(drain_s=_read(_Drain, body).drain_s)),
            _Ask.QUIET: self._quiet,
            _Ask.RESUME: self._resume,
            _Ask.FAIL: self._fail,
        }

    def start(self) -> None:
        """Bind and listen. Raises as `listen_at` does."""
        self._server.start()

    def close(self) -> None:
        """Stop listening and remove the socket. Requests being served run to their end. Idempotent."""
        self._server.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(_REQUEST_TIMEOUT_S)
                for frame in read_frames(connection, time.monotonic() + _REQUEST_TIMEOUT_S):
                    connection.sendall(encode_frame(self._outcome(frame)))
                    return
        except (OSError, ColdsnapError) as error:
            _log.info("a connection from an engine process broke: %s", error)

    def _outcome(self, frame: Mapping[str, Any]) -> dict[str, Any]:
        try:
            question = _read(_Question, frame)
            return {"result": self._asks[question.ask](question.body).model_dump(mode="json")}
        except ColdsnapError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - the front outlives any bug in a question
            _log.exception("the front failed by a bug")
            failure = InternalError(f"{type(error).__name__}: {error}", cure="please report it with the engine's log")
        return {"error": error_frame(failure).model_dump(mode="json")}

    def _open(self, body: Mapping[str, Any]) -> _Nothing:
        address = _read(_Address, body)
        self._service.open(address.host, address.port)
        return _Nothing()

    def _quiet(self, body: Mapping[str, Any]) -> _Nothing:
        self._service.quiet(_read(_WorkerName, body).worker)
        return _Nothing()

    def _resume(self, body: Mapping[str, Any]) -> _Nothing:
        self._service.resume(_read(_WorkerName, body).worker)
        return _Nothing()

    def _fail(self, body: Mapping[str, Any]) -> _Nothing:
        self._service.fail(error_from_frame(_read(ErrorFrame, body)))
        return _Nothing()


class FrontClient:
    """A worker's end. Holds no connection; any thread may call. Each call raises what the service raised.

    EngineError when the front is gone or breaks the protocol, DeadlineExceeded when it takes far too long.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def state(self) -> FrontState:
        """See `Service.state`."""
        return self._call(_Ask.STATE, _Nothing(), FrontState, deadline_s=_REQUEST_TIMEOUT_S)

    def wait_up(self, *, deadline_s: float) -> None:
        """Wait until the engine is up. Raises its own error when it failed, DeadlineExceeded after `deadline_s`."""
        deadline = time.monotonic() + deadline_s
        while True:
            state: FrontState | None = None
            with suppress(DeadlineExceeded):  # too busy to answer
                state = self.state()
            if state is not None and state.error is not None:
                raise error_from_frame(state.error)
            if state is not None and state.phase in ("up", "quiet"):
                return
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"vLLM did not come up within {deadline_s:g} s",
                    cure="look at the engine's log",
                    facts={"phase": "load", "deadline_s": deadline_s},
                )
            time.sleep(_POLL_S)

    def answer(self, prompt: Prompt) -> Answer:
        """See `Service.answer`."""
        return self._call(_Ask.ANSWER, prompt, Answer)

    def open(self, host: str, port: int) -> None:
        """See `Service.open`."""
        self._call(_Ask.OPEN, _Address(host=host, port=port), _Nothing)

    def close(self, *, drain_s: float) -> int:
        """See `Service.close`."""
        deadline_s = _PATIENCE_S + drain_s
        return self._call(_Ask.CLOSE, _Drain(drain_s=drain_s), _Drained, deadline_s=deadline_s).requests

    def quiet(self, worker: str) -> None:
        """See `Service.quiet`."""
        self._call(_Ask.QUIET, _WorkerName(worker=worker), _Nothing)

    def resume(self, worker: str) -> None:
        """See `Service.resume`."""
        self._call(_Ask.RESUME, _WorkerName(worker=worker), _Nothing)

    def fail(self, error: ColdsnapError) -> None:
        """See `Service.fail`."""
        self._call(_Ask.FAIL, error_frame(error), _Nothing, deadline_s=_REQUEST_TIMEOUT_S)

    def _call(self, ask: _Ask, body: BaseModel, reply: type[R], *, deadline_s: float = _PATIENCE_S) -> R:
        deadline = time.monotonic() + deadline_s
        try:
            with connect_to(self.path, deadline) as connection:
                connection.sendall(encode_frame({"ask": ask.value, "body": body.model_dump(mode="json")}))
                frames = list(read_frames(connection, deadline))  # ends when the front has closed its end
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the front did not finish {ask.value!r} within {deadline_s:g} s",
                cure="look at the engine's log",
                facts={"phase": ask.value, "deadline_s": deadline_s},
            ) from error
        except OSError as error:
            raise EngineError(
                f"the front's socket {self.path} failed during {ask.value!r}: {error.strerror or error}",
                cure="look at the engine's log",
                facts={"path": str(self.path)},
            ) from error
        match frames:
            case [{"error": failure}]:
                raise error_from_frame(_read(ErrorFrame, failure))
            case [{"result": result}]:
                return _read(reply, result)
            case []:
                raise EngineError(f"the front closed its socket before it answered {ask.value!r}")
        raise EngineError(f"the front's answer to {ask.value!r} is malformed: {str(frames)[:80]}")


def _read(kind: type[B], document: Mapping[str, Any]) -> B:
    try:
        return kind.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise EngineError(f"a frame between the front and a worker is malformed: {first_problem(error)}") from error
