"""The front between a controller and a worker's engine process: a whole worker through it, and what it says alone."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from coldsnap.core.messages import (
    Answer,
    PlaceBody,
    Placed,
    Prompt,
    Serving,
    SleepBody,
    SleepReport,
    Verb,
    WakeReport,
    WorkerSettings,
    WorkerState,
    WorkerStatus,
)
from coldsnap.engines.control import Call, ControlClient, ControlServer
from coldsnap.engines.protocol import EngineWorker
from coldsnap.engines.template import make_worker
from coldsnap.engines.vllm.front import FrontWorker
from coldsnap.engines.vllm.link import FRONT_SOCKET, FrontClient, FrontServer, inner_socket_name
from coldsnap.errors import (
    ColdsnapError,
    DeadlineExceeded,
    EngineError,
    OperationInterrupted,
    Problem,
    Refused,
    ResourceBusy,
    UsageError,
    UserError,
)
from coldsnap.hydrate.host import HostMemory
from coldsnap.testing.engine import FakeEngine
from coldsnap.testing.engine_harness import Driven
from coldsnap.testing.engine_suite import EngineContract

LONG_S = 60.0
SLEPT = SleepReport(unmapped_bytes=1, drained_requests=2, held_device_bytes=3, seconds=0.5)
STATUS = WorkerStatus(
    worker="w0",
    unit="u0",
    rank=0,
    pid=os.getpid(),
    state=WorkerState.IDLE,
    engine="inner",
    engine_versions={},
    host=None,
    port=None,
    in_flight=0,
    mapped_bytes=7,
)


class LinkedEngine(FakeEngine):
    """Asks the front for what the front owns, as the engine processes of vLLM do."""

    front: FrontClient

    def answer(self, prompt: Prompt) -> Answer:
        return self.front.answer(prompt)

    def start_serving(self, host: str, port: int) -> None:
        self.front.open(host, port)

    def stop_serving(self, *, drain_s: float = 30.0) -> int:
        return self.front.close(drain_s=drain_s)

    def before_sleep(self) -> None:
        super().before_sleep()
        self.front.quiet("w0")

    def after_wake(self) -> None:
        super().after_wake()
        self.front.resume("w0")


@contextmanager
def fronted(
    engine: EngineWorker,
    folder: Path,
    make_service: Callable[..., Any],
    *,
    base: int,
    port: int | None = None,
    template: bool = False,
) -> Iterator[Driven]:
    """As `driven`, through a `FrontWorker`, whose engine "process" is other sockets of this one."""
    assert isinstance(engine, LinkedEngine)
    folder.mkdir(parents=True, exist_ok=True)
    settings = WorkerSettings(
        worker="w0", unit="u0", rank=0, socket=str(folder / "w.sock"), port=port, template=template
    )
    engine.front = FrontClient(folder / FRONT_SOCKET)
    environment: dict[str, str] = {}
    inner_socket = folder / inner_socket_name("w0")
    with ExitStack() as stack:
        memory = stack.enter_context(HostMemory(base=base))
        inner = make_worker(settings, engine, lambda: memory, set_environment=environment.update)
        service = make_service(engine)

        def start(given: Mapping[str, str]) -> None:
            assert given == {"COLDSNAP_PLACED": "here"}
            stack.enter_context(ControlServer(inner_socket, inner))
            inner.load()

        front = FrontWorker(settings, inner_socket, start=start, template=template)
        link = FrontServer(folder / FRONT_SOCKET, service)
        link.start()
        stack.callback(link.close)
        stack.enter_context(ControlServer(Path(settings.socket), front))
        client = ControlClient(Path(settings.socket))
        assert client.status().state is WorkerState.LOADING
        front.imported({"python": "3"})
        if not template:
            stack.enter_context(ControlServer(inner_socket, inner))
            inner.load()
        client.wait_loaded(deadline_s=LONG_S)
        stack.callback(inner.close)
        yield Driven(client=client, memory=memory, engine=engine, folder=folder, environment=environment)


class TestThroughTheFront(EngineContract):
    """Nothing that a controller sees of an engine is changed by the front between."""

    @pytest.fixture(autouse=True)
    def _factory(self, make_fake: Callable[..., FakeEngine], make_service: Callable[..., Any]) -> None:
        self.fresh = make_fake
        self.make_service = make_service

    def make(self, variant: int) -> FakeEngine:
        return self.fresh(kind=LinkedEngine, shuffle=variant or None)

    def make_damaged(self, folder: Path) -> FakeEngine:
        engine = self.make(0)
        (engine.model_path / "model-00001-of-00002.safetensors").write_bytes(b"\xff" * 100)
        return engine

    def driven(self, engine: EngineWorker, folder: Path, **how: Any) -> AbstractContextManager[Driven]:
        return fronted(engine, folder, self.make_service, base=self.BASES[0], **how)

    def beside(self, variant: int, folder: Path, **how: Any) -> AbstractContextManager[Driven]:
        return fronted(self.make(variant), folder, self.make_service, base=self.BASES[1], **how)

    def test_the_engine_is_quiet_before_and_resumed_after(self, tmp_path: Path) -> None:
        services: list[Any] = []

        def make_service(engine: FakeEngine) -> Any:
            services.append(self.make_service(engine))
            return services[0]

        with fronted(self.make(0), tmp_path / "a", make_service, base=self.BASES[0]) as live:
            exported = live.export()
            live.sleep()
            assert services[0].done == ["close", "sleep"]
            with pytest.raises(EngineError, match="quiet"):
                FrontClient(live.folder / FRONT_SOCKET).answer(Prompt(text="x", max_tokens=1))
            live.wake(exported)
            assert services[0].done == ["close", "sleep", "resume"]


class Bench:
    """A front worker on its socket, and an engine process beside it that does what the test says."""

    def __init__(self, folder: Path, *, template: bool = False) -> None:
        self.started: list[Mapping[str, str]] = []
        self.on_start: Callable[[], None] = lambda: None
        self.inner_socket = folder / "i.sock"
        settings = WorkerSettings(worker="w0", unit="u0", rank=3, socket=str(folder / "w.sock"), template=template)
        self.front = FrontWorker(settings, self.inner_socket, start=self._start, template=template)
        self.client = ControlClient(Path(settings.socket))
        self._sockets = ExitStack()
        self._sockets.enter_context(ControlServer(Path(settings.socket), self.front))

    def _start(self, environment: Mapping[str, str]) -> None:
        self.started.append(environment)
        self.on_start()

    def inner(self, **acts: Callable[[Call], BaseModel]) -> ControlServer:
        """Begin the engine process, idle unless the test says something else."""

        def act(call: Call) -> BaseModel:
            return {"status": lambda call: STATUS, **acts}[call.request.verb.value](call)

        return self._sockets.enter_context(ControlServer(self.inner_socket, act))

    def sleep(self, **more: Any) -> SleepReport:
        return self.client.call(Verb.SLEEP, SleepBody(settle_s=4), reply=SleepReport, deadline_s=LONG_S, **more)

    def place(self) -> Placed:
        body = PlaceBody(environment={"CUDA_VISIBLE_DEVICES": "GPU-1"})
        return self.client.call(Verb.PLACE, body, reply=Placed, deadline_s=LONG_S)

    def close(self) -> None:
        self._sockets.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


@pytest.fixture
def template(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, template=True)
    yield made
    made.close()


def test_alone_it_is_loading_and_takes_no_verb(bench: Bench) -> None:
    bench.front.imported({"vllm": "0"})
    status = bench.client.status()
    assert (status.state, status.rank, status.pid, status.engine) == (WorkerState.LOADING, 3, os.getpid(), "vllm")
    assert status.engine_versions == {"vllm": "0"}
    with pytest.raises(UsageError, match="loading cannot sleep"):
        bench.sleep()


def test_the_status_is_the_engine_processes_own_once_there_is_one(bench: Bench) -> None:
    bench.inner()
    assert bench.client.status() == STATUS


def test_a_verb_goes_through_with_its_body_and_comes_back_with_its_reply(bench: Bench) -> None:
    bodies: list[Mapping[str, Any]] = []

    def sleep(call: Call) -> BaseModel:
        bodies.append(call.request.body)
        return SLEPT

    bench.inner(sleep=sleep)
    assert bench.sleep() == SLEPT
    assert bodies == [{"settle_s": 4}]


def test_progress_goes_through_in_its_order(bench: Bench) -> None:
    def sleep(call: Call) -> BaseModel:
        for phase in ("read", "verify"):
            call.progress(phase, done_bytes=1, total_bytes=2)
            call.progress(phase, done_bytes=2, total_bytes=2)
        return SLEPT

    bench.inner(sleep=sleep)
    seen: list[Any] = []
    bench.sleep(on_progress=seen.append)
    assert seen == [
        {"phase": phase, "done_bytes": done, "total_bytes": 2} for phase in ("read", "verify") for done in (1, 2)
    ]


@pytest.mark.parametrize(
    "error",
    [
        ResourceBusy("taken", cure="another", facts={"port": 80}),
        Refused("r", [Problem(field="a.b", message="odd", value="3", cure="even")], facts={"n": 1}),
        EngineError("its own", facts={"path": "/x"}),
        DeadlineExceeded("slow", facts={"phase": "p", "deadline_s": 1.5}),
    ],
)
def test_an_error_goes_through_as_it_is(bench: Bench, error: ColdsnapError) -> None:
    def sleep(call: Call) -> BaseModel:
        raise error

    bench.inner(sleep=sleep)
    with pytest.raises(type(error)) as caught:
        bench.sleep()
    assert (str(caught.value), caught.value.facts) == (str(error), error.facts)
    assert getattr(caught.value, "problems", None) == getattr(error, "problems", None)


def test_a_caller_that_goes_away_cancels_the_verb_in_the_engine_process(bench: Bench) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    def sleep(call: Call) -> BaseModel:
        deadline = time.monotonic() + LONG_S
        while not call.cancelled.wait(0.01) and time.monotonic() < deadline:
            call.progress(f"at {time.monotonic()}", done_bytes=0, total_bytes=1)
            begun.set()
        if call.cancelled.is_set():
            cancelled.set()
        return SLEPT

    bench.inner(sleep=sleep)

    def leave(progress: object) -> None:
        raise OperationInterrupted("enough")

    with pytest.raises(OperationInterrupted, match="enough"):
        bench.sleep(on_progress=leave)
    assert begun.is_set()
    assert cancelled.wait(LONG_S)


@contextmanager
def speaking(path: Path, said: bytes) -> Iterator[None]:
    """An engine process that says this to its first caller, and is gone."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def speak() -> None:
        connection, _ = listener.accept()
        connection.recv(1 << 16)
        connection.sendall(said)
        connection.close()
        listener.close()

    thread = threading.Thread(target=speak)
    thread.start()
    yield
    thread.join()


