"""What a failure leaves behind, and what export and wake refuse; the rest is the engines' contract."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path

import pytest

from coldsnap.core.digest import Digest
from coldsnap.core.extents import PAGE_BYTES
from coldsnap.core.manifest import (
    NativeManifest,
    parse_native_manifest,
    parse_recovery_manifest,
    recovery_manifest_bytes,
)
from coldsnap.core.messages import (
    Answers,
    ExportBody,
    Exported,
    PackSource,
    Prompt,
    Request,
    Verb,
    WakeBody,
    WorkerSettings,
    WorkerState,
    WorkerStatus,
)
from coldsnap.core.replay import ReplayEntry
from coldsnap.core.request import TransferPath
from coldsnap.engines.control import Call
from coldsnap.engines.export import DIFFERS
from coldsnap.engines.inner import InnerWorker
from coldsnap.engines.observer import Observer
from coldsnap.engines.wake import fill_memory
from coldsnap.errors import (
    EngineError,
    IntegrityError,
    InternalError,
    OperationInterrupted,
    PayloadRejected,
    ResourceBusy,
    UsageError,
    UserError,
)
from coldsnap.hydrate import holes
from coldsnap.hydrate.host import HostMemory
from coldsnap.hydrate.memory import host_addressable
from coldsnap.store import admission
from coldsnap.store.admission import record_path
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.engine import FakeEngine
from coldsnap.testing.engine_harness import Driven, driven, free_port, post
from coldsnap.testing.memory import FakeMemory

BASE = 0x5100_0000_0000
PROMPTS = (Prompt(text="hello", max_tokens=3),)
MakeFake = Callable[..., FakeEngine]


class Faulty(FakeEngine):
    """Raises what it is told to, once."""

    fails: dict[str, Exception] = {}  # noqa: RUF012 - set anew by each test

    def _maybe(self, name: str) -> None:
        error = type(self).fails.pop(name, None)
        if error is not None:
            raise error

    def before_sleep(self) -> None:
        self._maybe("before_sleep")

    def after_wake(self) -> None:
        self._maybe("after_wake")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> dict[str, Exception]:
    fails: dict[str, Exception] = {}
    monkeypatch.setattr(Faulty, "fails", fails)
    return fails


def worker_of(engine: FakeEngine, memory: FakeMemory | HostMemory, **settings: object) -> InnerWorker:
    record = {"worker": "w0", "unit": "u0", "rank": 0, "socket": "/nowhere", **settings}
    return InnerWorker(WorkerSettings.model_validate(record), engine, memory)


def call(worker: InnerWorker, verb: Verb, body: object = None) -> object:
    request = Request(id=1, verb=verb, body=body if isinstance(body, dict) else {})
    return worker(Call(request, lambda frame: None))


def status(worker: InnerWorker) -> WorkerStatus:
    found = call(worker, Verb.STATUS)
    assert isinstance(found, WorkerStatus)
    return found


def test_a_failed_load_is_kept_and_only_status_answered(make_fake: MakeFake) -> None:
    engine = make_fake()
    (engine.model_path / "model-00002-of-00002.safetensors").unlink()
    (engine.model_path / "model-00001-of-00002.safetensors").unlink()
    worker = worker_of(engine, FakeMemory())
    assert status(worker).state is WorkerState.LOADING
    with pytest.raises(UsageError, match="loading"):
        call(worker, Verb.ANSWER)
    worker.load()
    found = status(worker)
    assert found.state is WorkerState.FAILED
    assert found.error is not None
    assert (found.error.kind, found.engine_versions) == ("UserError", {})
    with pytest.raises(UsageError, match="failed"):
        call(worker, Verb.SLEEP)


def test_a_load_that_dies_of_a_bug_is_told_as_the_engines(make_fake: MakeFake, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_fake()
    monkeypatch.setattr(engine, "load", lambda memory, observer: dict[str, int]()["gone"])
    worker = worker_of(engine, FakeMemory())
    worker.load()
    error = status(worker).error
    assert error is not None
    assert (error.kind, "KeyError" in error.message) == ("EngineError", True)


def test_a_taken_port_fails_the_load(make_fake: MakeFake, tmp_path: Path) -> None:
    port = free_port()
    with driven(make_fake(), tmp_path / "a", base=BASE, port=port):
        worker = worker_of(make_fake(), FakeMemory(), port=port)
        worker.load()
        error = status(worker).error
        assert error is not None
        assert error.kind == "ResourceBusy"


def test_sleep_that_fails_leaves_idle_and_closed(
    make_fake: MakeFake, tmp_path: Path, faults: dict[str, Exception]
) -> None:
    with driven(make_fake(kind=Faulty), tmp_path / "a", base=BASE) as live:
        answers, exported, port = live.answers(PROMPTS), live.export(), free_port()
        live.serve(port)
        faults["before_sleep"] = EngineError("cannot let go")
        with pytest.raises(EngineError, match="cannot let go"):
            live.sleep()
        found = live.client.status()
        assert (found.state, found.port) == (WorkerState.IDLE, None)
        assert live.answers(PROMPTS) == answers
        live.sleep()
        live.wake(exported)
        assert live.answers(PROMPTS) == answers


@pytest.mark.parametrize("error", [EngineError("no permission"), ValueError("a bug")])
def test_wake_that_fails_at_the_engine_gives_the_pages_back(
    make_fake: MakeFake, tmp_path: Path, faults: dict[str, Exception], error: Exception
) -> None:
    with driven(make_fake(kind=Faulty), tmp_path / "a", base=BASE) as live:
        answers, exported = live.answers(PROMPTS), live.export()
        live.sleep()
        faults["after_wake"] = error
        with pytest.raises((EngineError, InternalError)):
            live.wake(exported)
        found = live.client.status()
        assert (found.state, found.mapped_bytes) == (WorkerState.ASLEEP, 0)
        live.wake(exported)
        assert live.answers(PROMPTS) == answers


def test_memory_that_cannot_be_unmapped_fails_the_worker(make_fake: MakeFake, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeMemory()
    worker = worker_of(make_fake(), memory)
    worker.load()

    def refuse() -> None:
        raise OSError(12, "no memory")

    monkeypatch.setattr(memory, "unmap", refuse)
    with pytest.raises(InternalError, match="could not be unmapped"):
        call(worker, Verb.SLEEP)
    assert status(worker).state is WorkerState.FAILED


def test_an_address_taken_while_asleep_leaves_asleep(make_fake: MakeFake) -> None:
    memory = FakeMemory()
    worker = worker_of(make_fake(), memory)
    worker.load()
    (one,) = memory.allocations
    call(worker, Verb.SLEEP)
    memory.occupied.append((one.ptr, 4096))
    body = {"source": "none", "native_manifest": "", "recovery_manifest": ""}
    with pytest.raises(ResourceBusy):
        call(worker, Verb.WAKE, body)
    assert status(worker).state is WorkerState.ASLEEP
    memory.occupied.clear()
    call(worker, Verb.WAKE, body)
    assert status(worker).state is WorkerState.IDLE


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        (Verb.ANSWER, {}),
        (Verb.ANSWER, {"prompts": [{"text": "x", "max_tokens": 0}]}),
        (Verb.EXPORT, {"state_root": "/a"}),
        (Verb.SERVE, {"port": 70_000}),
    ],
)
def test_a_malformed_body_is_named_and_changes_nothing(make_fake: MakeFake, verb: Verb, body: object) -> None:
    worker = worker_of(make_fake(), FakeMemory())
    worker.load()
    with pytest.raises(UsageError, match=f"body of '{verb.value}'"):
        call(worker, verb, body)
    assert status(worker).state is WorkerState.IDLE


class TestDraining:
    """`sleep` while requests are in flight."""

    def test_a_request_in_flight_is_answered_first(
        self, make_fake: MakeFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            begun.set()
            assert go_on.wait(60)

        fake = make_fake(before_token=hold)
        with driven(fake, tmp_path / "a", base=BASE) as live:
            port = free_port()
            live.serve(port)
            replies: list[int] = []
            body = {"prompt": "x", "max_tokens": 1}
            client = threading.Thread(target=lambda: replies.append(post(port, "/v1/completions", body)[0]))
            client.start()
            assert begun.wait(60)
            assert live.client.status().in_flight == 1
            idle = fake._listener._idle  # type: ignore[union-attr]
            wait_for = idle.wait_for

            def let_it_end(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
                go_on.set()
                return wait_for(predicate, timeout)

            monkeypatch.setattr(idle, "wait_for", let_it_end)  # the listener has counted by then what is in flight
            assert live.sleep().drained_requests == 1
            client.join(60)
            assert replies == [200]

    def test_a_request_that_does_not_end_is_cut_off(self, make_fake: MakeFake) -> None:
        begun, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            begun.set()
            go_on.wait(60)

        engine = make_fake(before_token=hold)
        engine.load(FakeMemory(), Observer())
        port = free_port()
        engine.start_serving("127.0.0.1", port)
        failures: list[Exception] = []

        def ask() -> None:
            try:
                post(port, "/v1/completions", {"prompt": "x", "max_tokens": 1})
            except (OSError, HTTPException) as error:
                failures.append(error)

        client = threading.Thread(target=ask)
        client.start()
        assert begun.wait(60)
        stopped = threading.Thread(target=lambda: engine.stop_serving(drain_s=0.01))
        stopped.start()
        client.join(60)
        assert len(failures) == 1
        go_on.set()
        stopped.join(60)
        assert engine.num_in_flight == 0


class TestExport:
    """Refusals and demotions of `export`."""

    def test_bytes_that_changed_since_the_load_stay_out_of_the_pack(self, make_fake: MakeFake, tmp_path: Path) -> None:
        with driven(make_fake(), tmp_path / "a", base=BASE) as live:
            first = live.export("one")
            manifest = native(first)
            victim = manifest.model_weight_extents[0]
            live.flip_bit(victim.ptr + victim.size - 1)
            answers, second = live.answers(PROMPTS), live.export("two")
            assert second.residual_reasons[DIFFERS] == victim.size
            assert second.model_bytes == first.model_bytes - victim.size
            assert victim.ptr not in {one.ptr for one in native(second).model_weight_extents}
            for source in (PackSource.NATIVE, PackSource.RECOVERY):
                live.sleep()
                live.wake(second, source)
                assert live.answers(PROMPTS) == answers

    def test_a_checkpoint_that_is_gone_is_named_before_anything_is_written(
        self, make_fake: MakeFake, tmp_path: Path
    ) -> None:
        with driven(make_fake(), tmp_path / "a", base=BASE) as live:
            (live.engine.model_path / "model-00001-of-00002.safetensors").unlink()
            with pytest.raises(UserError, match="model-00001"):
                live.export()
            assert list((live.folder / "out").iterdir()) == []
            assert not live.state_root.exists()

    @pytest.mark.parametrize(
        "damage", [lambda data: data[:-1], lambda data: data[:-1] + b"?", lambda data: data + b"?"]
    )
    def test_a_checkpoint_that_changed_since_it_was_pinned_is_refused(
        self, make_fake: MakeFake, tmp_path: Path, damage: Callable[[bytes], bytes]
    ) -> None:
        with driven(make_fake(), tmp_path / "a", base=BASE) as live:
            path = live.engine.model_path / "model-00001-of-00002.safetensors"
            path.write_bytes(damage(path.read_bytes()))
            with pytest.raises(UserError, match=r"is wanted|does not|holds|ends at"):
                live.export()
            assert list((live.folder / "out").iterdir()) == []
            assert not live.state_root.exists()

    def test_a_caller_that_went_away_stops_it(self, make_fake: MakeFake, tmp_path: Path) -> None:
        worker = worker_of(make_fake(), FakeMemory())
        worker.load()
        (tmp_path / "out").mkdir(mode=0o700)
        body = ExportBody(state_root=str(tmp_path / "s"), out_dir=str(tmp_path / "out"), capture_id="c")
        gone = Call(Request(id=1, verb=Verb.EXPORT, body=body.model_dump(mode="json")), lambda frame: None)
        gone.cancelled.set()
        with pytest.raises(OperationInterrupted):
            worker(gone)
        assert list((tmp_path / "out").iterdir()) == []
        assert not (tmp_path / "s").exists()
        assert isinstance(call(worker, Verb.EXPORT, body.model_dump(mode="json")), Exported)


def native(exported: Exported) -> NativeManifest:
    return parse_native_manifest(Path(exported.native_manifest.path).read_bytes())


def residual_of(exported: Exported) -> Path:
    assert exported.residual is not None
    return Path(exported.residual.path)


def punch_holes(path: Path) -> None:
    """Write the file again with its pages of zeros as holes."""
    content = path.read_bytes()
    with path.open("wb") as file:
        file.truncate(len(content))
        for at in range(0, len(content), PAGE_BYTES):
            if any(page := content[at : at + PAGE_BYTES]):
                os.pwrite(file.fileno(), page, at)
    assert path.read_bytes() == content


class TestWake:
    """Refusals of `wake`; each leaves the worker asleep and able to wake."""

    @pytest.fixture
    def asleep(self, make_fake: MakeFake, tmp_path: Path) -> object:
        with driven(make_fake(), tmp_path / "a", base=BASE) as live:
            exported = live.export()
            answers = live.answers(PROMPTS)
            live.sleep()
            yield live, exported
            assert live.client.status().state is WorkerState.ASLEEP
            live.wake(exported)
            assert live.answers(PROMPTS) == answers

    @pytest.mark.parametrize("missing", ["pack", "pack_sha256", "residual", "residual_sha256"])
    def test_a_body_that_lacks_a_file(self, asleep: tuple[Driven, Exported], missing: str) -> None:
        live, exported = asleep
        with pytest.raises(UsageError, match=missing):
            live.wake(exported, PackSource.NATIVE, **{missing: None})

    @pytest.mark.parametrize("name", ["pack_sha256", "residual_sha256"])
    def test_a_file_of_another_capture(self, asleep: tuple[Driven, Exported], name: str) -> None:
        live, exported = asleep
        with pytest.raises(IntegrityError, match=r"this (worker|capture)'s"):
            live.wake(exported, PackSource.NATIVE, **{name: Digest.of(b"other")})

    def test_a_damaged_residual(self, asleep: tuple[Driven, Exported]) -> None:
        live, exported = asleep
        assert exported.residual is not None
        data = bytearray(Path(exported.residual.path).read_bytes())
        data[0] ^= 1
        damaged = live.folder / "damaged.blob"
        damaged.write_bytes(data)
        with pytest.raises(IntegrityError, match=r"damaged\.blob"):
            live.wake(exported, residual=str(damaged))

    def test_a_wake_says_what_each_step_took(self, asleep: tuple[Driven, Exported]) -> None:
        live, exported = asleep
        steps = (
            "manifest_read",
            "manifest_parse",
            "admit",
            "admit_residual",
            "remap",
            "pack",
            "residual",
            "after_wake",
        )
        assert set(live.wake(exported).seconds) == set(steps)
        live.sleep()

    def test_a_residual_is_proved_once(self, asleep: tuple[Driven, Exported], monkeypatch: pytest.MonkeyPatch) -> None:
        live, exported = asleep
        path = residual_of(exported)
        assert not record_path(path).exists()
        live.wake(exported)
        live.sleep()
        with monkeypatch.context() as patched:
            patched.setattr(admission, "digest_of_file", lambda *_: pytest.fail("proved twice"))
            live.wake(exported)
        live.sleep()

    def test_a_residual_that_was_proved_and_then_damaged(self, asleep: tuple[Driven, Exported]) -> None:
        live, exported = asleep
        path = residual_of(exported)
        live.wake(exported)
        live.sleep()
        whole = path.read_bytes()
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        with pytest.raises(PayloadRejected, match=path.name) as caught:
            live.wake(exported)
        assert caught.value.reason == "digest_mismatch"
        path.write_bytes(whole)

    def test_a_residual_whose_times_were_put_back_is_believed(self, asleep: tuple[Driven, Exported]) -> None:
        """As a pack is: a record says that the file was not touched, and who can say otherwise is us, or the disk."""
        live, exported = asleep
        path = residual_of(exported)
        live.wake(exported)
        before = live.contents()
        live.sleep()
        whole, found = path.read_bytes(), path.stat()
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        live.wake(exported)
        assert live.contents() != before
        live.sleep()
        path.write_bytes(whole)

    def test_holes_of_a_residual_are_not_read(
        self, asleep: tuple[Driven, Exported], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(holes, "LEAST_HOLE_BYTES", PAGE_BYTES)
        live, exported = asleep
        path = residual_of(exported)
        whole = live.wake(exported)
        before = live.contents()
        live.sleep()
        punch_holes(path)
        report = live.wake(exported)
        assert live.contents() == before
        assert "bytes were left zero" in report.transfer_path["residual"]
        assert "bytes were left zero" not in whole.transfer_path["residual"]
        assert report.residual_bytes == whole.residual_bytes
        live.sleep()

    def test_holes_of_a_residual_are_read_into_memory_that_was_not_unmapped(
        self, make_fake: MakeFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As in a build, where it holds anything: a remap of what is mapped keeps its bytes."""
        monkeypatch.setattr(holes, "LEAST_HOLE_BYTES", PAGE_BYTES)
        with driven(make_fake(), tmp_path / "a", base=BASE) as live:
            exported = live.export()
            punch_holes(residual_of(exported))
            before = live.contents()
            memory = host_addressable(live.memory)
            for one in memory.allocations:
                memory.view(one.ptr, one.size)[:] = b"\xc5" * one.size
            body = live.wake_body(exported, PackSource.NATIVE)
            call = Call(Request(id=1, verb=Verb.WAKE), lambda _frame: None)
            report = fill_memory(body, memory=memory, call=call, started_with=live.engine.model_source)
            assert live.contents() == before
            assert "left zero" not in report.transfer_path["residual"]

    def test_a_place_that_takes_no_record(self, asleep: tuple[Driven, Exported]) -> None:
        live, exported = asleep
        path = residual_of(exported)
        (record_path(path) / "in the way").mkdir(parents=True)
        for _ in range(2):
            live.wake(exported)
            live.sleep()
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(PayloadRejected, match=path.name):
            live.wake(exported)
        path.write_bytes(whole)

    def test_a_checkpoint_with_other_headers(self, asleep: tuple[Driven, Exported], tmp_path: Path) -> None:
        live, exported = asleep
        other = write_checkpoint(tmp_path / "other", tensors={"embed": 10})
        with pytest.raises(IntegrityError, match="not the captured one"):
            live.wake(exported, PackSource.RECOVERY, model_path=str(other))

    def test_a_checkpoint_with_the_same_headers_and_other_bytes(
        self, asleep: tuple[Driven, Exported], tmp_path: Path
    ) -> None:
        live, exported = asleep
        other = write_checkpoint(tmp_path / "other", seed=1)
        with pytest.raises(IntegrityError):
            live.wake(exported, PackSource.RECOVERY, model_path=str(other))

    def test_a_recovery_without_its_folder(self, asleep: tuple[Driven, Exported]) -> None:
        live, exported = asleep
        with pytest.raises(UsageError, match="model_path"):
            live.wake(exported, PackSource.RECOVERY, model_path=None)


