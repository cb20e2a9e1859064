"""Capture: the artifact is committed last, whatever fails before leaves nothing that counts, and shared packs are
written once."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coldsnap.capsule.hygiene import HygieneReport
from coldsnap.core.artifact import artifact_digest
from coldsnap.core.bindings import HygieneFinding, Severity, hygiene_of, process_images_of, worker_exports_of
from coldsnap.core.receipt import MAX_RECEIPT_BYTES, parse_receipt
from coldsnap.core.request import request_document, request_from, request_sha256
from coldsnap.errors import ColdsnapError, CriuError, EngineError, OperationInterrupted, Refused
from coldsnap.ops import capture as capture_module
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.capture import CaptureResult, capture
from coldsnap.ops.freezers import acts as acts_module
from coldsnap.ops.inspection import inspect_unit, refuse_unless_clean
from coldsnap.store.documents import read_private
from coldsnap.testing.checkpoint import DEFAULT_TENSORS, write_checkpoint
from coldsnap.testing.desk import Desk, EngineProcess, plan


def run(kit: Desk, model: Path, output: Path, **changes: Any) -> CaptureResult:
    planned = plan(model, output, **changes)
    return capture(kit.tools, planned.request, planned.model)


def test_the_artifact_says_what_was_captured(kit: Desk, model: Path, tmp_path: Path) -> None:
    planned = plan(model, tmp_path / "a.json")
    result = capture(kit.tools, planned.request, planned.model)
    loaded = load_artifact(tmp_path / "a.json")
    artifact = loaded.artifact
    assert loaded.digest == result.artifact_digest == artifact_digest(result.artifact)
    assert (artifact.capture_id, artifact.request_sha256) == ("capture-1", request_sha256(planned.request))
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o600
    model_bytes = sum(DEFAULT_TENSORS.values())
    (export,) = worker_exports_of(artifact.runtime.bindings)
    assert export.model_bytes == model_bytes
    assert export.num_model_extents == sum(size > 0 for size in DEFAULT_TENSORS.values())
    assert result.residual_bytes == export.residual_bytes == sum(export.residual_reasons.values())
    assert result.pack_bytes == sum(-(-size // 4096) * 4096 for size in DEFAULT_TENSORS.values())
    (images,) = process_images_of(artifact.runtime.bindings)
    assert result.image_bytes == sum(file.bytes for file in images.files)
    assert result.answers == loaded.acceptance()[1]


def test_the_process_is_gone_and_nothing_is_staged(kit: Desk, model: Path, tmp_path: Path) -> None:
    run(kit, model, tmp_path / "a.json")
    assert kit.units.running() == ()
    assert list(kit.tools.state.staging.iterdir()) == []
    assert kit.tools.services.names() == ()


def test_the_tree_is_asleep_when_it_is_frozen(kit: Desk, model: Path, tmp_path: Path) -> None:
    run(kit, model, tmp_path / "a.json")
    assert [verb for verb, _ in kit.units.calls] == ["launch", "dump"]
    assert kit.program.started[0].worker.state.value == "asleep"


def test_two_captures_share_a_pack_whatever_the_order_and_addresses(kit: Desk, model: Path, tmp_path: Path) -> None:
    first = run(kit, model, tmp_path / "a.json", operation_id="capture-1")
    second = run(
        kit,
        model,
        tmp_path / "b.json",
        operation_id="capture-2",
        serve={"shuffle": 11, "arena_base": 0x2000_0000},
    )
    assert first.pack_digests == second.pack_digests
    assert (first.pack_shared, second.pack_shared) == (False, True)
    assert first.answers == second.answers
    assert len(list(kit.tools.state.payloads.glob("*.pack"))) == 1


def test_another_model_makes_another_pack(kit: Desk, model: Path, tmp_path: Path) -> None:
    first = run(kit, model, tmp_path / "a.json", operation_id="capture-1")
    other = write_checkpoint(tmp_path / "other", seed=5)
    second = run(kit, other, tmp_path / "b.json", operation_id="capture-2")
    assert set(first.pack_digests).isdisjoint(second.pack_digests)
    assert not second.pack_shared


def test_an_output_that_appears_meanwhile_is_not_overwritten(
    kit: Desk, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "a.json"
    dump = kit.units.dump

    def meanwhile(*arguments: Any, **keywords: Any) -> Any:
        output.write_text("somebody else's")
        return dump(*arguments, **keywords)

    monkeypatch.setattr(kit.units, "dump", meanwhile)
    with pytest.raises(ColdsnapError, match="exists"):
        run(kit, model, output)
    assert output.read_text() == "somebody else's"
    committed_nothing(kit, output=None)


def committed_nothing(kit: Desk, output: Path | None) -> None:
    assert kit.units.running() == ()
    assert list(kit.tools.state.staging.iterdir()) == []
    assert list(kit.tools.state.artifacts.iterdir()) == []
    assert output is None or not os.path.lexists(output)
    with kit.tools.state.not_in_use():
        pass


FAILURES: dict[str, Callable[[Desk], None]] = {
    "launch": lambda kit: kit.units.fail_next("launch", EngineError("cannot start")),
    "dump": lambda kit: kit.units.fail_next("dump", CriuError("cannot freeze")),
}


@pytest.mark.parametrize("where", FAILURES)
def test_a_capture_that_fails_commits_nothing_and_can_be_run_again(
    kit: Desk, model: Path, tmp_path: Path, where: str
) -> None:
    FAILURES[where](kit)
    with pytest.raises(ColdsnapError, match="cannot"):
        run(kit, model, tmp_path / "a.json")
    committed_nothing(kit, tmp_path / "a.json")
    run(kit, model, tmp_path / "a.json")
    assert load_artifact(tmp_path / "a.json").artifact.capture_id == "capture-1"


def on_start(kit: Desk, monkeypatch: pytest.MonkeyPatch, act: Callable[[EngineProcess], None]) -> None:
    start = kit.program.start

    def started(*arguments: Any) -> EngineProcess:
        process = start(*arguments)
        act(process)
        return process

    monkeypatch.setattr(kit.program, "start", started)


def test_an_engine_that_cannot_load_says_why(kit: Desk, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m")
    planned = plan(model, tmp_path / "a.json")
    (model / "model-00001-of-00002.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ColdsnapError, match="safetensors") as caught:
        capture(kit.tools, planned.request, planned.model)
    assert "stopped unit u0" in caught.value.__notes__
    committed_nothing(kit, tmp_path / "a.json")


def test_an_engine_that_ends_says_its_last_line(
    kit: Desk, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(process: EngineProcess) -> None:
        log = kit.tools.services.folder("capture-svc") / "u0.log"
        log.write_text("first\nout of memory\n")
        process.stop()

    on_start(kit, monkeypatch, die)
    with pytest.raises(EngineError, match="w0 ended during loading: out of memory") as caught:
        run(kit, model, tmp_path / "a.json")
    assert caught.value.facts["log"] == ["first", "out of memory"]
    committed_nothing(kit, tmp_path / "a.json")


def test_ctrl_c_in_the_middle_is_said_and_commits_nothing(kit: Desk, model: Path, tmp_path: Path) -> None:
    kit.units.fail_next("dump", KeyboardInterrupt())
    with pytest.raises(OperationInterrupted, match="capture was interrupted; nothing was committed") as caught:
        run(kit, model, tmp_path / "a.json")
    assert caught.value.__notes__ == ["stopped unit u0"]
    committed_nothing(kit, tmp_path / "a.json")
    receipt = parse_receipt(read_private(kit.tools.state.receipts / "capture-1.json", MAX_RECEIPT_BYTES))
    assert receipt.state.value == "failed"


def test_a_descriptor_that_cannot_be_written_leaves_no_lease(
    kit: Desk, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise CriuError("the disk is full")

    monkeypatch.setattr(capture_module, "write_new", full)
    with pytest.raises(CriuError):
        run(kit, model, tmp_path / "a.json")
    committed_nothing(kit, tmp_path / "a.json")


def test_nothing_starts_when_a_gate_is_closed(kit: Desk, model: Path, tmp_path: Path) -> None:
    kit.failed["criu-process-tree"] = "no CRIU"
    with pytest.raises(Refused, match="no CRIU"):
        run(kit, model, tmp_path / "a.json")
    assert kit.units.calls == []


def test_a_secret_in_the_environment_stops_the_capture_by_name(
    kit: Desk, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "hf_" + "Zq9" * 11 + "x"
    on_secret(monkeypatch, kit, secret)
    with pytest.raises(Refused, match="the process tree cannot be captured") as caught:
        run(kit, model, tmp_path / "a.json", environment={"HF_TOKEN": secret})
    assert "HF_TOKEN" in str(caught.value)
    assert secret not in str(caught.value)
    committed_nothing(kit, tmp_path / "a.json")


def test_an_allowed_secret_is_listed_and_not_publishable(
    kit: Desk, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []

    class Warnings(type(kit.tools.reporter)):  # type: ignore[misc]
        def warn(self, text: str) -> None:
            warned.append(text)

    secret = "hf_" + "Zq9" * 11 + "x"
    on_secret(monkeypatch, kit, secret)
    kit.tools = replace(kit.tools, reporter=Warnings())
    result = run(kit, model, tmp_path / "a.json", environment={"HF_TOKEN": secret}, allow_secrets=("HF_TOKEN",))
    (report,) = hygiene_of(load_artifact(tmp_path / "a.json").artifact.runtime.bindings)
    assert (report.allowed_secrets, report.publishable) == (("HF_TOKEN",), False)
    assert result.document()["publishable"] is False
    assert any("HF_TOKEN" in text and "not publishable" in text for text in warned)
    assert secret not in json.dumps(result.document())


def on_secret(monkeypatch: pytest.MonkeyPatch, kit: Desk, secret: str) -> None:
    """A fake unit has no process to read the environment of, and no memory in its image: stand in for both."""
    inspect = inspect_unit
    dump = kit.units.dump

    def inspected(*arguments: Any) -> Any:
        return replace(inspect(*arguments), environments=({"HF_TOKEN": secret},))

    def dumped(unit: Any, images_dir: Path, **keywords: Any) -> Any:
        report = dump(unit, images_dir, **keywords)
        with (images_dir / "process.img").open("ab") as image:
            image.write(b"HF_TOKEN=" + secret.encode())
        return report

    monkeypatch.setattr(acts_module, "inspect_unit", inspected)
    monkeypatch.setattr(kit.units, "dump", dumped)


def test_every_finding_that_stops_is_named_with_its_unit() -> None:
    def report(*severities: Severity) -> HygieneReport:
        findings = tuple(
            HygieneFinding(kind="k", severity=one, subject=f"s{i}", message="m", cure="c")
            for i, one in enumerate(severities)
        )
        return HygieneReport(findings=findings, allowed_secrets=(), publishable=True)

    refuse_unless_clean({"u0": report(Severity.WARN, Severity.INFO)})
    with pytest.raises(Refused) as caught:
        refuse_unless_clean({"u0": report(Severity.STOP, Severity.WARN), "u1": report(Severity.STOP, Severity.STOP)})
    assert [problem.field.partition(":")[0] for problem in caught.value.problems] == ["u0", "u1", "u1"]


def test_a_strict_request_without_prompts_of_ours_uses_its_one_prompt(kit: Desk, model: Path, tmp_path: Path) -> None:
    planned = plan(model, tmp_path / "a.json")
    document = request_document(planned.request)
    del document["extension"]
    document["validation"]["prompt"] = "the only one"
    result = capture(kit.tools, request_from(document), planned.model)
    prompts, answers = load_artifact(tmp_path / "a.json").acceptance()
    assert [prompt.text for prompt in prompts] == ["the only one"]
    assert answers == result.answers
