"""One worker as its controller sees it, held by the front process.

The engine process of a worker is born late (imports take 20 s), may die, and is not there at all in a template. So the
front holds the worker's control socket from the first moment and passes on what is asked: verb and body to the engine
process, progress and the reply back, its errors as they are. What it answers itself is the status before there is
anybody to ask, and after the engine is lost. From `template` on, a `place` makes the engine process first.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, RootModel

from coldsnap.core.messages import ErrorFrame, PlaceBody, Verb, WorkerSettings, WorkerState, WorkerStatus
from coldsnap.engines.control import Call, ControlClient, Progress
from coldsnap.engines.frames import error_frame, error_from_frame
from coldsnap.engines.verbs import body_of, state_after
from coldsnap.errors import ColdsnapError, DeadlineExceeded, EngineError, OperationInterrupted

__all__ = ["FrontWorker"]

_log = logging.getLogger(__name__)

ENGINE = "vllm"
_STATUS_TIMEOUT_S = 10.0
_BORN_TIMEOUT_S = 600.0
_POLL_S = 0.05
# A caller that goes away is seen when progress is told to it, and has a deadline of its own. This one is for a caller
# that went away in silence while the engine process hangs.
_RELAY_TIMEOUT_S = 6 * 3600.0


class _Document(RootModel[dict[str, Any]]):
    """A body or a reply on its way through: the two ends know what is in it."""


class FrontWorker:
    """The handler of the `ControlServer` at `settings.socket`. Any thread may call any method."""

    def __init__(
        self,
        settings: WorkerSettings,
        inner_socket: Path,
        *,
        start: Callable[[Mapping[str, str]], None],
        template: bool,
    ) -> None:
        """`start` makes the engine, with these variables in its environment, when a `template` is placed.

        It returns before the engine is up; called once more by another worker of the same engine it does nothing.
        """
        self._settings = settings
        self._inner_socket = inner_socket
        self._start = start
        self._template = template
        self._state = WorkerState.LOADING
        self._versions: Mapping[str, str] = {}
        self._error: ErrorFrame | None = None
        self._met = False

    def imported(self, versions: Mapping[str, str]) -> None:
        """All code is there, in `versions`; a template waits to be placed from here on."""
        self._versions = dict(versions)
        if self._template:
            self._state = WorkerState.TEMPLATE

    def fail(self, error: ColdsnapError) -> None:
        """The engine is lost, for `error`. The first one counts."""
        if self._error is None:
            _log.error("worker %s failed: %s", self._settings.worker, error)
            self._error = error_frame(error)

    def __call__(self, call: Call) -> BaseModel:
        """Serve one verb. Raises what the engine process raises, or why there is none."""
        verb = call.request.verb
        if verb is Verb.STATUS:
            return self._status()
        if self._error is not None:
            state_after(WorkerState.FAILED, verb)
        if self._met or self._inner_socket.exists():
            return self._relay(call)
        state_after(self._state, verb)
        return self._place(call)

    def _status(self) -> WorkerStatus:
        if self._error is None and (self._met or self._inner_socket.exists()):
            try:
                status = ControlClient(self._inner_socket).status(deadline_s=_STATUS_TIMEOUT_S)
            except (EngineError, DeadlineExceeded):
                if self._met and self._error is None:
                    raise
            else:
                self._met = True
                return status
        return WorkerStatus(
            worker=self._settings.worker,
            unit=self._settings.unit,
            rank=self._settings.rank,
            pid=os.getpid(),
            state=self._state if self._error is None else WorkerState.FAILED,
            engine=ENGINE,
            engine_versions=dict(self._versions),
            host=None,
            port=None,
            in_flight=0,
            mapped_bytes=0,
            error=self._error,
        )

    def _place(self, call: Call) -> BaseModel:
        """Make the engine process, and let it take its place; a failure before it is born leaves `failed`."""
        try:
            self._start(body_of(PlaceBody, call).environment)
            self._wait_born(call)
        except ColdsnapError as error:
            self.fail(error)
            raise
        return self._relay(call)

    def _wait_born(self, call: Call) -> None:
        deadline = time.monotonic() + _BORN_TIMEOUT_S
        while not self._is_born():
            self._check_wanted(call)
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"the engine process of worker {self._settings.worker} did not begin within {_BORN_TIMEOUT_S:g} s",
                    cure="look at the engine's log",
                    facts={"phase": "place", "deadline_s": _BORN_TIMEOUT_S},
                )
            time.sleep(_POLL_S)

    def _is_born(self) -> bool:
        """Whether it waits to be placed, or says itself why it cannot."""
        try:
            state = ControlClient(self._inner_socket).status(deadline_s=_STATUS_TIMEOUT_S).state
        except (EngineError, DeadlineExceeded):
            return False
        self._met = True
        return state is not WorkerState.LOADING

    def _relay(self, call: Call) -> BaseModel:
        def pass_on(progress: Progress) -> None:
            try:
                phase, done, total = (progress[name] for name in ("phase", "done_bytes", "total_bytes"))
                call.progress(str(phase), done_bytes=int(done), total_bytes=int(total))
            except (KeyError, TypeError, ValueError) as error:
                raise EngineError(f"the engine process sent malformed progress: {str(progress)[:80]}") from error
            self._check_wanted(call)  # leaving closes the connection, and so tells the engine process

        try:
            return ControlClient(self._inner_socket).call(
                call.request.verb,
                _Document(call.request.body),
                reply=_Document,
                deadline_s=_RELAY_TIMEOUT_S,
                on_progress=pass_on,
                cancelled=lambda: call.cancelled.is_set() or self._error is not None,
            )
        except (EngineError, OperationInterrupted):
            if self._error is not None:
                raise error_from_frame(self._error) from None
            raise

    def _check_wanted(self, call: Call) -> None:
        """Raises why the engine was lost, or OperationInterrupted when the caller has gone away."""
        if self._error is not None:
            raise error_from_frame(self._error)
        if call.cancelled.is_set():
            raise OperationInterrupted("the caller went away")
