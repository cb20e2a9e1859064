"""vLLM's API server and engine client in the front process: `Service` for the workers, HTTP for everybody else.

Everything of vLLM lives on one asyncio loop, on which `run` brings the engine up and stays until it is told to end.
The methods of `Service` come from other threads and wait for what they ask of that loop. The application is built
once, when the engine is up; opening and closing it is a matter of the listener alone.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import uuid
from argparse import Namespace
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as StillRunning
from contextlib import suppress
from typing import Any, TypeVar

from coldsnap.core.messages import Answer, ErrorFrame, Prompt
from coldsnap.engines.frames import error_frame, error_from_frame
from coldsnap.engines.kernel import close_nvml, trim_heap
from coldsnap.engines.listening import bind
from coldsnap.engines.vllm.compat import resolve
from coldsnap.engines.vllm.gate import Gate
from coldsnap.engines.vllm.link import FrontState, Phase
from coldsnap.engines.vllm.listener import Listener
from coldsnap.engines.vllm.logfiles import close_log_files
from coldsnap.engines.vllm.quiet import QuietWorkers
from coldsnap.engines.vllm.refusals import fact_problems
from coldsnap.errors import ColdsnapError, EngineError, Refused, UserError

__all__ = ["VllmService", "import_server"]

_log = logging.getLogger(__name__)
_LOOK_S = 0.5
T = TypeVar("T")

_IMPORTED = ("AsyncEngineArgs", "AsyncLLM", "EngineCoreProc", "UsageContext", "build_app", "init_app_state")


def import_server() -> None:
    """Import all that the front and the engine process need, before the one forks the other.

    Raises MissingCapability for a version of vLLM that we do not know.
    """
    for name in _IMPORTED:
        resolve(name)


class VllmService:
    """Implements `Service`; `run` belongs to the main thread, whose fork becomes the engine process."""

    def __init__(self, on_failure: Callable[[ColdsnapError], None]) -> None:
        """`on_failure` is told once, from any thread, when the engine is lost."""
        self._on_failure = on_failure
        self._error: ErrorFrame | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine: Any = None
        self._gate: Gate | None = None
        self._listener: Listener | None = None
        self._ended: asyncio.Event | None = None
        self._answering = threading.Lock()
        self._quiet = QuietWorkers(lambda: self._wait(self._sleep()), lambda: self._wait(self._resume()))

    async def run(self, args: Namespace, ready: Callable[[], None]) -> None:
        """Bring the engine up and serve until `end`. `ready` is called once `end` may be.

        Raises Refused for a configuration that cannot be captured, EngineError when vLLM does not come up or its engine
        process dies; nothing of it is left in any case.
        """
        with_usage = resolve("UsageContext").OPENAI_API_SERVER
        engine_args = resolve("AsyncEngineArgs").from_cli_args(args)
        config = engine_args.create_engine_config(usage_context=with_usage)
        if refused := fact_problems(config):
            raise Refused("the configuration of vLLM", refused)
        close_nvml()  # a forked engine process would have its descriptors
        engine = resolve("AsyncLLM").from_vllm_config(
            vllm_config=config,
            usage_context=with_usage,
            enable_log_requests=engine_args.enable_log_requests,
            aggregate_engine_logging=engine_args.aggregate_engine_logging,
            disable_log_stats=engine_args.disable_log_stats,
        )
        try:
            await engine.reset_mm_cache()
            tasks = await engine.get_supported_tasks()
            app = resolve("build_app")(args, tasks, engine.model_config)
            await resolve("init_app_state")(engine, app.state, args, tasks)
            async with app.router.lifespan_context(app):
                self._gate = Gate(app)
                self._listener = Listener(self._gate, args)
                self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
                self._engine = engine
                ready()
                _log.info("vLLM is up")
                try:
                    await self._until_ended()
                finally:
                    await self._listener.close(0.0)
        finally:
            self._engine = None
            engine.shutdown()

    def end(self) -> None:
        """Let `run` return; from a signal handler or any thread."""
        if self._loop is not None and self._ended is not None:
            with suppress(RuntimeError):  # it has returned
                self._loop.call_soon_threadsafe(self._ended.set)

    def fail(self, error: ColdsnapError) -> None:
        """The engine is lost; every question is answered with `error` from here on. The first one counts."""
        if self._error is None:
            self._error = error_frame(error)
            self._on_failure(error)

    def state(self) -> FrontState:
        """See `Service.state`."""
        phase: Phase = "up"
        if self._error is not None:
            phase = "failed"
        elif self._engine is None:
            phase = "loading"
        elif self._quiet.names:
            phase = "quiet"
        return FrontState(
            phase=phase,
            in_flight=self._gate.num_in_flight if self._gate is not None else 0,
            serving=self._listener is not None and self._listener.is_open,
            error=self._error,
        )

    def answer(self, prompt: Prompt) -> Answer:
        """See `Service.answer`."""
        with self._answering:
            self._check_up("answer")
            return self._wait(self._answer(prompt))

    def open(self, host: str, port: int) -> None:
        """See `Service.open`. Raises UserError for TLS files that are not there, EngineError when it is open."""
        self._check_up("serve")
        listener = self._listening()
        if listener.is_open:
            raise EngineError("vLLM is serving already", cure="stop it first")
        self._wait(listener.open(bind(host, port)))

    def close(self, *, drain_s: float) -> int:
        """See `Service.close`."""
        return self._wait(self._listener.close(drain_s)) if self._listener is not None else 0

    def quiet(self, worker: str) -> None:
        """See `Service.quiet`."""
        self._quiet.quiet(worker)

    def resume(self, worker: str) -> None:
        """See `Service.resume`."""
        self._quiet.resume(worker)

    async def _until_ended(self) -> None:
        """Raises EngineError when the engine process dies."""
        if self._ended is None:
            return
        while not self._ended.is_set():
            if self._engine.errored:
                failure = EngineError("the engine process of vLLM died", cure="look at the engine's log")
                self.fail(failure)
                raise failure
            try:
                await asyncio.wait_for(self._ended.wait(), _LOOK_S)
            except TimeoutError:
                continue

    async def _answer(self, prompt: Prompt) -> Answer:
        sampling = resolve("SamplingParams")(
            temperature=0.0, max_tokens=prompt.max_tokens, ignore_eos=False, skip_reading_prefix_cache=True
        )
        last: Any = None
        async for output in self._engine.generate(prompt.text, sampling, f"coldsnap-{uuid.uuid4().hex}"):
            last = output
        if last is None or not last.finished or last.outputs[0].finish_reason == "abort":
            raise EngineError("vLLM gave an answer up before it was complete")
        return Answer(token_ids=tuple(int(token) for token in last.outputs[0].token_ids), text=last.outputs[0].text)

    async def _sleep(self) -> None:
        """vLLM's level 1; a platform without sleep mode only lets go of requests and caches."""
        try:
            if self._engine.model_config.enable_sleep_mode:
                await self._engine.sleep(level=1)
            else:
                await self._engine.pause_generation(mode="abort", clear_cache=True)
        except Exception:
            with suppress(Exception):  # it may have paused before it failed; the first error is the one to tell
                await self._engine.resume_generation()
            raise
        gc.collect()
        close_log_files()
        close_nvml()
        trim_heap()

    async def _resume(self) -> None:
        if self._engine.model_config.enable_sleep_mode:
            await self._engine.wake_up()
        else:
            await self._engine.resume_generation()

    def _check_up(self, verb: str) -> None:
        state = self.state()
        if state.error is not None:
            raise error_from_frame(state.error)
        if state.phase != "up":
            waits = f", and waits for {', '.join(sorted(self._quiet.names))}" if self._quiet.names else ""
            raise EngineError(f"vLLM is {state.phase}{waits}: it cannot {verb}", cure="wake every worker first")

    def _listening(self) -> Listener:
        if self._listener is None:
            raise EngineError("vLLM is not up")
        return self._listener

    def _wait(self, act: Coroutine[Any, Any, T]) -> T:
        """What `act` returns, run on the loop. Foreign errors become UserError or EngineError."""
        if self._error is not None or self._loop is None or self._engine is None:
            act.close()
            if self._error is not None:
                raise error_from_frame(self._error)
            raise EngineError("vLLM is not up", cure="look at the engine's log")
        running = asyncio.run_coroutine_threadsafe(act, self._loop)
        while True:
            try:
                return running.result(_LOOK_S)
            except ColdsnapError:
                raise
            except StillRunning:
                if self._error is not None:
                    running.cancel()
                    raise error_from_frame(self._error) from None
            except (ValueError, resolve("VLLMValidationError")) as error:
                raise UserError(f"vLLM refuses this: {error}") from error
            except Exception as error:
                raise EngineError(f"vLLM failed: {type(error).__name__}: {error}") from error
