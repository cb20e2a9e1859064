"""A worker that waits for its place, and what placing it does and leaves behind."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from coldsnap.core.messages import (
    AnswerBody,
    Answers,
    PlaceBody,
    Placed,
    Prompt,
    Request,
    Verb,
    WorkerSettings,
    WorkerState,
    WorkerStatus,
)
from coldsnap.engines.control import Call, ControlClient
from coldsnap.engines.template import TemplateWorker, make_worker
from coldsnap.errors import ColdsnapError, EngineError, HostError, UsageError, UserError
from coldsnap.hydrate.memory import StableMemory
from coldsnap.testing.engine import FakeEngine
from coldsnap.testing.engine_harness import driven
from coldsnap.testing.memory import FakeMemory

MakeFake = Callable[..., FakeEngine]
StartFake = Callable[..., "subprocess.Popen[str]"]
PROMPTS = (Prompt(text="hello", max_tokens=3),)
SETTINGS = WorkerSettings(worker="w0", unit="u0", rank=0, socket="/nowhere", template=True)


def call(worker: TemplateWorker, verb: Verb, **body: object) -> object:
    return worker(Call(Request(id=1, verb=verb, body=body), lambda frame: None))


def status(worker: TemplateWorker) -> WorkerStatus:
    found = call(worker, Verb.STATUS)
    assert isinstance(found, WorkerStatus)
    return found


class Bench:
    """A template worker, and what it asked for in what order."""

    def __init__(self, engine: FakeEngine, *, no_memory: Exception | None = None) -> None:
        self.events: list[object] = []
        self.no_memory = no_memory
        made = make_worker(SETTINGS, engine, self._memory, set_environment=self._environment)
        assert isinstance(made, TemplateWorker)
        self.worker = made

    def _memory(self) -> StableMemory:
        self.events.append("memory")
        if self.no_memory is not None:
            raise self.no_memory
        return FakeMemory()

    def _environment(self, given: Mapping[str, str]) -> None:
        self.events.append(dict(given))


def test_a_template_imports_and_neither_loads_nor_makes_memory(
    make_fake: MakeFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, bench_events = make_fake(), []
    monkeypatch.setattr(engine, "prepare_template", lambda: bench_events.append("prepared"))
    bench = Bench(engine)
    assert status(bench.worker).state is WorkerState.LOADING
    bench.worker.load()
    found = status(bench.worker)
    assert (found.state, found.mapped_bytes, found.loaded_seconds) == (WorkerState.TEMPLATE, 0, None)
    assert (found.engine, found.engine_versions) == ("fake", {"fake": "1"})
    assert (bench_events, bench.events) == (["prepared"], [])


@pytest.mark.parametrize("verb", [verb for verb in Verb if verb not in (Verb.STATUS, Verb.PLACE)])
def test_a_template_takes_no_other_verb(make_fake: MakeFake, verb: Verb) -> None:
    bench = Bench(make_fake())
    bench.worker.load()
    with pytest.raises(UsageError, match=f"template cannot {verb.value}"):
        call(bench.worker, verb)
    assert (bench.worker.state, bench.events) == (WorkerState.TEMPLATE, [])


def test_placing_sets_the_environment_then_makes_memory_then_loads(make_fake: MakeFake, tmp_path: Path) -> None:
    bench = Bench(make_fake())
    bench.worker.load()
    placed = call(bench.worker, Verb.PLACE, environment={"CUDA_VISIBLE_DEVICES": "GPU-1"})
    assert isinstance(placed, Placed)
    assert (placed.wake, bench.events) == (None, [{"CUDA_VISIBLE_DEVICES": "GPU-1"}, "memory"])
    assert placed.seconds["load"] > 0
    found = status(bench.worker)
    assert (found.state, found.mapped_bytes > 0) == (WorkerState.IDLE, True)
    answers = call(bench.worker, Verb.ANSWER, prompts=[one.model_dump() for one in PROMPTS])
    assert isinstance(answers, Answers)
    with driven(make_fake(), tmp_path / "cold", base=0x5100_0000_0000) as cold:
        assert cold.answers(PROMPTS) == answers.answers


def test_a_second_place_is_refused(make_fake: MakeFake) -> None:
    bench = Bench(make_fake())
    bench.worker.load()
    call(bench.worker, Verb.PLACE)
    with pytest.raises(UsageError, match="idle cannot place"):
        call(bench.worker, Verb.PLACE)
    assert bench.worker.state is WorkerState.IDLE


def test_a_malformed_place_changes_nothing(make_fake: MakeFake) -> None:
    bench = Bench(make_fake())
    bench.worker.load()
    with pytest.raises(UsageError, match="'place' is malformed"):
        call(bench.worker, Verb.PLACE, environment={"A=B": "1"})
    assert (bench.worker.state, bench.events) == (WorkerState.TEMPLATE, [])
    call(bench.worker, Verb.PLACE)
    assert bench.worker.state is WorkerState.IDLE


@pytest.mark.parametrize(
    ("raised", "kind"), [(HostError("no device"), "HostError"), (RuntimeError("a bug"), "EngineError")]
)
def test_a_place_without_memory_fails_and_stays_failed(make_fake: MakeFake, raised: Exception, kind: str) -> None:
    bench = Bench(make_fake(), no_memory=raised)
    bench.worker.load()
    with pytest.raises(ColdsnapError, match=str(raised)):
        call(bench.worker, Verb.PLACE)
    found = status(bench.worker)
    assert found.error is not None
    assert (found.state, found.error.kind) == (WorkerState.FAILED, kind)
    with pytest.raises(UsageError, match="failed cannot place"):
        call(bench.worker, Verb.PLACE)


def test_a_place_whose_load_fails_says_why_twice(make_fake: MakeFake) -> None:
    engine = make_fake()
    bench = Bench(engine)
    bench.worker.load()
    for file in engine.model_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(EngineError, match="model-0000") as caught:
        call(bench.worker, Verb.PLACE)
    found = status(bench.worker)
    assert found.error is not None
    assert (found.state, found.error.message) == (WorkerState.FAILED, caught.value.message)


@pytest.mark.parametrize(
    ("raised", "kind"), [(UserError("no such architecture"), "UserError"), (KeyError("gone"), "EngineError")]
)
def test_imports_that_fail_leave_failed(
    make_fake: MakeFake, monkeypatch: pytest.MonkeyPatch, raised: Exception, kind: str
) -> None:
    engine = make_fake()

    def fail() -> None:
        raise raised

    monkeypatch.setattr(engine, "prepare_template", fail)
    bench = Bench(engine)
    bench.worker.load()
    found = status(bench.worker)
    assert found.error is not None
    assert (found.state, found.error.kind) == (WorkerState.FAILED, kind)
    bench.worker.close()


def test_a_template_process_is_placed_over_its_socket(
    tmp_path: Path, start_fake: StartFake, make_fake: MakeFake
) -> None:
    with start_fake(template=True) as process:
        client = ControlClient(tmp_path / "w.sock")
        try:
            found = client.wait_loaded(deadline_s=60, alive=lambda: process.poll() is None)
            assert (found.state, found.pid) == (WorkerState.TEMPLATE, process.pid)
            placed = client.call(Verb.PLACE, PlaceBody(environment={"PLACED": "here"}), reply=Placed, deadline_s=60)
            assert placed.wake is None
            answers = client.call(Verb.ANSWER, AnswerBody(prompts=PROMPTS), reply=Answers, deadline_s=60).answers
        finally:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0
    with driven(make_fake(), tmp_path / "here", base=0x5100_0000_0000) as live:
        assert live.answers(PROMPTS) == answers
