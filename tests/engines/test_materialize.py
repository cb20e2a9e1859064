"""The background writer: when it works, when it stands still, how it ends. Time is the test's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coldsnap.core.digest import Digest
from coldsnap.core.messages import (
    MaterializationState,
    MaterializeBody,
    Materialized,
    PackSource,
    Prompt,
    Request,
    Verb,
    WorkerState,
)
from coldsnap.core.policy import Materialize
from coldsnap.engines import materialize
from coldsnap.engines.control import Call
from coldsnap.engines.materialize import Materializer, PackPlan, plan_pack
from coldsnap.errors import IntegrityError, OperationInterrupted, OutOfSpace, Refused, UsageError
from coldsnap.hydrate.memory import host_addressable
from coldsnap.testing.engine import FakeEngine
from coldsnap.testing.engine_harness import Driven, driven, free_port, post
from coldsnap.testing.memory import FakeMemory

BASE = 0x5100_0000_0000
PROMPTS = (Prompt(text="hello", max_tokens=3),)
MakeFake = Callable[..., FakeEngine]
DONE, FAILED, WAITING, RUNNING = (
    MaterializationState.DONE,
    MaterializationState.FAILED,
    MaterializationState.WAITING,
    MaterializationState.RUNNING,
)


def quiet_call() -> Call:
    return Call(Request(id=1, verb=Verb.STATUS), lambda frame: None)


class Engine:
    """What the writer sees of an engine; ``looked`` is released each time it looks whether somebody waits."""

    def __init__(self) -> None:
        self.busy = False
        self.serving = True
        self.looked = threading.Semaphore(0)

    def is_busy(self) -> bool:
        self.looked.release()
        return self.busy

    def wait_for_looks(self, count: int) -> None:
        for _ in range(count):
            assert self.looked.acquire(timeout=60)


@pytest.fixture(autouse=True)
def _no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(materialize, "_POLL_S", 0.001)
    yield
    assert [one.name for one in threading.enumerate() if one.name == "coldsnap-pack"] == []


@pytest.fixture
def plan(make_fake: MakeFake, tmp_path: Path) -> Iterator[tuple[PackPlan, Driven, bytes]]:
    """A pack that was written once and is gone, with the memory that holds its bytes."""
    with driven(make_fake(), tmp_path / "a", base=BASE) as live:
        exported = live.export()
        content = live.lose_pack(exported)
        assert exported.pack is not None
        body = MaterializeBody(
            state_root=str(live.state_root),
            native_manifest=exported.native_manifest.path,
            pack_sha256=exported.pack.sha256,
            pack_bytes=exported.pack.bytes,
        )
        yield plan_pack(body, live.memory), live, content


def writer(live: Driven, engine: Engine) -> Materializer:
    return Materializer(live.memory, busy=engine.is_busy, serving=lambda: engine.serving)


def join(one: Materializer) -> None:
    thread = one._thread
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()


def test_it_begins_after_the_first_answer_and_not_before(
    plan: tuple[PackPlan, Driven, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(materialize, "IDLE_S", 600.0)
    made, live, content = plan
    engine = Engine()
    one = writer(live, engine)
    one.begin(made)
    engine.wait_for_looks(3)  # nobody asked anything yet
    assert one.status().state is WAITING
    engine.busy = True
    engine.wait_for_looks(3)  # the first request is being answered
    assert (one.status().state, live.files()) == (WAITING, [])
    engine.busy = False
    join(one)
    assert one.status().state is DONE
    assert Path(live.state_root, "model-payloads", "sha256", f"{made.digest.hex}.pack").read_bytes() == content


def test_an_answer_over_the_control_socket_is_not_the_first(
    plan: tuple[PackPlan, Driven, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acceptance prompts come before the listener opens; whoever waits for the service has no token yet."""
    monkeypatch.setattr(materialize, "IDLE_S", 600.0)
    made, live, _ = plan
    engine = Engine()
    engine.serving, engine.busy = False, True
    one = writer(live, engine)
    one.begin(made)
    engine.wait_for_looks(2)
    engine.busy = False
    engine.wait_for_looks(3)
    assert one.status().state is WAITING
    one.settle(60, reason="the test ends")
    assert one.status().state is DONE


