"""The ladder on the command line: weights modes, what is shown of each step, quarantine, materialize and overlays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coldsnap.core.canonical import canonical_json
from coldsnap.errors import CriuError
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.testing.desk import Desk, EngineProcess
from coldsnap.testing.engine_harness import free_port

from .conftest import Coldsnap  # isort: skip


@pytest.fixture
def loaded(artifact: Path) -> LoadedArtifact:
    return load_artifact(artifact)


def pack_of(kit: Desk, loaded: LoadedArtifact) -> Path:
    return kit.tools.store.path(next(iter(loaded.packs().values())).sha256)


@pytest.mark.parametrize(
    ("mode", "with_pack", "without"),
    [
        ("auto", "native", "recovery"),
        ("native", "native", None),
        ("recovery", "recovery", "recovery"),
        ("cache-only-auto", "native", "recovery"),
    ],
)
def test_weights_modes(
    coldsnap: Coldsnap, kit: Desk, loaded: LoadedArtifact, mode: str, with_pack: str, without: str | None
) -> None:
    restore = ("restore", loaded.path, "--weights", mode, "--json")
    assert coldsnap(*restore).said["source"] == with_pack
    pack_of(kit, loaded).unlink()
    ran = coldsnap(*restore)
    if without is None:
        assert ran.code == 3
        (problem,) = ran.said["problems"]
        assert (problem["field"], problem["value"]) == ("policy.weights.mode", "native")
    else:
        assert ran.said["source"] == without


def test_a_mode_that_does_not_exist(coldsnap: Coldsnap, kit: Desk, loaded: LoadedArtifact) -> None:
    ran = coldsnap("restore", loaded.path, "--weights", "magic", "--json")
    assert ran.code == 2
    assert "policy.weights.mode" in ran.out


def test_every_step_is_shown(coldsnap: Coldsnap, kit: Desk, loaded: LoadedArtifact) -> None:
    pack_of(kit, loaded).unlink()
    ran = coldsnap("restore", loaded.path)
    assert "native skipped: packs are missing for worker/w0" in ran.out
    assert "recovery used: packs are missing for worker/w0" in ran.out
    status = coldsnap("status")
    assert "svc: packs are missing for worker/w0" in status.out
    said = coldsnap("status", "--json").said
    assert [one["rung"] for one in said["services"]] == ["recovery"]
    assert said["quarantined"] == []


def test_a_cold_start_is_called_one(coldsnap: Coldsnap, kit: Desk, recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(recipe.read_text() + "cold_start: true\n")
    path = tmp_path / "cold.json"
    assert coldsnap("capture", recipe, "-o", path, "--quiet").code == 0
    kit.units.fail_next("restore", CriuError("no"))
    ran = coldsnap("restore", path)
    assert ran.code == 0, ran.err
    assert "native failed: no" in ran.out
    assert "recovery skipped: it would not help against the artifact's process tree" in ran.out
    assert "started cold" in ran.out.splitlines()[-1]
    ran = coldsnap("sleep", "svc", "--json")
    assert ran.code == 2
    assert "started cold" in ran.said["message"]


def test_quarantine_from_the_second_failure_until_it_is_cleared(
    coldsnap: Coldsnap, kit: Desk, loaded: LoadedArtifact
) -> None:
    for _ in range(2):
        kit.units.fail_next("restore", CriuError("no"))
        ran = coldsnap("restore", loaded.path, "--json")
        assert (ran.code, [one["outcome"] for one in ran.said["facts"]["ladder"]]) == (
            6,
            ["failed", "skipped", "skipped"],
        )
    assert "in quarantine now" in ran.out
    ran = coldsnap("restore", loaded.path, "--json")
    assert (ran.code, ran.said["facts"]["gates"]) == (3, ["quarantine"])
    assert "in quarantine: " in coldsnap("status").out
    (record,) = coldsnap("status", "--json").said["quarantined"]
    assert (record["artifact"], record["path"]) == (str(loaded.digest), str(loaded.path))
    explained = coldsnap("explain", loaded.path)
    assert explained.code == 3
    assert "failed 2 times here" in explained.out
    assert "coldsnap clear-quarantine" in explained.out
    said = coldsnap("clear-quarantine", loaded.path, "--json").said
    assert said == {"artifact": str(loaded.digest), "cleared": [str(loaded.digest)]}
    assert "had no failures" in coldsnap("clear-quarantine", loaded.digest).out
    assert coldsnap("restore", loaded.path).code == 0


def test_ignoring_the_quarantine_clears_it(coldsnap: Coldsnap, kit: Desk, loaded: LoadedArtifact) -> None:
    for _ in range(2):
        kit.units.fail_next("restore", CriuError("no"))
        coldsnap("restore", loaded.path)
    assert coldsnap("restore", loaded.path, "--ignore-quarantine").code == 0
    assert coldsnap("restore", loaded.path).code == 0


def test_materialize(coldsnap: Coldsnap, kit: Desk, loaded: LoadedArtifact) -> None:
    pack = pack_of(kit, loaded)
    before = pack.read_bytes()
    assert "already here" in coldsnap("materialize", loaded.path).out
    pack.unlink()
    dry = coldsnap("materialize", loaded.path, "--dry-run", "--json").said
    assert (dry["dry_run"], dry["bytes"], dry["temporary_restore"]) == (True, len(before), "recovery")
    assert "to be written" in coldsnap("materialize", loaded.path, "--dry-run").out
    assert not pack.exists()
    said = coldsnap("materialize", loaded.path, "--json").said
    assert [one["outcome"] for one in said["packs"]] == ["written"]
    assert pack.read_bytes() == before
    assert coldsnap("status", "--json").said["services"] == []


@pytest.fixture
def frozen_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real tree that was frozen twice has two images; so has the fake one here."""
    freeze = EngineProcess.freeze
    count = iter(range(100))
    monkeypatch.setattr(EngineProcess, "freeze", lambda process: freeze(process) + b" " * next(count))


