"""Every refusal around providers, the ladder, materialization and overlays says what field, what value, and what to do.

Each case brings one refusal about, by the verb that a user would call, and names the field it must be about. A refusal
is either a list of problems, or one error whose message holds the value and which carries its cure.
"""

from __future__ import annotations

import ast
import contextlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coldsnap import errors
from coldsnap.capsule.driver import UnitSpec
from coldsnap.core.artifact import artifact_bytes, artifact_document, artifact_from
from coldsnap.core.request import request_document, request_from
from coldsnap.errors import (
    ColdsnapError,
    CriuError,
    InternalError,
    InvalidDocument,
    OperationInterrupted,
    PayloadRejected,
    Problem,
    Refused,
)
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.live import sleep_service, wake_service
from coldsnap.ops.materialize import materialize, materialize_request
from coldsnap.ops.overlay import find_overlay, overlay_path
from coldsnap.ops.restore import restore
from coldsnap.testing.desk import EngineProcess
from coldsnap.testing.engine import FakePlugin

from .conftest import HOST, Shop  # isort: skip


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def with_weights(shop: Shop, change: Callable[[dict[str, Any]], None]) -> Any:
    document = request_document(shop.request("refused-1"))
    change(document["policy"]["weights"])
    return request_from(document)


def run(shop: Shop, request: Any, **changes: Any) -> None:
    restore(shop.tools, shop.loaded, request, host=HOST, port=shop.port, **changes)


def rewritten(shop: Shop, change: Callable[[dict[str, Any]], None]) -> Shop:
    document = artifact_document(shop.loaded.artifact)
    change(document)
    path = shop.loaded.path.with_name("changed.json")
    path.write_bytes(artifact_bytes(artifact_from(document)))
    return replace(shop, loaded=load_artifact(path))


def staged(shop: Shop, **changes: Any) -> None:
    path = shop.loaded.path.with_name("staged.bin")
    shutil.copyfile(shop.pack, path)
    pack = next(iter(shop.loaded.packs().values()))
    entry = {"worker": "w0", "path": str(path), "bytes": pack.bytes, "sha256": str(pack.sha256), **changes}
    run(shop, with_weights(shop, lambda weights: weights["native"].update(staged=[entry])))


def staged_without_packs(shop: Shop) -> None:
    pack = next(iter(shop.loaded.packs().values()))
    entry = {"worker": "w0", "path": str(shop.pack), "bytes": pack.bytes, "sha256": str(pack.sha256)}
    other = rewritten(shop, without_packs)
    run(other, with_weights(other, lambda weights: weights["native"].update(staged=[entry])))


def without_packs(document: dict[str, Any]) -> None:
    del document["weights"]["model_payloads"], document["weights"]["native"]


def staged_damaged(shop: Shop) -> None:
    path = shop.loaded.path.with_name("staged.bin")
    shutil.copyfile(shop.pack, path)
    damage(path)
    pack = next(iter(shop.loaded.packs().values()))
    entry = {"worker": "w0", "path": str(path), "bytes": pack.bytes, "sha256": str(pack.sha256)}
    run(shop, with_weights(shop, lambda weights: weights["native"].update(staged=[entry])))


def native_without_packs_here(shop: Shop) -> None:
    shop.pack.unlink()
    shop.restore("refused-1", weights="native")


def native_without_packs_at_all(shop: Shop) -> None:
    other = rewritten(shop, without_packs)
    run(other, other.request("refused-1", weights="native"))


def recovery_off(shop: Shop) -> None:
    shop.pack.unlink()
    run(shop, with_weights(shop, lambda weights: weights.update(recovery={"enabled": False})))


def mode_recovery_and_off(shop: Shop) -> None:
    with_weights(shop, lambda weights: weights.update(mode="recovery", recovery={"enabled": False}))


def unknown_mode(shop: Shop) -> None:
    shop.request("refused-1", weights="magic")


def damaged_pack(shop: Shop) -> None:
    damage(shop.pack)
    shop.restore("refused-1")


