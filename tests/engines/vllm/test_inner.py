"""The inner half without vLLM: another thread is vLLM's main thread, and a fake engine is its model and its front."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coldsnap.core.extents import Allocation
from coldsnap.core.manifest import ModelSource
from coldsnap.core.messages import Prompt, WorkerSettings, WorkerState
from coldsnap.engines.control import ControlClient, ControlServer
from coldsnap.engines.frames import error_frame
from coldsnap.engines.protocol import EngineWorker
from coldsnap.engines.settings import SETTINGS_VARIABLE
from coldsnap.engines.vllm import inner
from coldsnap.engines.vllm.engine import LATE
from coldsnap.engines.vllm.front import FrontWorker
from coldsnap.engines.vllm.inner import WorkerHalf
from coldsnap.engines.vllm.link import FRONT_SOCKET, FrontClient, FrontServer, inner_socket_name
from coldsnap.engines.vllm.loading import Way
from coldsnap.engines.vllm.records import settings_of_rank
from coldsnap.errors import EngineError, HostError, IntegrityError, Problem, Refused, UsageError, UserError
from coldsnap.hydrate.host import HostMemory
from coldsnap.testing.engine import FakeEngine
from coldsnap.testing.engine_harness import Driven
from coldsnap.testing.engine_suite import EngineContract

LONG_S = 60.0
BASES = (0x5100_0000_0000, 0x5200_0000_0000)


class Weights(HostMemory):
    """A `WeightMemory` that writes down what is done to keys and values."""

    def __init__(self, *, base: int) -> None:
        super().__init__(base=base)
        self.done: list[str] = []
        self.late_bytes = 0
        self.left: tuple[Problem, ...] = ()
        self.discard_fails = False

    def prepare(self, model: Any, tracer: Any) -> None:
        self.done.append("prepare")

    def keep_graphs(self) -> None:
        self.done.append("keep graphs")

    def settle(self, model: Any, tracer: Any) -> None:
        self.done.append("settle")

    def seal(self) -> None:
        self.done.append("seal")

    def clear(self) -> None:
        self.done.append("clear")
        self.unmap()
        self.remap()

    def complete(self) -> tuple[Allocation, ...]:
        self.done.append("complete")
        size, self.late_bytes = self.late_bytes, 0
        return (self.reserve(size, tag="weights"),) if size else ()

    def held_bytes(self) -> int:
        return 7

    def discard_kv(self) -> int:
        if self.discard_fails:
            raise HostError("the device is gone")
        self.done.append("discard")
        return 0

    def restore_kv(self) -> None:
        self.done.append("restore")

    def leftovers(self) -> Sequence[Problem]:
        return self.left


class Around:
    """Implements `Surroundings`."""

    def __init__(self) -> None:
        self.times = 0

    def versions(self) -> Mapping[str, str]:
        return {"vllm": "0"}

    def let_go(self) -> None:
        self.times += 1


class Vllm:
    """What vLLM does on its main thread: it comes to the loader, and is up some time later."""

    def __init__(self, half: WorkerHalf, engine: FakeEngine, service: Any) -> None:
        self._half = half
        self._engine = engine
        self._service = service
        self.ways: list[Way] = []
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            load = self._half.next_load()
            self.ways.append(load.way)
            try:
                load.memory.prepare(None, None)  # type: ignore[arg-type]
                act = self._engine.load if load.way is Way.LOAD else self._engine.build
                act(load.memory, load.observer)
                load.memory.settle(None, None)  # type: ignore[arg-type]
                if load.is_template:
                    load.memory.seal()
                load.laid_out()
            except Exception as error:
                load.failed(error)
                raise
        except Exception as error:  # noqa: BLE001 - the process ends, and vLLM knows nothing of why
            self._service.fail(EngineError(f"the engine core died: {type(error).__name__}"))
        else:
            self._service.phase = "up"


class Halves:
    """What a test may look at, or change before it begins, in the halves that it made."""

    def __init__(self) -> None:
        self.memory: list[Weights] = []
        self.around: list[Around] = []
        self.services: list[Any] = []
        self.vllm: list[Vllm] = []
        self.change: Callable[[Weights], object] = lambda memory: None


@contextmanager
def begun(
    engine: FakeEngine,
    folder: Path,
    halves: Halves,
    make_service: Callable[..., Any],
    *,
    base: int,
    port: int | None = None,
    template: bool = False,
) -> Iterator[Driven]:
    """As `driven`: a front, and an inner half that it relays to, begun when a template is placed."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = settings_of(engine.model_source, folder, port=port, template=template)
    environment: dict[str, str] = {}
    with ExitStack() as stack:
        memory, around = stack.enter_context(Weights(base=base)), Around()
        halves.change(memory)
        service = make_service(engine)
        service.phase = "loading"
        half = WorkerHalf(
            settings,
            engine.model_path,
            folder,
            make_memory=lambda: memory,
            surroundings=around,
            set_environment=environment.update,
        )
        vllm = Vllm(half, engine, service)
        halves.memory.append(memory)
        halves.around.append(around)
        halves.services.append(service)
        halves.vllm.append(vllm)

        def start(given: Mapping[str, str] | None = None) -> None:
            stack.callback(half.close)
            half.start()
            vllm.thread.start()
            stack.callback(vllm.thread.join, LONG_S)
            stack.callback(half.handover.fail, EngineError("the test is over"))

        front = FrontWorker(settings, folder / inner_socket_name("w0"), start=start, template=template)
        service.on_failure = front.fail
        link = FrontServer(folder / FRONT_SOCKET, service)
        link.start()
        stack.callback(link.close)
        stack.enter_context(ControlServer(Path(settings.socket), front))
        client = ControlClient(Path(settings.socket))
        front.imported({"python": "3"})
        if not template:
            start()
        client.wait_loaded(deadline_s=LONG_S)
        yield Driven(client=client, memory=memory, engine=half.engine, folder=folder, environment=environment)


