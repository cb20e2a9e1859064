"""Restore: prepare touches nothing that runs, eviction comes after it, acceptance before anybody is served, and a
failure leaves nothing but the reason."""

from __future__ import annotations

import contextlib
import json
import socket
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.artifact import artifact_bytes, artifact_document, artifact_from
from coldsnap.core.messages import PackSource
from coldsnap.errors import (
    AcceptanceFailed,
    CriuError,
    OperationInterrupted,
    PayloadRejected,
    Refused,
    ResourceBusy,
)
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.outside import OutsideClient
from coldsnap.ops.preparing import PrepareResult, prepare
from coldsnap.ops.report import Advance
from coldsnap.ops.restore import restore
from coldsnap.testing.desk import EngineProcess
from coldsnap.testing.engine_harness import free_port

from .conftest import HOST, Shop  # isort: skip

UNSEEN = "a prompt that no capture saw"


def listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def prepare_only(shop: Shop, operation_id: str = "prepare-1", **changes: Any) -> PrepareResult:
    return prepare(shop.tools, shop.loaded, shop.request(operation_id, **changes))


class Order:
    """A reporter that writes phases into the same list as the unit driver's calls."""

    def __init__(self, calls: list[tuple[str, str]]) -> None:
        self.calls = calls

    @contextlib.contextmanager
    def phase(self, title: str, *, total_bytes: int | None = None) -> Iterator[Advance]:
        self.calls.append(("phase", title))
        yield lambda num_bytes, /: None

    def note(self, text: str) -> None:
        return

    def warn(self, text: str) -> None:
        return


def test_a_restore_serves_the_captured_answers(shop: Shop) -> None:
    result = shop.restore()
    assert (result.name, result.state, result.source, result.evicted) == ("svc", "ready", "native", False)
    assert listening(shop.port)
    prompts, expected = shop.loaded.acceptance()
    client = OutsideClient(host=HOST, port=shop.port)
    assert client.complete(prompts, timeout_s=60) == expected
    record = shop.tools.services.must_load("svc")
    assert (record.state, record.port, record.artifact_digest) == ("ready", shop.port, shop.loaded.digest)
    shop.kit.units.controller_dies()
    assert shop.kit.units.running() == ("u0",), "a released unit outlives its controller"


def test_phases_come_in_the_order_of_the_contract(shop: Shop) -> None:
    assert list(shop.restore().seconds) == [
        "gates",
        "unpack",
        "admit",
        "seed",
        "thaw",
        "hydrate",
        "accept",
        "serve",
        "release",
        "total",
    ]


def test_a_second_restore_believes_the_records(shop: Shop) -> None:
    assert not shop.restore("restore-1").prepared_from_record
    again = shop.restore("restore-2")
    assert again.prepared_from_record
    assert again.evicted


def test_prepare_touches_nothing_that_runs(shop: Shop) -> None:
    shop.restore()
    shop.kit.units.calls.clear()
    before = shop.tools.services.must_load("svc")
    first, second = prepare_only(shop, "prepare-1"), prepare_only(shop, "prepare-2")
    assert first.from_record
    assert second.from_record
    assert shop.kit.units.calls == []
    assert shop.tools.services.must_load("svc") == before
    assert listening(shop.port)


def test_prepare_does_not_look_at_the_port(shop: Shop) -> None:
    with socket.create_server((HOST, shop.port)):
        assert prepare_only(shop).source == "native"


def test_restore_prepares_before_it_evicts(shop: Shop) -> None:
    shop.restore("restore-1")
    calls: list[tuple[str, str]] = []
    old = shop.kit.program.started[-1]
    stop = old.stop

    def recorded() -> None:
        calls.append(("stop", "old"))
        stop()

    old.stop = recorded  # type: ignore[method-assign]
    shop.kit.units.calls = calls
    tools = replace(shop.tools, reporter=Order(calls))
    result = restore(tools, shop.loaded, shop.request("restore-2"), host=HOST, port=shop.port)
    assert result.evicted
    assert calls == [
        ("phase", "unpack capsule u0"),
        ("phase", "verify pack of w0"),
        ("stop", "old"),
        ("restore", "u0"),
    ]