def linked_pack(shop: Shop) -> None:
    real = shop.loaded.path.with_name("real.pack")
    shop.pack.rename(real)
    shop.pack.symlink_to(real)
    shop.restore("refused-1")


def quarantined(shop: Shop) -> None:
    for index in range(2):
        shop.kit.units.fail_next("restore", CriuError("no"))
        with contextlib.suppress(CriuError):
            shop.restore(f"failed-{index}")
    shop.restore("refused-1")


def unreadable_failures(shop: Shop) -> None:
    path = shop.tools.state.failures / f"{shop.loaded.digest.hex}.json"
    path.write_bytes(b'{"format": 7}\n')
    path.chmod(0o600)
    shop.restore("refused-1")


class NoWriter(FakePlugin):
    """An engine whose integration has no writer of packs."""

    supports = replace(FakePlugin.supports, materialize=frozenset({"off"}))


def without_writer(shop: Shop) -> Shop:
    return replace(shop, kit=replace(shop.kit, tools=replace(shop.tools, engines={FakePlugin.name: NoWriter()})))


def restore_materializing_without_writer(shop: Shop) -> None:
    without_writer(shop).restore("refused-1", materialize="required")


def run_materialize(shop: Shop, *, overlay: bool = False, operation_id: str = "refused-1") -> None:
    request = materialize_request(shop.loaded, operation_id=operation_id)
    materialize(shop.tools, shop.loaded, request, overlay=overlay)


def materialize_without_writer(shop: Shop) -> None:
    shop.pack.unlink()
    run_materialize(without_writer(shop))


def materialize_without_packs(shop: Shop) -> None:
    run_materialize(rewritten(shop, without_packs))


def from_a_twin(shop: Shop, change: Callable[[Path], None]) -> Shop:
    """An artifact whose checkpoint is a changed copy of its own, which all tests share."""
    shop.pack.unlink()
    folder = Path(shop.loaded.artifact.launch.units[0].command[4])
    twin = shutil.copytree(folder, shop.loaded.path.with_name("twin"))
    change(twin)

    def move(document: dict[str, Any]) -> None:
        command = document["launch"]["units"][0]["command"]
        command[command.index("--model") + 1] = str(twin)

    return rewritten(shop, move)


def fine_tune(twin: Path) -> None:
    file = min(twin.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")


LAST = "1 tensor: layers.1 (model-00001-of-00002.safetensors)"


def lose_a_file(twin: Path) -> None:
    min(twin.glob("*.safetensors")).unlink()


def rename_a_tensor(twin: Path) -> None:
    file = min(twin.glob("*.safetensors"))
    data = file.read_bytes()
    assert data.count(b'"embed"') == 1
    file.write_bytes(data.replace(b'"embed"', b'"demeb"'))


def materialize_with_a_full_disk(shop: Shop) -> None:
    shop.pack.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "coldsnap.ops.materialize.shutil.disk_usage", lambda path: SimpleNamespace(total=9, used=9, free=4097)
        )
        run_materialize(shop)


def cold_start_not_allowed(shop: Shop) -> None:
    """No rung is open: the tree is not here, and the recipe has no other way."""
    for folder in ("capsules", "prepared"):
        for path in (shop.tools.state.path / folder).iterdir():
            shutil.rmtree(path)
    shop.restore("refused-1")


def nothing_left_below(shop: Shop) -> None:
    """The overlay fails, the artifact fails, and nothing more is allowed."""
    make_overlay(shop)
    for _ in range(2):
        shop.kit.units.fail_next("restore", CriuError("no", cure="see the log", facts={"log": []}))
    shop.restore("refused-1")


def wake_of_a_lost_service(shop: Shop) -> None:
    shop.restore("restore-1")
    shop.kit.units.end_all()
    wake_service(shop.tools, shop.live("wake"))


def overlay_in_use(shop: Shop) -> None:
    make_overlay(shop)
    shop.restore("restore-1")
    run_materialize(shop, overlay=True)