def test_an_engine_process_that_dies_in_a_verb_is_told_at_once(bench: Bench) -> None:
    with (
        speaking(bench.inner_socket, b""),
        pytest.raises(EngineError, match="closed its control socket before it answered 'sleep'"),
    ):
        bench.sleep()
    with pytest.raises(EngineError, match=str(bench.inner_socket)):
        bench.sleep()


def test_an_engine_process_that_was_there_and_is_gone_has_no_status(bench: Bench) -> None:
    server = bench.inner()
    assert bench.client.status() == STATUS
    server.close()
    with pytest.raises(EngineError, match=str(bench.inner_socket)):
        bench.client.status()


def test_a_lost_engine_is_failed_whatever_its_process_says_and_the_first_reason_counts(bench: Bench) -> None:
    bench.inner()
    bench.front.fail(UserError("no memory", cure="less"))
    bench.front.fail(EngineError("it died"))
    status = bench.client.status()
    assert status.state is WorkerState.FAILED
    assert status.error is not None
    assert (status.error.kind, status.error.message) == ("UserError", "no memory")
    with pytest.raises(UsageError, match="failed cannot sleep"):
        bench.sleep()
    with pytest.raises(UserError, match="no memory; less"):
        bench.client.wait_loaded(deadline_s=LONG_S)