@pytest.mark.usefixtures("frozen_twice")
@pytest.mark.parametrize("by", ["materialize", "restore"])
def test_an_overlay_is_made_shown_and_used(coldsnap: Coldsnap, kit: Desk, loaded: LoadedArtifact, by: str) -> None:
    if by == "materialize":
        ran = coldsnap("materialize", loaded.path, "--overlay")
    else:
        ran = coldsnap("restore", loaded.path, "--target-local")
    assert ran.code == 0, ran.err
    assert "overlay made: its capsule differs from the portable one" in ran.out
    assert coldsnap("explain", loaded.path, "--json").said["by"] == "overlay"
    said = coldsnap("restore", loaded.path, "--json").said
    assert (said["rung"], [one["outcome"] for one in said["ladder"]]) == ("overlay", ["used"])
    assert coldsnap("status", "--json").said["services"][0]["rung"] == "overlay"
    overlay = kit.tools.state.overlays / f"{loaded.digest.hex}.json"
    document = json.loads(overlay.read_bytes())
    document["target"]["machines"][0]["kernel"] = "0.1"
    overlay.write_bytes(canonical_json(document))
    ran = coldsnap("restore", loaded.path)
    assert "overlay skipped: it is stale: target.machines[0].kernel" in ran.out
    assert "native used" in ran.out


def test_a_request_takes_no_target_local(coldsnap: Coldsnap, kit: Desk, loaded: LoadedArtifact, tmp_path: Path) -> None:
    dry = coldsnap("restore", loaded.path, "--dry-run", "--port", free_port())
    request = tmp_path / "request.json"
    request.write_text(dry.out)
    ran = coldsnap("restore", "--request-json", request, "--target-local", "--json")
    assert ran.code == 2
    assert "--target-local" in ran.said["message"]
    assert coldsnap("restore", "--request-json", request).code == 0