def settings_of(source: ModelSource, folder: Path, **more: object) -> WorkerSettings:
    options = {
        "model_id": source.model_id,
        "revision": source.revision,
        "metadata_sha256": str(source.metadata_sha256),
    }
    record = {"worker": "w0", "unit": "u0", "rank": 0, "socket": str(folder / "w.sock"), "options": options}
    return WorkerSettings.model_validate({**record, **more})


@pytest.fixture
def halves() -> Halves:
    return Halves()


class TestInnerHalf(EngineContract):
    """A whole worker: controller, front, relay, control thread, handover, and a main thread that is not ours."""

    @pytest.fixture(autouse=True)
    def _factory(self, make_fake: Callable[..., FakeEngine], make_service: Callable[..., Any], halves: Halves) -> None:
        self.fresh = make_fake
        self.make_service = make_service
        self.halves = halves

    def make(self, variant: int) -> FakeEngine:
        return self.fresh(shuffle=variant or None)

    def make_damaged(self, folder: Path) -> FakeEngine:
        engine = self.make(0)
        (engine.model_path / "model-00001-of-00002.safetensors").write_bytes(b"\xff" * 100)
        return engine

    def driven(self, engine: EngineWorker, folder: Path, **how: Any) -> AbstractContextManager[Driven]:
        assert isinstance(engine, FakeEngine)
        return begun(engine, folder, self.halves, self.make_service, base=BASES[0], **how)

    def beside(self, variant: int, folder: Path, **how: Any) -> AbstractContextManager[Driven]:
        return begun(self.make(variant), folder, self.halves, self.make_service, base=BASES[1], **how)

    def test_everything_is_let_go_in_its_order_and_comes_back_in_the_other(self, live: Driven) -> None:
        [memory], [around], [service] = self.halves.memory, self.halves.around, self.halves.services
        assert memory.done == ["prepare", "settle", "complete"]
        exported = live.export()
        slept = live.sleep()
        assert memory.done[3:] == ["discard"]
        assert service.done == ["close", "sleep"]
        assert (slept.held_device_bytes, around.times) == (7, 2)
        live.wake(exported)
        assert memory.done[3:] == ["discard", "restore"]
        assert service.done == ["close", "sleep", "resume"]

    def test_a_leftover_backup_is_refused_before_anything_is_done(self, live: Driven) -> None:
        [memory], [service] = self.halves.memory, self.halves.services
        memory.left = (Problem(field="cumem[0x10]", message="a leftover level-1 backup", cure="restart the engine"),)
        with pytest.raises(Refused, match="leftover level-1 backup") as caught:
            live.sleep()
        assert [one.field for one in caught.value.problems] == ["cumem[0x10]"]
        assert service.done == ["close"]
        assert live.client.status().state is WorkerState.IDLE
        live.answers((Prompt(text="x", max_tokens=1),))
        memory.left = ()
        live.sleep()

    def test_an_engine_that_cannot_sleep_goes_on(self, live: Driven) -> None:
        [memory], [service] = self.halves.memory, self.halves.services
        memory.discard_fails = True
        with pytest.raises(HostError, match="the device is gone"):
            live.sleep()
        assert service.done == ["close", "sleep", "resume"]
        assert live.client.status().state is WorkerState.IDLE
        live.answers((Prompt(text="x", max_tokens=1),))

    def test_vllm_s_own_thread_may_sleep_and_wake_it_meanwhile(self, live: Driven) -> None:
        """On a GPU the backend is asked by vLLM, in the middle of `quiet` and `resume`."""
        [memory] = self.halves.memory
        engine = self.halves.vllm[0]._half.engine
        engine.suspend(1)
        engine.resume(None)
        assert memory.done[3:] == ["discard", "restore"]
        with pytest.raises(EngineError, match="kv_cache"):
            engine.discard(["kv_cache"])

    def test_what_is_made_after_the_loader_is_preserved_and_has_a_reason(self, tmp_path: Path) -> None:
        self.halves.change = lambda memory: setattr(memory, "late_bytes", 4096)
        with self.beside(0, tmp_path / "late") as late:
            assert late.export().residual_reasons[LATE] == 4096

    def test_a_built_model_waits_for_its_bytes(self, live: Driven, tmp_path: Path) -> None:
        exported = live.export()
        with self.beside(0, tmp_path / "t", template=True) as template:
            template.place(exported)
            assert [one.ways for one in self.halves.vllm] == [[Way.LOAD], [Way.BUILD]]
            assert self.halves.memory[1].done == ["prepare", "settle", "seal", "clear", "complete", "restore"]
            assert self.halves.services[1].done == []

    def test_a_build_that_is_not_filled_ends_the_loader_with_what_the_filler_said(
        self, live: Driven, tmp_path: Path
    ) -> None:
        exported = live.export()
        assert exported.residual is not None
        residual = Path(exported.residual.path)
        residual.write_bytes(b"\xff" + residual.read_bytes()[1:])
        with self.beside(0, tmp_path / "t", template=True) as template:
            with pytest.raises(IntegrityError, match=r"weights\.blob") as caught:
                template.place(exported)
            vllm, service = self.halves.vllm[1], self.halves.services[1]
            vllm.thread.join(LONG_S)
            assert not vllm.thread.is_alive(), "the loader waits for bytes that nobody brings"
            assert service.error == error_frame(caught.value), "before vLLM's own words for it"
            status = template.client.status()
            assert (status.state, status.error) == (WorkerState.FAILED, service.error)

    def test_a_loader_that_fails_is_told_as_what_it_said(self, tmp_path: Path) -> None:
        class Broken(FakeEngine):
            def load(self, memory: Any, observer: Any) -> None:
                raise ValueError("no layer of that kind")

        engine = self.fresh(kind=Broken)
        with (
            pytest.raises(EngineError, match=r"could not load the model: ValueError: no layer of that kind"),
            self.driven(engine, tmp_path / "a"),
        ):
            pass
        [vllm] = self.halves.vllm
        assert not vllm.thread.is_alive()

    def test_memory_that_cannot_be_had_fails_both_threads(self, tmp_path: Path) -> None:
        engine = self.make(0)
        service = self.make_service(engine)
        link = FrontServer(tmp_path / FRONT_SOCKET, service)
        link.start()

        def none() -> Weights:
            raise UserError("sleep mode is off")

        settings = settings_of(engine.model_source, tmp_path, template=True)
        half = WorkerHalf(settings, engine.model_path, tmp_path, make_memory=none, surroundings=Around())
        try:
            with pytest.raises(UserError, match="sleep mode is off"):
                half.make_memory()
            with pytest.raises(UserError, match="sleep mode is off"):
                half.next_load()
            assert service.error.kind == "UserError"
        finally:
            link.close()


