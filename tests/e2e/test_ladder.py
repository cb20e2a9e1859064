"""The ladder with real process trees: overlays that really differ, packs rebuilt, cold starts held to the answers."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.messages import Answer
from coldsnap.errors import CriuError, PayloadRejected, Refused
from coldsnap.ops.live import stop_service
from coldsnap.ops.materialize import MaterializeResult, materialize, materialize_request
from coldsnap.ops.overlay import drop_overlay, overlay_path, read_overlay
from coldsnap.ops.quarantine import clear_artifact, failures_of
from coldsnap.ops.restore import RestoreResult
from coldsnap.ops.tidy import plan_tidy, run_tidy
from coldsnap.testing.stand import PATIENCE_S, UNSEEN, Stand, processes_of, wait_for
from coldsnap.testing.watched import Watched

pytestmark = pytest.mark.criu


@pytest.fixture(autouse=True)
def _as_it_was(stand: Stand) -> Iterator[None]:
    """Each test begins without an overlay or failures, with the pack in the store, and leaves the machine so."""
    pack = stand.pack
    kept = stand.folder / "kept.pack"
    if not kept.exists():
        shutil.copyfile(pack, kept)
    tools = stand.tools
    yield
    stand.tools = tools
    stand.stop_all()
    drop_overlay(tools, stand.loaded.digest)
    clear_artifact(tools, stand.loaded.digest)
    if not pack.exists():
        shutil.copyfile(kept, pack)
        pack.chmod(0o400)


def make(stand: Stand, operation_id: str, *, overlay: bool = False) -> MaterializeResult:
    return materialize(
        stand.tools, stand.loaded, materialize_request(stand.loaded, operation_id=operation_id), overlay=overlay
    )


def steps(result: RestoreResult) -> list[tuple[str, str]]:
    return [(step.rung.value, step.outcome.value) for step in result.ladder]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def test_a_deleted_pack_is_recovered_rebuilt_and_used_again(stand: Stand, expected: tuple[Answer, ...]) -> None:
    before = stand.pack.read_bytes()
    stand.pack.unlink()
    recovered = stand.restore("rebuild-1")
    assert (recovered.source, stand.ask(UNSEEN)) == ("recovery", expected)
    result = make(stand, "rebuild-2")
    assert [one.outcome for one in result.packs] == ["written"]
    assert stand.pack.read_bytes() == before
    stand.assert_nothing_left(but_for=["svc"])
    assert stand.ask(UNSEEN) == expected, "the service of before is untouched"
    native = stand.restore("rebuild-3")
    assert (native.source, stand.ask(UNSEEN)) == ("native", expected)


def test_an_overlay_that_differs_is_used_until_the_driver_version_changes(
    stand: Stand, expected: tuple[Answer, ...]
) -> None:
    result = make(stand, "overlay-1", overlay=True)
    stand.assert_nothing_left()
    assert result.overlay is not None
    assert result.overlay.outcome == "made"
    overlay = read_overlay(stand.tools, stand.loaded.digest)
    portable = stand.loaded.capsule_digest("u0")
    assert overlay.artifact.capsule.images[0].digest != portable
    first = stand.restore("overlay-2")
    assert (steps(first), stand.ask(UNSEEN)) == ([("overlay", "used")], expected)
    stop_service(stand.tools, "svc")
    facts = stand.tools.host_facts()
    stand.tools = replace(stand.tools, host_facts=lambda: replace(facts, criu_version="99.0"))
    second = stand.restore("overlay-3")
    assert (steps(second), stand.ask(UNSEEN)) == ([("overlay", "skipped"), ("native", "used")], expected)
    assert "target.machines[0].criu: was another when the overlay was made" in second.ladder[0].reason
    receipt = json.loads((stand.tools.state.receipts / "overlay-3.json").read_bytes())
    assert receipt["result"]["ladder"][0] == second.ladder[0].document()


@pytest.mark.parametrize("what", ["descriptor", "capsule"])
def test_an_overlay_with_a_damaged_file_steps_down(stand: Stand, expected: tuple[Answer, ...], what: str) -> None:
    make(stand, f"damaged-{what}-1", overlay=True)
    capsule = read_overlay(stand.tools, stand.loaded.digest).artifact.capsule.images[0].digest.hex
    if what == "descriptor":
        damage(overlay_path(stand.tools, stand.loaded.digest))
    else:
        blobs = stand.tools.state.capsules / capsule / "blobs" / "sha256"
        damage(max(blobs.iterdir(), key=lambda blob: blob.stat().st_size))
        shutil.rmtree(stand.tools.state.prepared / capsule, ignore_errors=True)
    result = stand.restore(f"damaged-{what}-2")
    outcome = "skipped" if what == "descriptor" else "failed"
    assert (steps(result), stand.ask(UNSEEN)) == ([("overlay", outcome), ("native", "used")], expected)
    step = result.ladder[0]
    if what == "descriptor":
        assert step.reason.startswith("it is damaged: ")
    else:
        assert (step.error, result.reason) == ("PayloadRejected", f"overlay failed: {step.reason}")
    assert failures_of(stand.tools, stand.loaded.digest) is None
    stand.assert_nothing_left(but_for=["svc"])


def test_a_service_from_an_overlay_sleeps_and_wakes(stand: Stand, expected: tuple[Answer, ...]) -> None:
    make(stand, "asleep-1", overlay=True)
    stand.restore("asleep-2")
    stand.sleep("asleep-3")
    stand.wake("asleep-4")
    assert stand.ask(UNSEEN) == expected


class NoTreeComesBack:
    """A unit driver whose CRIU has become unable to restore."""

    def __init__(self, units: Any) -> None:
        self._units = units

    def __getattr__(self, name: str) -> Any:
        return getattr(self._units, name)

    def restore(self, *arguments: Any, **keywords: Any) -> Any:
        raise CriuError("it does not come back")


def test_a_cold_start_serves_the_same_answers_and_only_where_the_recipe_allows(
    stand: Stand, expected: tuple[Answer, ...]
) -> None:
    stand.tools = replace(stand.tools, units=NoTreeComesBack(stand.tools.units))
    with pytest.raises(CriuError):
        stand.restore("cold-1")
    stand.assert_nothing_left()

    def allow(document: Any) -> None:
        document["runtime"]["bindings"].append({"kind": "coldsnap-fallback", "cold_start": True})

    allowed = stand.rewritten("cold.json", allow)
    result = stand.restore("cold-2", allowed)
    assert steps(result) == [("native", "failed"), ("recovery", "skipped"), ("cold", "used")]
    assert (result.source, stand.ask(UNSEEN)) == ("cold", expected)
    stand.assert_nothing_left(but_for=["svc"])
    stop_service(stand.tools, "svc")
    clear_artifact(stand.tools, allowed.digest)


def test_two_failures_quarantine_and_clearing_lets_it_serve_again(stand: Stand, expected: tuple[Answer, ...]) -> None:
    real = stand.tools
    stand.tools = replace(real, units=NoTreeComesBack(real.units))
    for index in range(2):
        with pytest.raises(CriuError):
            stand.restore(f"quarantine-{index}")
    stand.tools = real
    with pytest.raises(Refused, match="failed 2 times here"):
        stand.restore("quarantine-2")
    with stand.cli("clear-quarantine", stand.loaded.path, "--json") as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert json.loads(out)["cleared"] == [str(stand.loaded.digest)]
    assert stand.restore("quarantine-3").source == "native"
    assert stand.ask(UNSEEN) == expected


def test_a_damaged_pack_is_an_error_and_then_missing(stand: Stand, expected: tuple[Answer, ...]) -> None:
    damage(stand.pack)
    with pytest.raises(PayloadRejected):
        stand.restore("wrong-1")
    stand.assert_nothing_left()
    assert stand.restore("wrong-2").source == "recovery"
    assert stand.ask(UNSEEN) == expected


def test_materialize_by_command_with_an_overlay(stand: Stand, expected: tuple[Answer, ...]) -> None:
    stand.pack.unlink()
    with stand.cli("materialize", stand.loaded.path, "--dry-run", "--json") as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert json.loads(out)["temporary_restore"] == "recovery"
    assert not stand.pack.exists()
    with stand.cli("materialize", stand.loaded.path, "--overlay", "--json") as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    document = json.loads(out)
    assert [one["outcome"] for one in document["packs"]] == ["written"]
    assert document["overlay"]["outcome"] == "made"
    stand.assert_nothing_left()
    assert steps(stand.restore("command-1")) == [("overlay", "used")]
    assert stand.ask(UNSEEN) == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_materialize_leaves_no_tree(stand: Stand, folder: Path, number: signal.Signals) -> None:
    stand.pack.unlink()
    with Watched(stand, folder, "materialize", stand.loaded.path) as watched:
        watched.until("hydrate")
        assert _trees(stand), "there is a temporary tree"
        watched.end(number)
    wait_for("the tree to be gone", lambda: not _trees(stand))
    if number is not signal.SIGKILL:
        stand.assert_nothing_left()
        return
    assert stand.tools.services.names() == ()
    make(stand, "again")  # a rerun succeeds, and the scratch folder of the killed one is gc's
    run_tidy(stand.tools, plan_tidy(stand.tools))
    stand.assert_nothing_left()


def _trees(stand: Stand) -> list[str]:
    return [line for line in processes_of(stand.folder).values() if "engine_main" in line]