@pytest.mark.parametrize("damage", ["pack", "capsule", "gate"])
def test_what_cannot_be_prepared_evicts_nobody(shop: Shop, damage: str) -> None:
    shop.restore("restore-1")
    before = shop.tools.services.must_load("svc")
    if damage == "pack":
        flip(shop.tools.store.path(shop.result.pack_digests[0]), 5000)
    elif damage == "capsule":
        prepared = shop.tools.state.prepared / shop.loaded.capsule_digest("u0").hex
        flip(next((prepared / "process").iterdir()), 0)  # so that it has to be unpacked again
        blobs = shop.tools.state.capsules / shop.loaded.capsule_digest("u0").hex / "blobs" / "sha256"
        largest = max(blobs.iterdir(), key=lambda blob: blob.stat().st_size)
        flip(largest, largest.stat().st_size // 2)
    else:
        shop.kit.failed["criu-process-tree"] = "gone"
    with pytest.raises(Refused if damage == "gate" else PayloadRejected):
        shop.restore("restore-2")
    assert shop.tools.services.must_load("svc") == before
    assert listening(shop.port)
    assert shop.kit.units.running() == ("u0",)


def leaves_nothing(shop: Shop, *, calls: int = 1) -> None:
    assert shop.kit.units.running() == ()
    assert shop.tools.services.names() == ()
    assert not listening(shop.port)
    assert list(shop.tools.state.staging.iterdir()) == []
    assert sum(verb == "restore" for verb, _ in shop.kit.units.calls) == calls
    with shop.tools.services.lock("svc"), shop.tools.state.not_in_use():
        pass


def test_a_tree_that_does_not_come_back_leaves_nothing(shop: Shop) -> None:
    shop.kit.units.fail_next("restore", CriuError("no", facts={"log": ["Error: x"]}))
    with pytest.raises(CriuError) as caught:
        shop.restore()
    leaves_nothing(shop)
    assert caught.value.__notes__ == ["forgot the unfinished service record"]
    shop.restore("restore-2")


def test_a_failed_restore_can_be_run_again_under_its_own_id(shop: Shop) -> None:
    shop.kit.units.fail_next("restore", CriuError("no"))
    with pytest.raises(CriuError):
        shop.restore("restore-1")
    assert shop.restore("restore-1").state == "ready"
    with pytest.raises(Refused, match="a success is final"):
        shop.restore("restore-1")
    assert listening(shop.port), "an operation that may not run evicts nobody"


def damage_next_wake(shop: Shop, damage: Callable[[EngineProcess], None]) -> None:
    thaw = shop.kit.program.thaw

    def damaged(*arguments: Any) -> EngineProcess:
        process = thaw(*arguments)
        damage(process)
        return process

    setattr(shop.kit.program, "thaw", damaged)  # noqa: B010 - a method of this one object


def test_memory_that_cannot_come_back_leaves_nothing(shop: Shop) -> None:
    def occupy(process: EngineProcess) -> None:
        process.memory.occupied.append((process.memory.allocations[0].ptr, 4096))

    damage_next_wake(shop, occupy)
    with pytest.raises(ResourceBusy, match="is taken by") as caught:
        shop.restore()
    leaves_nothing(shop)
    assert caught.value.__notes__ == ["stopped restored unit u0", "forgot the unfinished service record"]


def test_wrong_answers_are_never_served(shop: Shop) -> None:
    def forget_the_table(process: EngineProcess) -> None:
        process.engine._ranges.pop()

    damage_next_wake(shop, forget_the_table)
    with pytest.raises(AcceptanceFailed, match="prompt 0") as caught:
        shop.restore()
    leaves_nothing(shop)
    assert "stopped restored unit u0" in caught.value.__notes__
    assert caught.value.facts["expected_token_ids"] != caught.value.facts["given_token_ids"]


def test_an_engine_that_dies_on_the_way_is_told_from_one_that_fails(shop: Shop) -> None:
    def die(process: EngineProcess) -> None:
        process.stop()

    damage_next_wake(shop, die)
    with pytest.raises(Exception, match="the engine process of w0 ended during wake"):
        shop.restore()
    leaves_nothing(shop)


def test_a_port_taken_at_the_last_moment_leaves_nothing(shop: Shop) -> None:
    taken = socket.socket()

    def take(process: EngineProcess) -> None:
        taken.bind((HOST, shop.port))
        taken.listen()

    damage_next_wake(shop, take)
    with taken:
        with pytest.raises(ResourceBusy, match="cannot listen"):
            shop.restore()
        assert shop.kit.units.running() == ()
    leaves_nothing(shop)


def test_ctrl_c_undoes_everything_and_says_so(shop: Shop) -> None:
    def interrupt(process: EngineProcess) -> None:
        raise KeyboardInterrupt

    damage_next_wake(shop, interrupt)
    with pytest.raises(OperationInterrupted, match="restore was interrupted") as caught:
        shop.restore()
    assert "forgot the unfinished service record" in caught.value.__notes__
    shop.kit.units.end_all()
    leaves_nothing(shop)


def test_the_negative_control_is_detected_and_never_serves(shop: Shop) -> None:
    with pytest.raises(AcceptanceFailed, match="from token 0 on"):
        shop.restore(negative_control=True)
    leaves_nothing(shop)


def test_an_acceptance_that_cannot_tell_is_found_out_by_the_negative_control(shop: Shop) -> None:
    """Were answers the same without hydration, the control must say so instead of passing."""

    def ignore_memory(process: EngineProcess) -> None:
        process.engine._ranges.clear()

    damage_next_wake(shop, ignore_memory)
    loaded = _with_answers(shop, _blind_answers(shop))
    with pytest.raises(Exception, match="the negative control passed acceptance"):
        restore(shop.tools, loaded, shop.request(), host=HOST, port=shop.port, negative_control=True)
    leaves_nothing(shop)


def _blind_answers(shop: Shop) -> list[tuple[list[int], str]]:
    """What an engine says that looks at no byte of its model: its running checksum never moves."""
    answers = []
    for prompt in shop.loaded.acceptance()[0]:
        token = zlib.crc32(prompt.text.encode()) & 0xFF
        answers.append(([token] * prompt.max_tokens, f" {token:02x}" * prompt.max_tokens))
    return answers


def _with_answers(shop: Shop, answers: list[tuple[list[int], str]]) -> LoadedArtifact:
    document = artifact_document(shop.loaded.artifact)
    for binding in document["runtime"]["bindings"]:
        if binding["kind"] == "coldsnap-acceptance":
            for one, (tokens, text) in zip(binding["answers"], answers, strict=True):
                one |= {"token_ids": tokens, "text": text}
    document["acceptance"]["expected"] = answers[0][1]
    path = shop.loaded.path.with_name("changed.json")
    path.write_bytes(artifact_bytes(artifact_from(document)))
    return load_artifact(path)


def test_one_wrong_token_in_the_artifact_is_enough(shop: Shop) -> None:
    _, expected = shop.loaded.acceptance()
    answers = [(list(one.token_ids), one.text) for one in expected]
    answers[1][0][-1] ^= 1
    loaded = _with_answers(shop, answers)
    with pytest.raises(AcceptanceFailed, match=r"prompt 1 .* from token 7 on"):
        restore(shop.tools, loaded, shop.request(), host=HOST, port=shop.port)
    leaves_nothing(shop)


def test_an_artifact_without_answers_never_serves_nor_replaces_what_does(shop: Shop) -> None:
    shop.restore()
    document = artifact_document(shop.loaded.artifact)
    document["runtime"]["bindings"] = [
        one for one in document["runtime"]["bindings"] if one["kind"] != "coldsnap-acceptance"
    ]
    path = shop.loaded.path.with_name("changed.json")
    path.write_bytes(artifact_bytes(artifact_from(document)))
    with pytest.raises(Refused, match="no acceptance answers"):
        restore(shop.tools, load_artifact(path), shop.request("restore-2"), host=HOST, port=shop.port)
    assert shop.tools.services.must_load("svc").state == "ready"
    assert listening(shop.port)


def test_recovery_brings_the_same_answers(shop: Shop) -> None:
    shop.tools.store.path(shop.result.pack_digests[0]).unlink()
    result = shop.restore()
    assert result.source == "recovery"
    assert result.wake["w0"].source is PackSource.RECOVERY
    assert "packs are missing for worker/w0" in result.reason
    record = shop.tools.services.must_load("svc")
    assert (record.source, record.reasons) == ("recovery", (result.reason,))


def test_warm_stops_before_hydration_and_does_not_listen(shop: Shop) -> None:
    result = shop.restore(warm=True)
    assert (result.state, dict(result.wake)) == ("warm", {})
    assert not listening(shop.port)
    assert not shop.kit.program.started[-1].memory.mapped
    assert shop.tools.services.must_load("svc").state == "warm"


def test_two_services_side_by_side(shop: Shop) -> None:
    other = free_port()
    shop.restore("restore-1")
    shop.restore("restore-2", name="other", port=other)
    assert shop.tools.services.names() == ("other", "svc")
    assert listening(shop.port)
    assert listening(other)


def test_another_name_is_not_evicted_by_a_refusal(shop: Shop) -> None:
    shop.restore("restore-1")
    with pytest.raises(Refused, match="service svc"):
        shop.restore("restore-2", name="other")
    assert listening(shop.port)
    assert shop.tools.services.names() == ("svc",)


def test_a_restore_keeps_gc_from_what_it_uses(shop: Shop) -> None:
    shop.restore()
    digest = shop.loaded.digest
    lease = shop.tools.state.artifacts / f"{digest.hex}.json"
    assert json.loads(lease.read_bytes())["path"] == str(shop.loaded.path)