def test_a_verb_that_waits_when_the_engine_is_lost_ends_with_the_reason(bench: Bench) -> None:
    begun, end = threading.Event(), threading.Event()

    def sleep(call: Call) -> BaseModel:
        begun.set()
        end.wait(LONG_S)
        return SLEPT

    bench.inner(sleep=sleep)
    raised: list[ColdsnapError] = []

    def ask() -> None:
        try:
            bench.sleep()
        except ColdsnapError as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(LONG_S)
    bench.front.fail(EngineError("it died"))
    thread.join(LONG_S)
    end.set()
    assert [str(error) for error in raised] == ["it died"]


@pytest.mark.parametrize("progress", [b'{"phase":"read"}', b'{"phase":"read","done_bytes":"x","total_bytes":1}', b"[]"])
def test_malformed_progress_ends_the_verb(bench: Bench, progress: bytes) -> None:
    with (
        speaking(bench.inner_socket, b'{"id":1,"progress":' + progress + b"}\n"),
        pytest.raises(EngineError, match="malformed progress"),
    ):
        bench.sleep()


def test_a_template_waits_and_takes_nothing_but_its_place(template: Bench) -> None:
    assert template.client.status().state is WorkerState.LOADING
    template.front.imported({"vllm": "0"})
    status = template.client.status()
    assert (status.state, status.engine_versions) == (WorkerState.TEMPLATE, {"vllm": "0"})
    with pytest.raises(UsageError, match="template cannot sleep"):
        template.sleep()
    assert template.started == []


