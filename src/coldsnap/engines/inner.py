"""The half of coldsnap that lives in an engine process: the worker's life around one `EngineWorker`.

The table is `core.workerlife.TRANSITIONS`; this file holds the acts that belong to its arrows. It owns the order
of things (close the listener, then let the engine tidy up, then unmap) and what a failure leaves behind:

- a verb the table refuses changes nothing;
- `sleep` that fails after the listener closed leaves `idle`, and may be tried again;
- `wake` that fails leaves `asleep` with every page given back, and may be tried again;
- a pack that is being written in the background is finished, or given up, before `export` and `sleep` go on: no
  thread of it may be frozen with the process;
- memory that cannot be unmapped or a load that failed leaves `failed`, where only `status` is answered.

Nothing raised here ends the process: `ControlServer` turns it into an error frame.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from pydantic import BaseModel

from coldsnap.core.messages import (
    AnswerBody,
    Answers,
    ErrorFrame,
    ExportBody,
    Exported,
    MaterializeBody,
    Materialized,
    PackSource,
    ServeBody,
    Serving,
    SleepBody,
    SleepReport,
    Verb,
    WakeBody,
    WakeReport,
    WorkerSettings,
    WorkerState,
    WorkerStatus,
)
from coldsnap.core.points import reached
from coldsnap.core.policy import Materialize
from coldsnap.engines.control import Call
from coldsnap.engines.export import export_memory
from coldsnap.engines.frames import error_frame
from coldsnap.engines.local_model import checkpoint_files
from coldsnap.engines.materialize import Materializer, PackPlan, plan_pack
from coldsnap.engines.observer import Observer
from coldsnap.engines.protocol import EngineWorker
from coldsnap.engines.relocation import Relocation
from coldsnap.engines.safetensors import SafetensorsFile, metadata_sha256
from coldsnap.engines.timing import timed
from coldsnap.engines.verbs import body_of, state_after
from coldsnap.engines.wake import fill_memory
from coldsnap.errors import ColdsnapError, EngineError, InternalError, UsageError
from coldsnap.hydrate.memory import StableMemory

__all__ = ["InnerWorker"]

_log = logging.getLogger(__name__)

_EXPORT_PATIENCE_S = 600.0


class InnerWorker:
    """One worker: its settings, its engine, its memory, and where it is in its life.

    An instance is the handler of a `ControlServer`, which gives it one verb at a time beside `status`.
    """

    def __init__(self, settings: WorkerSettings, engine: EngineWorker, memory: StableMemory) -> None:
        self._settings = settings
        self._engine = engine
        self._memory = memory
        self._observer = Observer()
        self._state = WorkerState.LOADING
        self._error: ErrorFrame | None = None
        self._address: tuple[str, int] | None = None
        self._loaded_seconds: float | None = None
        self._headers: Sequence[SafetensorsFile] = ()
        self._relocation: Relocation | None = None
        self._in_verb = False
        self._materializer = Materializer(memory, busy=self._is_busy, serving=lambda: self._address is not None)
        self._verbs: Mapping[Verb, Callable[[Call], BaseModel]] = {
            Verb.STATUS: self._status,
            Verb.ANSWER: self._answer,
            Verb.EXPORT: self._export,
            Verb.SERVE: self._serve,
            Verb.STOP_SERVING: self._stop_serving,
            Verb.SLEEP: self._sleep,
            Verb.WAKE: self._wake,
            Verb.MATERIALIZE: self._materialize,
        }
        self._lock = threading.Lock()

    @property
    def state(self) -> WorkerState:
        """Where this worker is in its life."""
        return self._state

    def load(self) -> None:
        """Load the engine and, where the settings name a port, serve. A failure leaves `failed` and is kept."""
        with suppress(ColdsnapError):
            self.bring_up()

    def bring_up(self) -> None:
        """As `load`, and raises what it keeps."""
        with self._coming_up():
            self._engine.load(self._memory, self._observer)
            reached("worker.loaded")
            if self._settings.port is not None:
                self._open(self._settings.host, self._settings.port)

    def build(self, body: WakeBody, call: Call, seconds: dict[str, float]) -> WakeReport:
        """Build the model from metadata, wherever it lands, and fill it as `body` says; then it is `idle`.

        The steps go into `seconds`. A failure is raised, leaves `failed` without a page mapped, and is kept.
        """
        with self._coming_up():
            with timed(seconds, "build"):
                self._engine.build(self._memory, self._observer)
                allocations = self._memory.allocations
                built = self._observer.observation(allocations).extents
                self._relocation = Relocation(allocations=allocations, ranges=tuple(one.range for one in built))
            with timed(seconds, "wake"):
                return self._fill(body, call)

    @contextmanager
    def _coming_up(self) -> Iterator[None]:
        """From `loading` to `idle` or `serving`; or to `failed`, raising a ColdsnapError."""
        began = time.monotonic()
        try:
            yield
        except ColdsnapError as error:
            self._fail(error)
            raise
        except Exception as error:
            _log.exception("the engine failed to load")
            failure = EngineError(f"the engine failed to load: {type(error).__name__}: {error}")
            self._fail(failure)
            raise failure from error
        self._loaded_seconds = time.monotonic() - began
        self._state = WorkerState.SERVING if self._address is not None else WorkerState.IDLE
        _log.info("loaded in %.2f s, %s", self._loaded_seconds, self._state.value)

    def close(self) -> None:
        """Close the listener without waiting for anybody; the process is about to end."""
        if self._address is not None:
            self._engine.stop_serving(drain_s=0.0)
            self._address = None
        self._materializer.settle(0.0, reason="the process ends")

    def __call__(self, call: Call) -> BaseModel:
        """Serve one verb. Raises UsageError for a verb the current state does not allow."""
        verb = call.request.verb
        if verb is Verb.STATUS:
            return self._status(call)
        with self._lock:
            after = state_after(self._state, verb)
            self._in_verb = True
            try:
                reply = self._verbs[verb](call)
            finally:
                self._in_verb = False
            self._state = after
            return reply

    def _is_busy(self) -> bool:
        """Whether anybody waits for the engine."""
        return self._in_verb or self._engine.num_in_flight > 0

    def _status(self, call: Call) -> WorkerStatus:
        address = self._address
        return WorkerStatus(
            worker=self._settings.worker,
            unit=self._settings.unit,
            rank=self._settings.rank,
            pid=os.getpid(),
            state=self._state,
            engine=self._engine.name,
            engine_versions=dict(self._engine.versions()) if self._loaded_seconds is not None else {},
            host=address[0] if address is not None else None,
            port=address[1] if address is not None else None,
            in_flight=self._engine.num_in_flight,
            mapped_bytes=sum(one.size for one in self._memory.allocations) if self._memory.mapped else 0,
            error=self._error,
            loaded_seconds=self._loaded_seconds,
            materialization=self._materializer.status(),
        )

    def _answer(self, call: Call) -> Answers:
        prompts = body_of(AnswerBody, call).prompts
        answers = Answers(answers=tuple(self._engine.answer(prompt) for prompt in prompts))
        reached("worker.answered")
        return answers

    def _export(self, call: Call) -> Exported:
        body = body_of(ExportBody, call)
        self._materializer.settle(_EXPORT_PATIENCE_S, reason="the worker was captured")
        self._headers = _headers(self._engine)
        return export_memory(
            body,
            memory=self._memory,
            observation=self._observer.observation(self._memory.allocations),
            source=self._engine.model_source,
            model_path=self._engine.model_path,
            worker=self._settings.worker,
            rank=self._settings.rank,
            call=call,
        )

    def _serve(self, call: Call) -> Serving:
        body = body_of(ServeBody, call)
        self._open(body.host, body.port)
        return Serving(host=body.host, port=body.port)

    def _stop_serving(self, call: Call) -> Serving:
        self._shut()
        return Serving(host=None, port=None)

    def _sleep(self, call: Call) -> SleepReport:
        began = time.monotonic()
        body = body_of(SleepBody, call)
        mapped_bytes = sum(one.size for one in self._memory.allocations)
        drained = self._shut()
        reached("worker.drained")
        self._materializer.settle(body.settle_s, reason="the worker was put to sleep")
        self._engine.before_sleep()
        self._unmap()
        reached("worker.unmapped")
        return SleepReport(
            unmapped_bytes=mapped_bytes,
            drained_requests=drained,
            held_device_bytes=self._engine.held_device_bytes,
            seconds=time.monotonic() - began,
        )

    def _wake(self, call: Call) -> WakeReport:
        return self._fill(body_of(WakeBody, call), call)

    def _fill(self, body: WakeBody, call: Call) -> WakeReport:
        plan = self._pack_plan(body)
        try:
            report = fill_memory(
                body,
                memory=self._memory,
                call=call,
                started_with=self._engine.model_source,
                known=self._headers,
                relocation=self._relocation,
            )
            began = time.monotonic()
            self._engine.after_wake()
            seconds = {**report.seconds, "after_wake": time.monotonic() - began}
            if plan is not None and body.materialize is Materialize.REQUIRED:
                seconds["materialize"] = self._materializer.run(plan, call).seconds
            reached("worker.filled")
        except BaseException:
            self._unmap()
            raise
        if plan is not None and body.materialize is Materialize.ASYNC:
            self._materializer.begin(plan)
        return report.model_copy(update={"seconds": seconds, "materialization": self._materializer.status()})

    def _pack_plan(self, body: WakeBody) -> PackPlan | None:
        """The pack that this wake is to write, or None. Raises before anything is mapped, as `plan_pack` does."""
        if body.source is not PackSource.RECOVERY or body.materialize is Materialize.OFF:
            self._materializer.reset(
                f"the memory came from {body.source.value}, materialize is {body.materialize.value}"
            )
            return None
        if body.pack_sha256 is None or body.pack_bytes is None:
            self._materializer.reset("the capture has no model bytes")
            return None
        if body.state_root is None:
            raise UsageError("wake needs 'state_root' to materialize", cure="give it in the body")
        wanted = MaterializeBody(
            state_root=body.state_root,
            native_manifest=body.native_manifest,
            pack_sha256=body.pack_sha256,
            pack_bytes=body.pack_bytes,
        )
        return plan_pack(wanted, self._memory, self._relocation)

    def _materialize(self, call: Call) -> Materialized:
        plan = plan_pack(body_of(MaterializeBody, call), self._memory, self._relocation)
        return self._materializer.run(plan, call)

    def _open(self, host: str, port: int) -> None:
        self._engine.start_serving(host, port)
        self._address = (host, port)
        reached("worker.listening")

    def _shut(self) -> int:
        drained = self._engine.stop_serving()
        self._address = None
        if self._state is WorkerState.SERVING:
            self._state = WorkerState.IDLE
        return drained

    def _unmap(self) -> None:
        try:
            self._memory.unmap()
        except ColdsnapError as error:
            self._fail(error)
            raise
        except Exception as error:
            bug = InternalError(f"the memory could not be unmapped: {type(error).__name__}: {error}")
            self._fail(bug)
            raise bug from error

    def _fail(self, error: ColdsnapError) -> None:
        _log.error("worker %s failed: %s", self._settings.worker, error)
        self._error = error_frame(error)
        self._state = WorkerState.FAILED


def _headers(engine: EngineWorker) -> Sequence[SafetensorsFile]:
    """The checkpoint's headers, kept so that a recovery can say which tensor of another checkpoint differs."""
    try:
        found = checkpoint_files(engine.model_path)
    except ColdsnapError as error:
        _log.info("the checkpoint's headers are not kept: %s", error)
        return ()
    return found if metadata_sha256(found) == engine.model_source.metadata_sha256 else ()
