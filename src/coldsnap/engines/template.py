"""A worker that waits: everything imported, nothing loaded, no device touched, until it is told its place.

A process in this state is the same on every machine that can run its code. A snapshot driver freezes it before any
accelerator knows of it, and each restored copy is placed on the devices of its own host. From then on it is an
`InnerWorker` like any other. A `place` that fails leaves `failed`, where only `status` is answered: half a model may
be there, and a fresh copy of the template costs less than telling which half.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Mapping

from pydantic import BaseModel

from coldsnap.core.messages import (
    ErrorFrame,
    PlaceBody,
    Placed,
    Verb,
    WorkerSettings,
    WorkerState,
    WorkerStatus,
)
from coldsnap.engines.control import Call
from coldsnap.engines.frames import error_frame
from coldsnap.engines.inner import InnerWorker
from coldsnap.engines.kernel import trim_heap
from coldsnap.engines.protocol import EngineWorker
from coldsnap.engines.timing import timed
from coldsnap.engines.verbs import body_of, state_after
from coldsnap.errors import ColdsnapError, EngineError
from coldsnap.hydrate.memory import StableMemory

__all__ = ["TemplateWorker", "make_worker"]

_log = logging.getLogger(__name__)


def make_worker(
    settings: WorkerSettings,
    engine: EngineWorker,
    make_memory: Callable[[], StableMemory],
    *,
    set_environment: Callable[[Mapping[str, str]], None] = os.environ.update,
) -> InnerWorker | TemplateWorker:
    """The worker that `settings` describe: loaded by `load`, or a template, which makes its memory when placed."""
    if settings.template:
        return TemplateWorker(settings, engine, make_memory, set_environment=set_environment)
    return InnerWorker(settings, engine, make_memory())


class TemplateWorker:
    """The handler of a `ControlServer` from `loading` over `template` to the end of its life."""

    def __init__(
        self,
        settings: WorkerSettings,
        engine: EngineWorker,
        make_memory: Callable[[], StableMemory],
        *,
        set_environment: Callable[[Mapping[str, str]], None],
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._make_memory = make_memory
        self._set_environment = set_environment
        self._state = WorkerState.LOADING
        self._error: ErrorFrame | None = None
        self._inner: InnerWorker | None = None

    @property
    def state(self) -> WorkerState:
        """Where this worker is in its life."""
        return self._inner.state if self._inner is not None else self._state

    def load(self) -> None:
        """Import everything. A failure leaves `failed` and is kept."""
        began = time.monotonic()
        try:
            self._engine.prepare_template()
            gc.collect()
            trim_heap()  # what imports left behind would lie in every copy
        except ColdsnapError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - the controller is told, whatever it was
            _log.exception("the engine failed to become a template")
            self._fail(EngineError(f"the engine failed to become a template: {type(error).__name__}: {error}"))
        else:
            self._state = WorkerState.TEMPLATE
            _log.info("a template after %.2f s", time.monotonic() - began)

    def close(self) -> None:
        """As `InnerWorker.close`, once placed; a template has nothing to close."""
        if self._inner is not None:
            self._inner.close()

    def __call__(self, call: Call) -> BaseModel:
        """Serve one verb. Raises UsageError for a verb the current state does not allow."""
        if self._inner is not None:
            return self._inner(call)
        verb = call.request.verb
        after = state_after(self._state, verb)
        if verb is Verb.STATUS:
            return self._status()
        placed = self._place(body_of(PlaceBody, call), call)
        self._state = after
        return placed

    def _place(self, body: PlaceBody, call: Call) -> Placed:
        seconds: dict[str, float] = {}
        report = None
        try:
            with timed(seconds, "memory"):
                self._set_environment(body.environment)
                inner = InnerWorker(self._settings, self._engine, self._make_memory())
            if body.wake is not None:
                report = inner.build(body.wake, call, seconds)
            else:
                with timed(seconds, "load"):
                    inner.bring_up()
        except ColdsnapError as error:
            self._fail(error)
            raise
        except Exception as error:
            _log.exception("the template could not be placed")
            failure = EngineError(f"the template could not be placed: {type(error).__name__}: {error}")
            self._fail(failure)
            raise failure from error
        self._inner = inner
        return Placed(seconds=seconds, wake=report)

    def _status(self) -> WorkerStatus:
        return WorkerStatus(
            worker=self._settings.worker,
            unit=self._settings.unit,
            rank=self._settings.rank,
            pid=os.getpid(),
            state=self._state,
            engine=self._engine.name,
            engine_versions=dict(self._engine.versions()) if self._state is WorkerState.TEMPLATE else {},
            host=None,
            port=None,
            in_flight=0,
            mapped_bytes=0,
            error=self._error,
        )

    def _fail(self, error: ColdsnapError) -> None:
        _log.error("worker %s failed: %s", self._settings.worker, error)
        self._error = error_frame(error)
        self._state = WorkerState.FAILED