def split_plan(entry: ReplayEntry) -> ReplayEntry:
    """The same extent, as three pieces."""
    (piece,) = entry.pieces
    cuts = [0, entry.size // 3, entry.size // 2, entry.size]
    pieces = [
        replace(
            piece,
            file_offset=piece.file_offset + begin,
            tensor_offset=piece.tensor_offset + begin,
            extent_offset=begin,
            size=end - begin,
        )
        for begin, end in pairwise(cuts)
    ]
    return replace(entry, pieces=tuple(pieces))


@pytest.mark.parametrize("damage", [False, True])
def test_an_extent_of_several_pieces_is_replayed_and_verified(
    make_fake: MakeFake, tmp_path: Path, damage: bool
) -> None:
    with driven(make_fake(), tmp_path / "a", base=BASE) as live:
        before, exported = live.contents(), live.export()
        manifest = parse_recovery_manifest(Path(exported.recovery_manifest.path).read_bytes())
        plan = tuple(split_plan(entry) for entry in manifest.replay_plan)
        if damage:
            plan = (replace(plan[0], sha256=Digest.of(b"other")), *plan[1:])
        path = live.folder / "pieces.json"
        path.write_bytes(recovery_manifest_bytes(replace(manifest, replay_plan=plan)))
        path.chmod(0o600)
        live.sleep()
        if damage:
            with pytest.raises(IntegrityError, match="other bytes in 1 tensor: embed"):
                live.wake(exported, PackSource.RECOVERY, recovery_manifest=str(path))
            assert live.client.status().state is WorkerState.ASLEEP
        else:
            live.wake(exported, PackSource.RECOVERY, recovery_manifest=str(path))
            assert live.contents() == before
            assert isinstance(live.answers(PROMPTS), tuple)


@pytest.mark.parametrize("wanted", [TransferPath.BUFFERED, TransferPath.DIRECT, TransferPath.MAPPED])
def test_a_wished_path_is_taken_or_its_refusal_told(make_fake: MakeFake, tmp_path: Path, wanted: TransferPath) -> None:
    with driven(make_fake(), tmp_path / "a", base=BASE) as live:
        exported = live.export()
        live.sleep()
        told = live.wake(exported, transfer_path=wanted).transfer_path["pack"]
    assert told.startswith((f"{wanted.value}: asked for", f"buffered: asked for {wanted.value}, "))


def test_bodies_and_replies_cross_the_socket_as_records() -> None:
    body = WakeBody(source=PackSource.NONE, native_manifest="n", recovery_manifest="r")
    assert WakeBody.model_validate_json(body.model_dump_json()) == body
    assert Answers.model_validate_json('{"answers":[]}').answers == ()
