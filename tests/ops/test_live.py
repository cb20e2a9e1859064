"""Services that are there: which verb each state allows, what a failed wake leaves, and who is stopped."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coldsnap.capsule.driver import RunningUnit
from coldsnap.core.artifact import artifact_bytes, artifact_document, artifact_from
from coldsnap.core.points import install
from coldsnap.errors import (
    AcceptanceFailed,
    EngineError,
    IntegrityError,
    InvalidDocument,
    OperationInterrupted,
    PayloadRejected,
    Refused,
    ResourceBusy,
    UnsafePath,
    UsageError,
    UserError,
)
from coldsnap.ops import live, services
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.live import artifact_of, service_status, sleep_service, stop_service, wake_service
from coldsnap.ops.outside import OutsideClient
from coldsnap.ops.services import ServiceRecord, Services
from coldsnap.ops.steps import attach_units
from coldsnap.ops.tools import Tools
from coldsnap.store.locks import try_hold
from coldsnap.testing.engine_harness import free_port

from .conftest import HOST, Shop  # isort: skip


def listening(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


def state(shop: Shop) -> str:
    return service_status(shop.tools, "svc").state


def sleep(shop: Shop, operation_id: str = "sleep-1") -> None:
    sleep_service(shop.tools, shop.live("sleep", operation_id))


def wake(shop: Shop, operation_id: str = "wake-1") -> None:
    wake_service(shop.tools, shop.live("wake", operation_id))


def answers_are_right(shop: Shop) -> None:
    prompts, expected = shop.loaded.acceptance()
    assert OutsideClient(host=HOST, port=shop.port).complete(prompts, timeout_s=60) == expected


def flip_pack(shop: Shop) -> None:
    path = shop.tools.store.path(shop.result.pack_digests[0])
    data = bytearray(path.read_bytes())
    data[9000] ^= 1
    path.write_bytes(data)


# -- status -------------------------------------------------------------------------------------------


def test_status_shows_what_the_workers_say(shop: Shop) -> None:
    shop.restore()
    shown = service_status(shop.tools, "svc").document()
    assert (shown["name"], shown["state"], shown["port"], shown["source"]) == ("svc", "ready", shop.port, "native")
    assert shown["artifact_digest"] == str(shop.loaded.digest)
    worker = shown["workers"]["w0"]
    assert (worker["state"], worker["engine"], worker["port"]) == ("serving", "fake", shop.port)
    assert worker["mapped_bytes"] == shop.kit.program.started[-1].memory.allocations[0].size
    assert len(shown["pids"]) == 1


def test_status_of_a_service_whose_processes_are_gone(shop: Shop) -> None:
    shop.restore()
    shop.kit.units.end_all()
    shown = service_status(shop.tools, "svc")
    assert (shown.state, shown.pids, dict(shown.workers)) == ("lost", (), {})
    assert shown.record.state == "ready", "status changes nothing"
    assert shown.problem is not None
    assert f"coldsnap restore {shop.loaded.path} --name svc" in str(shown.problem.cure)
    assert shown.document()["problem"] == shown.problem.document()


def test_status_of_a_service_that_ends_while_it_is_looked_at(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes are found, and are gone a moment later: that is an answer, and no error of `status`."""

    def attach_then_end(tools: Tools, record: ServiceRecord) -> dict[str, RunningUnit]:
        found = attach_units(tools, record)
        shop.kit.units.end_all()
        return found

    shop.restore()
    with monkeypatch.context() as patch:
        patch.setattr(live, "attach_units", attach_then_end)
        shown = service_status(shop.tools, "svc")
    assert str(shown.workers["w0"]).startswith("does not answer: ")
    assert service_status(shop.tools, "svc").state == "lost"


def killed_before_its_units(shop: Shop, operation_id: str = "restore-1") -> None:
    """What a controller leaves that was killed between its record and its first process."""
    shop.restore(operation_id)
    record = shop.tools.services.must_load("svc")
    shop.kit.units.end_all()
    shop.tools.services.save(record.model_copy(update={"state": "restoring", "units": ()}))