def test_it_stands_still_while_a_request_is_in_flight(
    plan: tuple[PackPlan, Driven, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(materialize, "IDLE_S", 0.0)
    monkeypatch.setattr(materialize, "PATIENCE_S", 600.0)
    made, live, _ = plan
    engine = Engine()
    one = writer(live, engine)
    began = threading.Event()
    real = host_addressable(live.memory).view

    def view(ptr: int, size: int) -> memoryview:
        engine.busy = True  # a request comes while the first piece is read
        began.set()
        return real(ptr, size)

    monkeypatch.setattr(live.memory, "view", view)
    one.begin(made)
    assert began.wait(60)
    engine.wait_for_looks(5)
    before = one.status()
    engine.wait_for_looks(20)
    assert one.status() == before
    assert (before.state, before.done_bytes < before.total_bytes) == (RUNNING, True)
    monkeypatch.setattr(live.memory, "view", real)
    engine.busy = False
    join(one)
    assert one.status().state is DONE


def test_a_service_that_is_always_busy_gets_its_pack_in_the_end(
    plan: tuple[PackPlan, Driven, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(materialize, "IDLE_S", 0.0)
    monkeypatch.setattr(materialize, "PATIENCE_S", 0.0)
    monkeypatch.setattr(materialize, "BUSY_PIECE_S", 0.002)
    made, live, _ = plan
    engine = Engine()
    one = writer(live, engine)
    monkeypatch.setattr(materialize._Pace, "wait_to_begin", lambda self: setattr(engine, "busy", True))
    one.begin(made)
    join(one)
    assert one.status().state is DONE


def test_settling_gives_up_after_its_patience_and_leaves_nothing(
    plan: tuple[PackPlan, Driven, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, live, _ = plan
    one = writer(live, Engine())
    read = threading.Event()
    real = host_addressable(live.memory).view

    def view(ptr: int, size: int) -> memoryview:
        read.set()
        assert one._cancel.wait(60)
        return real(ptr, size)

    monkeypatch.setattr(materialize, "IDLE_S", 0.0)
    monkeypatch.setattr(live.memory, "view", view)
    one.begin(made)
    assert read.wait(60)
    one.settle(0.001, reason="the worker was put to sleep")
    told = one.status()
    assert (told.state, told.reason) == (FAILED, "given up after 0.001 s: the worker was put to sleep")
    assert live.files() == []
    monkeypatch.setattr(live.memory, "view", real)
    assert not one.run(made, quiet_call()).shared


def test_asking_for_it_at_once_finishes_the_one_that_waits(
    plan: tuple[PackPlan, Driven, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(materialize, "IDLE_S", 600.0)
    made, live, _ = plan
    engine = Engine()
    one = writer(live, engine)
    one.begin(made)
    engine.wait_for_looks(1)
    made_now = one.run(made, quiet_call())
    assert made_now.shared, "the one that waited has written it"
    join(one)


def test_a_caller_that_went_away_stops_its_own(plan: tuple[PackPlan, Driven, bytes]) -> None:
    made, live, _ = plan
    one = writer(live, Engine())
    call = quiet_call()
    call.cancelled.set()
    with pytest.raises(OperationInterrupted):
        one.run(made, call)
    assert (one.status().state, live.files()) == (FAILED, [])


def test_a_failure_in_the_background_is_told_and_the_service_goes_on(
    make_fake: MakeFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with driven(make_fake(), tmp_path / "a", base=BASE) as live:
        answers, exported = live.answers(PROMPTS), live.export()
        live.lose_pack(exported)
        live.sleep()
        monkeypatch.setattr(materialize, "IDLE_S", 600.0)
        live.wake(exported, PackSource.RECOVERY, materialize=Materialize.ASYNC)
        extent = plan_pack_extent(live, exported)
        live.flip_bit(extent)
        monkeypatch.setattr(materialize, "IDLE_S", 0.0)
        port = free_port()
        live.serve(port)
        assert post(port, "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
        for thread in threading.enumerate():
            if thread.name == "coldsnap-pack":
                thread.join(60)
        told = live.materialization
        assert (told.state, f"{extent:#x}" in told.reason) == (FAILED, True)
        assert live.files() == []
        assert live.client.status().state is WorkerState.SERVING
        live.flip_bit(extent)
        assert live.answers(PROMPTS) == answers


def plan_pack_extent(live: Driven, exported: object) -> int:
    from coldsnap.core.manifest import parse_native_manifest
    from coldsnap.core.messages import Exported

    assert isinstance(exported, Exported)
    return parse_native_manifest(Path(exported.native_manifest.path).read_bytes()).model_weight_extents[0].ptr


def test_a_required_pack_that_cannot_be_written_fails_the_wake(
    make_fake: MakeFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with driven(make_fake(), tmp_path / "a", base=BASE) as live:
        answers, exported = live.answers(PROMPTS), live.export()
        live.lose_pack(exported)
        live.sleep()

        def full(*_: object, **__: object) -> None:
            raise OutOfSpace("the disk is full", cure="free some")

        with monkeypatch.context() as patch:
            patch.setattr(materialize, "rewrite_pack", full)
            with pytest.raises(OutOfSpace, match="full"):
                live.wake(exported, PackSource.RECOVERY, materialize=Materialize.REQUIRED)
        status = live.client.status()
        assert (status.state, status.mapped_bytes) == (WorkerState.ASLEEP, 0)
        assert live.materialization.reason == "the disk is full"
        live.wake(exported, PackSource.RECOVERY, materialize=Materialize.REQUIRED)
        assert live.answers(PROMPTS) == answers
        assert live.files() != []


def test_an_export_waits_for_the_one_that_runs(make_fake: MakeFake, tmp_path: Path) -> None:
    with driven(make_fake(), tmp_path / "a", base=BASE) as live:
        exported = live.export()
        content = live.lose_pack(exported)
        live.sleep()
        live.wake(exported, PackSource.RECOVERY, materialize=Materialize.ASYNC)
        again = live.export("again")
        assert live.materialization.state is DONE
        assert again.pack_shared
        assert again.pack is not None
        assert Path(again.pack.path).read_bytes() == content


class TestBody:
    """What `materialize` refuses before it reads a byte of memory."""

    def test_the_pack_of_another_capture(self, make_fake: MakeFake, tmp_path: Path) -> None:
        with driven(make_fake(), tmp_path / "a", base=BASE) as live:
            exported = live.export()
            assert exported.pack is not None
            for change in ({"pack_sha256": Digest.of(b"other")}, {"pack_bytes": exported.pack.bytes + 4096}):
                body = MaterializeBody.model_validate(
                    {
                        "state_root": str(live.state_root),
                        "native_manifest": exported.native_manifest.path,
                        "pack_sha256": exported.pack.sha256,
                        "pack_bytes": exported.pack.bytes,
                        **change,
                    }
                )
                with pytest.raises(IntegrityError, match="this worker's is"):
                    live.call(Verb.MATERIALIZE, body, Materialized)
                live.sleep()
                with pytest.raises(IntegrityError, match="this worker's is"):
                    live.wake(exported, PackSource.RECOVERY, materialize=Materialize.REQUIRED, **change)
                assert live.client.status().mapped_bytes == 0
                live.wake(exported)

    def test_the_manifest_of_another_process(self, plan: tuple[PackPlan, Driven, bytes], tmp_path: Path) -> None:
        made, live, _ = plan
        body = MaterializeBody(
            state_root=str(live.state_root),
            native_manifest=str(live.folder / "out" / "native-manifest.json"),
            pack_sha256=made.digest,
            pack_bytes=made.bytes,
        )
        with pytest.raises(Refused, match="entries"):
            plan_pack(body, FakeMemory())

    def test_a_recovery_without_a_state_root(self, make_fake: MakeFake, tmp_path: Path) -> None:
        with driven(make_fake(), tmp_path / "a", base=BASE) as live:
            exported = live.export()
            live.sleep()
            with pytest.raises(UsageError, match="state_root"):
                live.wake(exported, PackSource.RECOVERY, materialize=Materialize.ASYNC, state_root=None)

    def test_it_is_refused_while_asleep(self, make_fake: MakeFake, tmp_path: Path) -> None:
        with driven(make_fake(), tmp_path / "a", base=BASE) as live:
            exported = live.export()
            live.sleep()
            with pytest.raises(UsageError, match="asleep cannot materialize"):
                live.materialize(exported)


def test_two_workers_of_one_digest_write_one_pack(make_fake: MakeFake, tmp_path: Path) -> None:
    with (
        driven(make_fake(), tmp_path / "a", base=BASE) as one,
        driven(make_fake(shuffle=3), tmp_path / "b", base=BASE + (1 << 40)) as two,
    ):
        exports = one.export(), two.export()
        content = one.lose_pack(exports[0])
        results: list[Materialized] = []
        threads = [
            threading.Thread(target=lambda live=live, exported=exported: results.append(live.materialize(exported)))
            for live, exported in zip((one, two), exports, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(result.shared for result in results) == [False, True]
        assert len({result.pack.sha256 for result in results}) == 1
        assert Path(results[0].pack.path).read_bytes() == content
