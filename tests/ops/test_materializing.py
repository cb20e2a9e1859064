"""A recovery that writes the missing pack again: before success, beside the service, or not at all."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from coldsnap.core.digest import Digest
from coldsnap.core.messages import (
    Materialization,
    MaterializationState,
    MaterializeBody,
    Materialized,
    PackSource,
    Prompt,
    Verb,
    WorkerStatus,
)
from coldsnap.core.request import Mount
from coldsnap.engines import materialize
from coldsnap.errors import IntegrityError
from coldsnap.ops.activating import live_request
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.assembly import NATIVE_MANIFEST
from coldsnap.ops.capture import capture
from coldsnap.ops.checkpoints import outside
from coldsnap.ops.live import service_status, sleep_service, stop_service, wake_service
from coldsnap.ops.outside import OutsideClient
from coldsnap.ops.steps import attach_workers
from coldsnap.store.admission import record_path
from coldsnap.testing.checkpoint import write_checkpoint, write_safetensors
from coldsnap.testing.desk import plan
from coldsnap.testing.engine_harness import free_port

from .conftest import HOST, Shop  # isort: skip

ENDED = (MaterializationState.DONE, MaterializationState.FAILED)


@pytest.fixture
def own(kit: object, tmp_path: Path, shop: Shop) -> Shop:
    """A shop whose checkpoint is this test's own, so that it may be damaged."""
    planned = plan(write_checkpoint(tmp_path / "own", seed=7), tmp_path / "own.json", operation_id="capture-own")
    result = capture(shop.tools, planned.request, planned.model)
    return replace(shop, result=result, loaded=load_artifact(result.artifact_path), port=free_port())


def lose_pack(shop: Shop) -> bytes:
    path = shop.pack
    content = path.read_bytes()
    path.unlink()
    record_path(path).unlink()
    return content


def worker(shop: Shop) -> WorkerStatus:
    found = service_status(shop.tools, "svc").workers["w0"]
    assert isinstance(found, WorkerStatus)
    return found


def pack_status(shop: Shop) -> Materialization:
    found = worker(shop).materialization
    assert found is not None
    return found