def test_placing_makes_the_engine_process_and_passes_the_whole_body_on(template: Bench) -> None:
    bodies: list[Mapping[str, Any]] = []
    placed = Placed(seconds={"load": 1.0})
    waiting = STATUS.model_copy(update={"state": WorkerState.TEMPLATE})

    def place(call: Call) -> BaseModel:
        bodies.append(call.request.body)
        return placed

    def start() -> None:
        template.inner(status=lambda call: waiting, place=place)

    template.front.imported({})
    template.on_start = start
    assert template.place() == placed
    assert template.started == [{"CUDA_VISIBLE_DEVICES": "GPU-1"}]
    assert bodies == [{"environment": {"CUDA_VISIBLE_DEVICES": "GPU-1"}}]


def test_an_engine_that_cannot_be_made_fails_the_place_and_the_worker(template: Bench) -> None:
    template.front.imported({})
    template.on_start = lambda: template.front.fail(UserError("no such device"))
    with pytest.raises(UserError, match="no such device"):
        template.place()
    assert template.client.status().state is WorkerState.FAILED
    with pytest.raises(UsageError, match="failed cannot place"):
        template.place()


def test_a_template_that_could_not_import_is_failed(template: Bench) -> None:
    template.front.fail(UserError("no vllm here"))
    with pytest.raises(UserError, match="no vllm here"):
        template.client.wait_loaded(deadline_s=LONG_S)


def test_replies_of_any_record_go_through(bench: Bench) -> None:
    serving = Serving(host="::1", port=8)
    bench.inner(serve=lambda call: serving, wake=lambda call: WAKE)
    ask = bench.client.call
    assert ask(Verb.SERVE, reply=Serving, deadline_s=LONG_S) == serving
    assert ask(Verb.WAKE, reply=WakeReport, deadline_s=LONG_S) == WAKE


WAKE = WakeReport.model_validate(
    {
        "source": "native",
        "model_bytes": 2**40,
        "residual_bytes": 0,
        "seconds": {"read": 0.25},
        "transfer_path": {"pack": "direct: é"},
        "materialization": {"state": "waiting", "reason": "r", "pack_sha256": "sha256:" + "a" * 64},
    },
    strict=False,
)