def test_status_of_a_restore_that_was_killed_before_its_units(shop: Shop) -> None:
    killed_before_its_units(shop)
    shown = service_status(shop.tools, "svc")
    assert (shown.state, shown.pids, dict(shown.workers)) == ("lost", (), {})
    assert shown.problem is not None
    assert f"restore-1 (process {os.getpid()}) ended before it was done" in shown.problem.message
    back = f"`coldsnap restore {shop.loaded.path} --name svc --port {shop.port}` brings it back"
    assert shown.problem.cure == f"{back}; `coldsnap stop svc` only forgets it"
    shop.restore("restore-2")
    answers_are_right(shop)
    assert (state(shop), service_status(shop.tools, "svc").problem) == ("ready", None)


def test_status_of_a_restore_that_is_at_work(shop: Shop) -> None:
    killed_before_its_units(shop)
    with shop.tools.services.lock("svc"):
        shown = service_status(shop.tools, "svc")
    assert (shown.state, shown.problem) == ("restoring", None)


def test_status_of_a_restore_that_ends_while_it_is_looked_at(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record was read first and its lock was free afterwards, and yet it is not dead."""
    shop.restore()
    done = shop.tools.services.must_load("svc")
    shop.tools.services.save(done.model_copy(update={"state": "restoring", "units": ()}))

    def ended(services: Services, name: str) -> bool:
        services.save(done)
        return False

    monkeypatch.setattr(Services, "is_locked", ended)
    shown = service_status(shop.tools, "svc")
    assert (shown.state, shown.problem) == ("ready", None)


def test_a_look_does_not_make_an_operation_fail(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """`status` holds a lock for a moment, to see whether somebody else does."""
    monkeypatch.setattr(services, "_GLANCE_S", 60.0)
    killed_before_its_units(shop)
    began = threading.Event()

    def look() -> None:
        with try_hold(shop.tools.services.folder("svc") / "lock") as free:
            assert free
            began.set()
            threading.Event().wait(0.02)

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        assert began.wait(60)
        assert stop_service(shop.tools, "svc") == 0
        looking.result()


def test_status_of_a_worker_that_does_not_answer(shop: Shop) -> None:
    shop.restore()
    shop.kit.program.started[-1]._server.close()
    shown = service_status(shop.tools, "svc")
    assert shown.state == "ready"
    assert str(shown.workers["w0"]).startswith("does not answer: ")


def test_status_of_an_unknown_name(shop: Shop) -> None:
    with pytest.raises(UserError, match="no service is named"):
        service_status(shop.tools, "svc")


# -- the state table ----------------------------------------------------------------------------------


def test_sleep_gives_back_the_memory_and_wake_brings_the_same_answers(shop: Shop) -> None:
    shop.restore()
    memory = shop.kit.program.started[-1].memory
    size = memory.allocations[0].size
    reports = sleep_service(shop.tools, shop.live("sleep"))
    assert reports["w0"].unmapped_bytes == size
    assert (state(shop), memory.mapped, listening(shop.port)) == ("asleep", False, False)
    assert shop.kit.units.running() == ("u0",)
    wake(shop)
    assert (state(shop), memory.mapped) == ("ready", True)
    answers_are_right(shop)


def test_a_warm_service_wakes(shop: Shop) -> None:
    shop.restore(warm=True)
    wake(shop)
    assert state(shop) == "ready"
    answers_are_right(shop)


def test_sleep_and_wake_again_and_again(shop: Shop) -> None:
    shop.restore()
    for index in range(3):
        sleep(shop, f"sleep-{index}")
        wake(shop, f"wake-{index}")
    answers_are_right(shop)


@pytest.mark.parametrize(
    ("warm", "asleep", "verb", "message"),
    [
        (False, False, "wake", "a service that is ready cannot wake"),
        (True, False, "sleep", "a service that is warm cannot sleep"),
        (False, True, "sleep", "a service that is asleep cannot sleep"),
    ],
)
def test_a_verb_that_the_state_does_not_allow_changes_nothing(
    shop: Shop, warm: bool, asleep: bool, verb: str, message: str
) -> None:
    shop.restore(warm=warm)
    if asleep:
        sleep(shop, "sleep-0")
    before = shop.tools.services.must_load("svc")
    with pytest.raises(UsageError, match=message):
        (wake if verb == "wake" else sleep)(shop)
    assert shop.tools.services.must_load("svc") == before
    assert shop.kit.units.running() == ("u0",)


def test_a_restore_that_was_killed_can_neither_sleep_nor_wake_but_stop(shop: Shop) -> None:
    shop.restore()
    record = shop.tools.services.must_load("svc")
    shop.tools.services.save(record.model_copy(update={"state": "restoring"}))
    for act in (sleep, wake):
        with pytest.raises(UsageError, match="a service that is restoring cannot"):
            act(shop)
    assert stop_service(shop.tools, "svc") == 1
    assert shop.kit.units.running() == ()


@pytest.mark.parametrize("verb", ["sleep", "wake"])
@pytest.mark.parametrize("before", ["ready", "asleep", "warm", "restoring"])
def test_a_service_without_processes_says_how_to_get_it_back(shop: Shop, verb: str, before: str) -> None:
    """Whatever its record says it was, which no verb has to fit any more."""
    shop.restore(warm=before == "warm")
    if before == "asleep":
        sleep(shop, "sleep-0")
    if before == "restoring":
        record = shop.tools.services.must_load("svc")
        shop.tools.services.save(record.model_copy(update={"state": "restoring"}))
    shop.kit.units.end_all()
    with pytest.raises(EngineError, match="'svc' has no running process for u0 any more") as caught:
        (wake if verb == "wake" else sleep)(shop, f"{verb}-1")
    back = f"`coldsnap restore {shop.loaded.path} --name svc --port {shop.port}` brings it back"
    assert caught.value.cure == f"{back}; `coldsnap stop svc` only forgets it"
    shop.restore("restore-2")
    answers_are_right(shop)


def test_a_lost_service_that_started_cold_says_it_too(shop: Shop) -> None:
    shop.restore()
    record = shop.tools.services.must_load("svc")
    changes = {"artifact_path": None, "artifact_digest": None, "state": "ready"}
    shop.tools.services.save(record.model_copy(update=changes))
    shop.kit.units.end_all()
    with pytest.raises(EngineError) as caught:
        wake(shop)
    assert caught.value.cure == "restore its artifact again; `coldsnap stop svc` only forgets it"


@pytest.mark.parametrize("verb", ["sleep", "wake"])
def test_one_operation_at_a_time(shop: Shop, verb: str) -> None:
    shop.restore(warm=verb == "wake")
    with shop.tools.services.lock("svc"), pytest.raises(ResourceBusy, match="another operation is working on 'svc'"):
        (wake if verb == "wake" else sleep)(shop)


# -- a wake that fails --------------------------------------------------------------------------------


def test_a_wake_whose_pack_is_damaged_leaves_it_asleep_and_can_be_tried_again(shop: Shop) -> None:
    shop.restore()
    sleep(shop)
    pack = shop.tools.store.path(shop.result.pack_digests[0])
    whole = pack.read_bytes()
    flip_pack(shop)
    with pytest.raises(PayloadRejected):
        wake(shop)
    assert state(shop) == "asleep"
    assert not shop.kit.program.started[-1].memory.mapped
    assert not listening(shop.port)
    pack.unlink(missing_ok=True)
    pack.write_bytes(whole)
    pack.chmod(0o600)
    wake(shop, "wake-2")
    answers_are_right(shop)


def test_a_wake_that_fails_inside_the_engine_leaves_it_asleep(shop: Shop) -> None:
    shop.restore(warm=True)
    memory = shop.kit.program.started[-1].memory
    memory.occupied.append((memory.allocations[0].ptr, 4096))
    with pytest.raises(ResourceBusy, match="is taken by"):
        wake(shop)
    assert state(shop) == "warm"
    assert not memory.mapped
    memory.occupied.clear()
    wake(shop, "wake-2")
    answers_are_right(shop)


def test_a_wake_with_wrong_answers_ends_the_service(shop: Shop) -> None:
    shop.restore(warm=True)
    shop.kit.program.started[-1].engine._ranges.pop()
    with pytest.raises(AcceptanceFailed) as caught:
        wake(shop)
    assert caught.value.__notes__ == ["stopped service svc, which must not serve what it has in memory"]
    assert shop.tools.services.names() == ()
    assert shop.kit.units.running() == ()
    assert not listening(shop.port)


def test_a_wake_onto_a_taken_port_is_refused_before_anything_moves(shop: Shop) -> None:
    shop.restore()
    sleep(shop)
    with socket.create_server((HOST, shop.port)), pytest.raises(Refused, match="port"):
        wake(shop)
    assert state(shop) == "asleep"
    wake(shop, "wake-2")
    answers_are_right(shop)


def test_a_descriptor_that_changed_since_is_not_believed(shop: Shop) -> None:
    shop.restore()
    sleep(shop)
    document = artifact_document(shop.loaded.artifact)
    document["acceptance"]["expected"] = "something else"
    shop.loaded.path.write_bytes(artifact_bytes(artifact_from(document)))
    with pytest.raises(IntegrityError, match="is not the artifact that 'svc' was restored from") as caught:
        wake(shop)
    assert caught.value.facts["expected"] == str(shop.loaded.digest)
    assert caught.value.facts["found"] == str(load_artifact(shop.loaded.path).digest)
    assert state(shop) == "asleep"


def test_a_cold_service_has_no_artifact() -> None:
    record = ServiceRecord(name="svc", engine="fake", state="ready", operation_id="op-1")
    with pytest.raises(UserError, match="was started cold"):
        artifact_of(record)


# -- stop ---------------------------------------------------------------------------------------------


def test_stop_ends_it_and_keeps_what_a_restore_needs(shop: Shop) -> None:
    shop.restore("restore-1")
    assert stop_service(shop.tools, "svc") == 1
    assert shop.kit.units.running() == ()
    assert not listening(shop.port)
    with pytest.raises(UserError):
        stop_service(shop.tools, "svc")
    again = shop.restore("restore-2")
    assert (again.evicted, again.prepared_from_record) == (False, True)


def test_stop_of_what_is_gone_already(shop: Shop) -> None:
    shop.restore()
    shop.kit.units.end_all()
    assert stop_service(shop.tools, "svc") == 0
    assert shop.tools.services.names() == ()


def test_stop_of_an_unknown_name_makes_no_folder(shop: Shop) -> None:
    with pytest.raises(UserError):
        stop_service(shop.tools, "unknown")
    assert not shop.tools.services.folder("unknown").exists()


@pytest.mark.parametrize(
    ("old", "new", "field", "message"),
    [
        ('"ready"', '"reaDy"', "state", "is not one of the known states"),
        ('"init_pid"', '"init_piD"', "units[0].record.init_pid", "is missing"),
        ('"root_pid":', '"root_pid":-', "units[0].record.root_pid", "is too small"),
        ('"port":', '"port":"x","prot":', "port", "has the wrong type"),
    ],
)
def test_a_damaged_record_says_how_to_find_the_processes(
    shop: Shop, old: str, new: str, field: str, message: str
) -> None:
    shop.restore()
    path = shop.tools.services.folder("svc") / "service.json"
    whole = path.read_text()
    path.write_text(whole.replace(old, new, 1))
    for act in (lambda: stop_service(shop.tools, "svc"), lambda: shop.restore("restore-2")):
        with pytest.raises((InvalidDocument, Refused)) as caught:
            act()
        assert (f"{path}: {field}", message) in {(one.field, one.message) for one in caught.value.problems}
        for problem in caught.value.problems:
            assert problem.field.startswith(str(path))
            assert "a coldsnap-init that has " in str(problem.cure)
    path.write_text(whole)
    assert stop_service(shop.tools, "svc") == 1


def test_a_record_of_a_newer_coldsnap_is_told_as_that(shop: Shop) -> None:
    """Nobody has to end anything, or to remove the record: the coldsnap that wrote it reads it."""
    shop.restore()
    path = shop.tools.services.folder("svc") / "service.json"
    path.write_text(path.read_text().replace('"format":1,"h', '"format":2,"later":0,"h', 1))
    with pytest.raises(InvalidDocument) as caught:
        stop_service(shop.tools, "svc")
    (problem,) = caught.value.problems
    assert (problem.field, problem.cure) == (f"{path}: format", "use a newer coldsnap; this one reads 1")
    assert shop.kit.units.running() == ("u0",)


def test_a_lock_that_is_no_file_is_said_to_be_none(shop: Shop) -> None:
    shop.restore()
    lock = shop.tools.services.folder("svc") / "lock"
    lock.unlink()
    lock.mkdir()
    with pytest.raises(UnsafePath, match="svc/lock: it is not the kind of file"):
        stop_service(shop.tools, "svc")


def test_stop_touches_no_other_service(shop: Shop) -> None:
    other = free_port()
    shop.restore("restore-1")
    shop.restore("restore-2", name="other", port=other)
    stop_service(shop.tools, "svc")
    assert listening(other)
    assert shop.tools.services.names() == ("other",)


def test_receipts_of_sleep_and_wake_are_final(shop: Shop, tmp_path: Path) -> None:
    shop.restore()
    sleep(shop, "sleep-1")
    wake(shop, "wake-1")
    with pytest.raises(Refused, match="a success is final"):
        sleep(shop, "sleep-1")
    assert state(shop) == "ready"


# -- operations that ended before they could record what they did -------------------------------------


def end_at(point: str, act: Callable[[], None]) -> None:
    """Ctrl-C at a crash point."""

    def hook(name: str) -> None:
        if name == point:
            raise KeyboardInterrupt

    install(hook)
    try:
        with pytest.raises(OperationInterrupted):
            act()
    finally:
        install(None)


def test_a_sleep_that_was_not_recorded_can_be_asked_again(shop: Shop) -> None:
    shop.restore()
    end_at("sleep.done", lambda: sleep(shop, "sleep-1"))
    assert state(shop) == "ready"
    sleep(shop, "sleep-2")
    assert state(shop) == "asleep"
    wake(shop)
    answers_are_right(shop)


@pytest.mark.parametrize("point", ["restore.hydrated", "restore.accepted", "restore.serving", "wake.done"])
def test_a_wake_that_was_not_recorded_can_be_asked_again(shop: Shop, point: str) -> None:
    shop.restore()
    sleep(shop)
    end_at(point, lambda: wake(shop, "wake-1"))
    assert state(shop) == "asleep"
    wake(shop, "wake-2")
    assert state(shop) == "ready"
    answers_are_right(shop)


@pytest.mark.parametrize(
    ("point", "stays"),
    [("sleep.done", "nothing was committed"), ("sleep.recorded", "service svc was asleep before that, and stays so")],
)
def test_an_interrupted_operation_says_what_stays(shop: Shop, point: str, stays: str) -> None:
    shop.restore()

    def act() -> None:
        with pytest.raises(OperationInterrupted) as caught:
            sleep(shop)
        assert caught.value.message == f"sleep was interrupted; {stays}"
        raise caught.value

    end_at(point, act)


def test_an_interrupted_restore_says_that_its_service_stays(shop: Shop) -> None:
    def act() -> None:
        with pytest.raises(OperationInterrupted, match="restore was interrupted; service svc was ready") as caught:
            shop.restore()
        raise caught.value

    end_at("restore.released", act)
    answers_are_right(shop)