def test_a_worker_is_found_by_its_rank(tmp_path: Path, make_fake: Callable[..., FakeEngine]) -> None:
    first = tmp_path / "settings.json"
    source = make_fake().model_source
    for slot, rank in enumerate((4, 5)):
        record = settings_of(source, tmp_path, worker=f"w{rank}", rank=rank)
        (first if slot == 0 else tmp_path / f"settings-{slot}.json").write_text(record.model_dump_json())
    environment = {SETTINGS_VARIABLE: str(first)}
    assert settings_of_rank(environment, 5).worker == "w5"
    with pytest.raises(EngineError, match="rank 0, and this unit's workers have rank 4, 5"):
        settings_of_rank(environment, 0)


def test_a_worker_without_settings_of_its_own_is_told_to_the_front(
    tmp_path: Path, make_fake: Callable[..., FakeEngine], make_service: Callable[..., Any], monkeypatch: Any
) -> None:
    def refuse(*arguments: object) -> None:
        raise UsageError("no such settings")

    monkeypatch.setattr(inner, "begin", refuse)
    service = make_service()
    link = FrontServer(tmp_path / FRONT_SOCKET, service)
    link.start()
    try:
        with pytest.raises(UsageError, match="no such settings"):
            inner.supplied(SimpleNamespace(), {SETTINGS_VARIABLE: str(tmp_path / "settings.json")})
        assert FrontClient(tmp_path / FRONT_SOCKET).state().phase == "failed"
    finally:
        link.close()
