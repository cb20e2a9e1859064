"""A service like the front's without vLLM, for tests of the front and of the half that asks it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coldsnap.core.messages import Answer, ErrorFrame, Prompt
from coldsnap.engines.frames import error_frame
from coldsnap.engines.vllm.link import FrontState, Phase
from coldsnap.engines.vllm.quiet import QuietWorkers
from coldsnap.errors import ColdsnapError, EngineError
from coldsnap.testing.engine import FakeEngine

MakeService = Callable[..., "FakeService"]


class FakeService:
    """Implements `coldsnap.engines.vllm.link.Service` around a fake engine, and writes down what was done to it."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.done: list[str] = []
        self.phase: Phase = "up"
        self.error: ErrorFrame | None = None
        self.on_failure: Callable[[ColdsnapError], None] = lambda error: None
        self.workers = QuietWorkers(lambda: self.done.append("sleep"), lambda: self.done.append("resume"))

    def fail(self, error: ColdsnapError) -> None:
        if self.error is None:
            self.phase, self.error = "failed", error_frame(error)
            self.on_failure(error)

    def state(self) -> FrontState:
        phase: Phase = "quiet" if self.phase == "up" and self.workers.names else self.phase
        serving = self.engine.is_serving
        return FrontState(phase=phase, in_flight=self.engine.num_in_flight, serving=serving, error=self.error)

    def answer(self, prompt: Prompt) -> Answer:
        if self.state().phase != "up":
            raise EngineError(f"the engine is {self.state().phase}")
        return FakeEngine.answer(self.engine, prompt)

    def open(self, host: str, port: int) -> None:
        FakeEngine.start_serving(self.engine, host, port)
        self.done.append("open")

    def close(self, *, drain_s: float) -> int:
        self.done.append("close")
        return FakeEngine.stop_serving(self.engine, drain_s=drain_s)

    def quiet(self, worker: str) -> None:
        self.workers.quiet(worker)

    def resume(self, worker: str) -> None:
        self.workers.resume(worker)


@pytest.fixture
def make_service(make_fake: Callable[..., FakeEngine]) -> MakeService:
    """`make_service(engine=None)`: around this engine, or around a new one that is not loaded."""
    return lambda engine=None: FakeService(engine if engine is not None else make_fake())