def make_overlay(shop: Shop) -> None:
    """Two freezes of a real tree differ; here the second one is made to."""
    with pytest.MonkeyPatch.context() as patch:
        freeze = EngineProcess.freeze
        patch.setattr(EngineProcess, "freeze", lambda process: freeze(process) + b" ")
        run_materialize(shop, overlay=True, operation_id="overlay-1")
    assert overlay_path(shop.tools, shop.loaded.digest).is_file()


def overlay_of_other_packs(shop: Shop) -> None:
    thaw = shop.kit.program.thaw

    def another(spec: UnitSpec, run_dir: Path, frozen: bytes) -> EngineProcess:
        process = thaw(spec, run_dir, frozen)
        process.inner._observer._writes.pop()
        return process

    shop.kit.program.thaw = another  # type: ignore[method-assign]
    run_materialize(shop, overlay=True)


def sleep_of_a_cold_service(shop: Shop) -> None:
    allowed = rewritten(
        shop, lambda document: document["runtime"]["bindings"].append({"kind": "coldsnap-fallback", "cold_start": True})
    )
    shop.kit.units.fail_next("restore", CriuError("no"))
    assert allowed.restore("cold-1").source == "cold"
    sleep_service(shop.tools, shop.live("sleep"))


def wake_without_its_overlay(shop: Shop) -> None:
    make_overlay(shop)
    shop.restore("restore-1")
    sleep_service(shop.tools, shop.live("sleep"))
    overlay_path(shop.tools, shop.loaded.digest).unlink()
    wake_service(shop.tools, shop.live("wake"))