def wait_until(seen: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not seen():
        assert time.monotonic() < ends
        time.sleep(0.005)


def ask(shop: Shop) -> object:
    client = OutsideClient(host=HOST, port=shop.port)
    return client.complete((Prompt(text="hello", max_tokens=3),), timeout_s=60)


def test_required_has_the_identical_pack_before_success_and_the_next_restore_is_native(own: Shop) -> None:
    content = lose_pack(own)
    result = own.restore("one", materialize="required")
    assert result.source == "recovery"
    assert own.pack.read_bytes() == content
    told = result.wake["w0"].materialization
    assert told is not None
    assert (told.state, told.shared, told.pack_sha256) == (MaterializationState.DONE, False, own.result.pack_digests[0])
    assert result.wake["w0"].seconds["materialize"] > 0
    answers = ask(own)
    again = own.restore("two")
    assert (again.source, again.prepared_from_record) == ("native", True)
    assert ask(own) == answers


def test_off_never_writes(own: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(materialize, "IDLE_S", 0.0)
    lose_pack(own)
    own.restore("one")
    ask(own)
    told = pack_status(own)
    assert (told.state, told.pack_sha256) == (MaterializationState.IDLE, None)
    assert "off" in told.reason
    assert not any(one.name == "coldsnap-pack" for one in threading.enumerate())
    assert not own.pack.exists()


def test_async_waits_for_the_first_answer_and_is_seen_in_the_status(own: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(materialize, "IDLE_S", 600.0)
    content = lose_pack(own)
    result = own.restore("one", materialize="async")
    told = result.wake["w0"].materialization
    assert told is not None
    assert told.state is MaterializationState.WAITING
    assert pack_status(own).state is MaterializationState.WAITING
    assert not own.pack.exists()
    process = own.kit.program.started[-1]
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert go_on.wait(60)

    monkeypatch.setattr(process.engine, "_before_token", hold)
    client = threading.Thread(target=ask, args=(own,))
    client.start()
    assert held.wait(60)
    time.sleep(0.05)  # long enough for the background to look several times
    assert pack_status(own).state is MaterializationState.WAITING
    go_on.set()
    client.join(60)
    wait_until(lambda: pack_status(own).state in ENDED)
    status = service_status(own.tools, "svc").document()["workers"]["w0"]["materialization"]
    assert (status["state"], status["done_bytes"]) == ("done", status["total_bytes"])
    assert status["pack_sha256"] == str(own.result.pack_digests[0])
    assert own.pack.read_bytes() == content
    assert own.restore("two").source == "native"


def test_async_begins_when_nobody_asks_anything(own: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(materialize, "IDLE_S", 0.05)
    content = lose_pack(own)
    own.restore("one", materialize="async")
    wait_until(lambda: pack_status(own).state in ENDED)
    assert own.pack.read_bytes() == content


def test_a_native_restore_has_nothing_to_write(own: Shop) -> None:
    result = own.restore("one", materialize="required")
    assert result.source == "native"
    assert "materialize" not in result.wake["w0"].seconds
    assert pack_status(own).state is MaterializationState.IDLE


def test_sleep_waits_for_the_pack(own: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(materialize, "IDLE_S", 600.0)
    content = lose_pack(own)
    own.restore("one", materialize="async")
    sleep_service(own.tools, own.live("sleep"))
    assert own.pack.read_bytes() == content
    assert pack_status(own).state is MaterializationState.DONE
    wake_service(own.tools, own.live("wake"))
    assert service_status(own.tools, "svc").record.source == "native"


def test_a_wake_can_ask_for_the_pack_too(own: Shop) -> None:
    own.restore("one")
    sleep_service(own.tools, own.live("sleep"))
    content = lose_pack(own)
    request = live_request(own.loaded, "wake", operation_id="wake-1", name="svc", materialize="required")
    reports, _ = wake_service(own.tools, request)
    assert reports["w0"].source is PackSource.RECOVERY
    assert own.pack.read_bytes() == content


def test_stop_leaves_nothing_of_a_pack_that_is_being_written(own: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(materialize, "IDLE_S", 600.0)
    lose_pack(own)
    own.restore("one", materialize="async")
    dead = own.tools.state.staging / "pack.0123456789abcdef.partial"  # as a killed writer leaves it: not locked
    dead.write_bytes(b"half")
    stop_service(own.tools, "svc")
    assert not dead.exists()
    assert not own.pack.exists()
    wait_until(lambda: not any(one.name == "coldsnap-pack" for one in threading.enumerate()))


class TestAnotherCheckpoint:
    """A recovery never serves another checkpoint, and a running service outlives the attempt where it can."""

    def test_other_headers_are_refused_before_the_old_service_is_touched(self, own: Shop) -> None:
        own.restore("one")
        pids = service_status(own.tools, "svc").pids
        lose_pack(own)
        path = own.kit.program.started[-1].engine.model_path / "model-00001-of-00002.safetensors"
        write_safetensors(path, {"embed": bytes(20_000), "layers.1": bytes(8_999)})
        with pytest.raises(IntegrityError, match=r"layers\.1 held at least 9000 bytes .*got 8999") as caught:
            own.restore("two")
        fields = [one["field"] for one in caught.value.facts["problems"]]  # type: ignore[attr-defined]
        assert fields == ["model-00001-of-00002.safetensors: layers.1"]
        assert service_status(own.tools, "svc").pids == pids
        ask(own)

    def test_a_fine_tuned_twin_is_refused_with_its_tensors_and_never_served(self, own: Shop) -> None:
        lose_pack(own)
        folder = own.loaded.artifact.launch.units[0].command
        model = Path(folder[folder.index("--model") + 1])
        twin = write_checkpoint(model.with_name("twin"), seed=7)
        changed = twin / "model-00002-of-00002.safetensors"
        data = bytearray(changed.read_bytes())
        data[-1] ^= 1  # the last byte of the last tensor of that file
        changed.write_bytes(data)
        shutil.rmtree(model)
        twin.rename(model)
        with pytest.raises(IntegrityError, match="captured headers and other bytes in 1 tensor") as caught:
            own.restore("two")
        (name,) = list(caught.value.facts["tensors"])  # type: ignore[call-overload]
        assert str(name).startswith("model-00002-of-00002.safetensors: ")
        assert own.tools.services.names() == ()
        assert json.dumps(caught.value.facts["ladder"]).count("recovery") >= 1

    def test_a_missing_file_is_named(self, own: Shop) -> None:
        lose_pack(own)
        command = own.loaded.artifact.launch.units[0].command
        (Path(command[command.index("--model") + 1]) / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(IntegrityError, match=r"model-00002-of-00002\.safetensors is missing"):
            own.restore("one")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/models/m/a", "/models/m/a"),
        ("/in/m", "/out/m"),
        ("/in/deep/m", "/far/m"),
        ("/inside/m", "/inside/m"),
        ("/in", "/out"),
    ],
)
def test_a_path_of_the_unit_is_found_below_its_longest_mount(path: str, expected: str) -> None:
    mounts = [
        Mount(source="/out", target="/in", read_only=True),
        Mount(source="/far", target="/in/deep", read_only=True),
    ]
    assert outside(Path(path), mounts) == Path(expected)


def test_a_wrong_byte_in_memory_fails_a_required_pack_and_leaves_no_file(own: Shop) -> None:
    """The memory is proved as it arrives; a byte that changes afterwards is caught by the writer."""
    content = lose_pack(own)
    own.restore("one")
    process = own.kit.program.started[-1]
    ptr, _ = process.engine._ranges[0]
    process.memory.view(ptr, 1)[0] ^= 1

    entry = own.loaded.worker_object("w0", NATIVE_MANIFEST)
    assert entry is not None
    body = MaterializeBody(
        state_root=str(own.tools.state.path),
        native_manifest=str(own.tools.state.prepared / own.loaded.capsule_digest("u0").hex / entry.path),
        pack_sha256=own.result.pack_digests[0],
        pack_bytes=len(content),
    )
    (live,) = attach_workers(own.tools, own.tools.services.must_load("svc"))
    with pytest.raises(IntegrityError, match=f"{ptr:#x}"):
        live.call(Verb.MATERIALIZE, body, Materialized, deadline_s=60)
    assert pack_status(own).state is MaterializationState.FAILED
    assert f"{ptr:#x}" in pack_status(own).reason
    assert not own.pack.exists()
    assert list(own.tools.state.staging.iterdir()) == []
    process.memory.view(ptr, 1)[0] ^= 1
    made = live.call(Verb.MATERIALIZE, body, Materialized, deadline_s=60)
    assert (made.pack.sha256, made.shared) == (Digest.of(content), False)
    assert live.call(Verb.MATERIALIZE, body, Materialized, deadline_s=60).shared