# name -> (what brings it about, the field or thing it must name, what its value must show)
CASES: Mapping[str, tuple[Callable[[Shop], object], str, str]] = {
    "a staged pack of another digest": (
        lambda shop: staged(shop, sha256=f"sha256:{'a' * 64}"),
        "policy.weights.native.staged[0].sha256",
        "aaaa",
    ),
    "a staged pack of another size": (
        lambda shop: staged(shop, bytes=4096),
        "policy.weights.native.staged[0].bytes",
        "4096",
    ),
    "a staged pack that is not there": (lambda shop: staged(shop, path="/nowhere/pack"), "worker/w0", "w0"),
    "a staged pack that the artifact does not name": (
        staged_without_packs,
        "policy.weights.native.staged[0].worker",
        "w0",
    ),
    "a staged pack of other bytes": (staged_damaged, "staged.bin", "sha256:"),
    "native without the packs": (native_without_packs_here, "policy.weights.mode", "native"),
    "native of an artifact without packs": (native_without_packs_at_all, "policy.weights.mode", "native"),
    "recovery switched off": (recovery_off, "policy.weights.recovery.enabled", "false"),
    "mode recovery with recovery off": (mode_recovery_and_off, "policy.weights.recovery.enabled", "false"),
    "an unknown mode": (unknown_mode, "policy.weights.mode", "magic"),
    "a damaged pack": (damaged_pack, ".pack", "sha256:"),
    "a link in place of a pack": (linked_pack, ".pack", ".pack"),
    "an artifact in quarantine": (quarantined, "quarantine", "sha256:"),
    "an unreadable record of failures": (unreadable_failures, "quarantine", "failures/"),
    "materializing without a writer": (
        restore_materializing_without_writer,
        "policy.weights.native.materialize",
        "required",
    ),
    "materialize without a writer": (materialize_without_writer, "policy.weights.native.materialize", "required"),
    "materialize without packs": (materialize_without_packs, "weights.model_payloads", "none"),
    "async without a writer": (
        lambda shop: without_writer(shop).restore("refused-1", materialize="async"),
        "policy.weights.native.materialize",
        "async",
    ),
    "materialize from a fine-tuned twin": (lambda shop: run_materialize(from_a_twin(shop, fine_tune)), LAST, "twin"),
    "recovery from a fine-tuned twin": (
        lambda shop: from_a_twin(shop, fine_tune).restore("refused-1", weights="recovery"),
        LAST,
        "twin",
    ),
    "recovery without a file": (
        lambda shop: from_a_twin(shop, lose_a_file).restore("refused-1"),
        "model-00001-of-00002.safetensors is missing",
        "twin",
    ),
    "recovery from another header": (
        lambda shop: from_a_twin(shop, rename_a_tensor).restore("refused-1"),
        "model-00001-of-00002.safetensors: embed is missing",
        "sha256:",
    ),
    "materialize on a full disk": (materialize_with_a_full_disk, "space", "4097"),
    "no way up at all": (cold_start_not_allowed, "capsule.images[u0]", "sha256:"),
    "no way down after two failures": (nothing_left_below, "no", "the recipe does not allow a cold start"),
    "wake of a service whose process is gone": (wake_of_a_lost_service, "service 'svc'", "u0"),
    "an overlay that a service runs from": (overlay_in_use, "overlay", "svc"),
    "an overlay with other packs": (overlay_of_other_packs, "w0", "sha256:"),
    "sleep of a service that started cold": (sleep_of_a_cold_service, "service", "svc"),
    "wake without the overlay it came from": (wake_without_its_overlay, "overlay", "sha256:"),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_refusal_names_field_value_and_way_out(shop: Shop, name: str) -> None:
    act, field, value = CASES[name]
    with pytest.raises(ColdsnapError) as caught:
        act(shop)
    error = caught.value
    if isinstance(error, Refused | InvalidDocument):
        assert error.problems
        for problem in error.problems:
            assert problem.field
            assert problem.message
            assert problem.value, str(problem)
            assert problem.cure, str(problem)
        named = [one for one in error.problems if field in one.field]
        assert named, str(error)
        assert any(value in f"{one.value} {one.message}" for one in named), str(error)
    else:
        assert field in error.message
        assert value in f"{error.message} {error.facts}"
        assert error.cure
        assert error.facts
    if isinstance(error, PayloadRejected):
        assert error.reason in ("size_mismatch", "digest_mismatch", "unusable_path")
    shop.kit.units.end_all()


OF_THE_ISSUE = {
    "core": ("ladder", "overlay", "quarantine", "replay", "selection"),
    "engines": ("materialize", "recovery"),
    "ops": (
        *("checkpoints", "covers", "diff", "distrust", "explain", "ladder", "live", "materialize", "overlay"),
        *("overlaying", "predict", "providers", "quarantine", "restore", "rungs", "temporary", "tidy", "usage"),
        "verify",
    ),
}
"""Where providers, the ladder, materialization, overlays and the offline tools are."""


@pytest.mark.parametrize("module", [f"{room}/{name}" for room, names in OF_THE_ISSUE.items() for name in names])
def test_no_refusal_is_written_without_its_way_out(module: str) -> None:
    """The cases above are those that somebody thought of. This reads the rest: each problem has a field, a value (None
    where there is nothing to show) and a cure; each other error has a cure, and its values as facts."""
    path = Path(errors.__file__).parent / f"{module}.py"
    lacking = []
    for call in ast.walk(ast.parse(path.read_text())):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        given = {keyword.arg for keyword in call.keywords}
        made = getattr(errors, call.func.id, None)
        if made is Problem:
            wanted = {"field", "message", "value", "cure"}
        elif made in (Refused, InvalidDocument, OperationInterrupted, InternalError) or not isinstance(made, type):
            continue  # a list of problems, a stop that somebody asked for, a bug
        else:
            wanted = {"cure", "facts"}
        lacking += [f"{path.name}:{call.lineno}: {call.func.id} without {one}" for one in sorted(wanted - given)]
    assert lacking == []


def test_what_is_left_aside_says_it_too(shop: Shop) -> None:
    """A stale overlay is no refusal, but its reason is one: field, value, way out."""
    make_overlay(shop)
    shop.kit.facts.append(replace(shop.kit.facts[-1], kernel="9.9.9"))
    found = find_overlay(shop.tools, shop.loaded, shop.request())
    assert found is not None
    assert "target.machines[0].kernel" in found.reason
    assert '(got "6.1.0")' in found.reason
    assert "9.9.9 now; the portable artifact is used; `coldsnap materialize --overlay`" in found.reason
