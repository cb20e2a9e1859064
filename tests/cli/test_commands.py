"""Each command does what its help says: receipts, live events, plans, dry runs, the life of a service."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from coldsnap import __version__
from coldsnap.cli import main
from coldsnap.core.points import install
from coldsnap.core.receipt import parse_receipt
from coldsnap.core.request import parse_request, request_sha256
from coldsnap.core.schema import SCHEMAS
from coldsnap.core.timing import timing_digest
from coldsnap.errors import HostError
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.capture import capture
from coldsnap.testing.desk import Desk, plan

from .conftest import Coldsnap  # isort: skip

COMMANDS = typer.main.get_command(main.app).commands  # type: ignore[attr-defined]


def files(folder: Path) -> dict[str, bytes]:
    """Every file below, but locks and what an engine's log says."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "locks" not in path.parts and path.suffix != ".log" and path.name != "lock"
    }


# -- help ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_teaches(coldsnap: Coldsnap, name: str) -> None:
    ran = coldsnap(name, "--help")
    assert (ran.code, ran.err) == (0, "")
    text = " ".join(ran.out.split())
    assert "Example: coldsnap " in text, "a command's help shows how it is called"
    for parameter in COMMANDS[name].params:
        if parameter.name != "help":
            assert getattr(parameter, "help", None), f"{parameter.name} has no words"


def test_without_words_the_help_is_shown(coldsnap: Coldsnap) -> None:
    ran = coldsnap()
    assert ran.code == 2
    assert "restore" in ran.out + ran.err


def test_version(coldsnap: Coldsnap) -> None:
    ran = coldsnap("--version")
    assert (ran.code, ran.out) == (0, f"coldsnap {__version__}\n")


def test_examples_in_help_parse(coldsnap: Coldsnap) -> None:
    """An example that its own command would refuse teaches nothing."""
    for name, command in sorted(COMMANDS.items()):
        text = " ".join((command.help or "").split())
        for part in text.split("Example: coldsnap ")[1:]:
            words = part.split(" Example")[0].rstrip(".").split()
            assert words[0] == name, part
            command.make_context(name, list(words[1:]), resilient_parsing=False)


# -- schema -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_schema(coldsnap: Coldsnap, name: str) -> None:
    said = coldsnap("schema", name).said
    assert said["type"] == "object"
    assert said["additionalProperties"] is False, "unknown fields are errors, and the schema says so"


def test_schema_names(coldsnap: Coldsnap) -> None:
    assert coldsnap("schema").out.split() == sorted(SCHEMAS)


# -- plan and strict requests -------------------------------------------------------------------------


def test_a_plan_can_be_captured(coldsnap: Coldsnap, recipe: Path, tmp_path: Path) -> None:
    output = tmp_path / "a.json"
    ran = coldsnap("plan", recipe, "-o", output, "--quiet")
    assert ran.code == 0, ran.err
    request = parse_request(ran.out.encode())
    path = tmp_path / "request.json"
    path.write_text(ran.out)
    said = coldsnap("capture", "--request-json", path, "--json", "--quiet").said
    assert said["artifact"] == str(output)
    artifact = load_artifact(output).artifact
    assert artifact.request_sha256 == request_sha256(request)


def test_a_request_from_standard_input(coldsnap: Coldsnap, recipe: Path, tmp_path: Path) -> None:
    request = coldsnap("plan", recipe, "-o", tmp_path / "a.json", "--quiet").out
    ran = coldsnap("capture", "--request-json", "-", "--quiet", stdin=request.encode())
    assert ran.code == 0, ran.err
    assert (tmp_path / "a.json").exists()


def test_a_request_for_another_verb_is_refused(coldsnap: Coldsnap, recipe: Path, tmp_path: Path) -> None:
    request = coldsnap("plan", recipe, "-o", tmp_path / "a.json", "--quiet").out
    ran = coldsnap("restore", "--request-json", "-", "--quiet", stdin=request.encode())
    assert ran.code == 2
    assert "the request asks for 'capture'; use `coldsnap capture`" in ran.err


def test_a_restore_request_made_by_a_dry_run(coldsnap: Coldsnap, kit: Desk, artifact: Path, tmp_path: Path) -> None:
    dry = coldsnap("restore", artifact, "--name", "other", "--dry-run", "--quiet")
    assert dry.code == 0, dry.err
    path = tmp_path / "request.json"
    path.write_text(dry.out)
    said = coldsnap("restore", "--request-json", path, "--json", "--quiet").said
    assert (said["name"], said["state"]) == ("other", "ready")
    assert kit.tools.services.names() == ("other",)


# -- dry runs -----------------------------------------------------------------------------------------


def test_dry_runs_change_nothing(coldsnap: Coldsnap, kit: Desk, recipe: Path, artifact: Path, tmp_path: Path) -> None:
    (kit.tools.state.staging / "left.partial").mkdir()
    before = files(tmp_path)
    kit.units.calls.clear()
    for words in (
        ["capture", recipe, "-o", tmp_path / "b.json", "--dry-run", "--quiet"],
        ["restore", artifact, "--dry-run", "--quiet"],
        ["warm", artifact, "--dry-run", "--quiet"],
        ["delete", artifact, "--dry-run"],
        ["gc", "--dry-run"],
        ["explain", artifact],
        ["inspect", artifact],
        ["status"],
    ):
        ran = coldsnap(*words)
        assert ran.code == 0, (words, ran.err)
        assert files(tmp_path) == before, words
    assert kit.units.calls == []
    assert (kit.tools.state.staging / "left.partial").exists()


def test_a_dry_run_still_refuses(coldsnap: Coldsnap, kit: Desk, recipe: Path, artifact: Path) -> None:
    kit.failed["criu-process-tree"] = "no CRIU here"
    assert coldsnap("restore", artifact, "--dry-run", "--quiet").code == 3
    assert coldsnap("capture", recipe, "-o", artifact, "--dry-run", "--quiet").code == 3


# -- receipts and live events -------------------------------------------------------------------------


def test_events_close_with_the_digest_of_the_receipts_timing(
    coldsnap: Coldsnap, kit: Desk, recipe: Path, tmp_path: Path
) -> None:
    receipt, events = tmp_path / "receipt.json", tmp_path / "events"
    for words in (
        ["capture", recipe, "-o", tmp_path / "a.json"],
        ["restore", tmp_path / "a.json"],
        ["sleep", "svc"],
        ["wake", "svc"],
    ):
        receipt.unlink(missing_ok=True)
        events.unlink(missing_ok=True)
        ran = coldsnap(*words, "--receipt-json", receipt, "--timing-events", events, "--json", "--quiet")
        assert ran.code == 0, ran.err
        found = parse_receipt(receipt.read_bytes())
        assert (found.operation.value, found.state.value) == (words[0], "succeeded")
        assert found.timing is not None
        lines = [json.loads(line) for line in events.read_text().splitlines()]
        assert lines[-1]["event"] == "closed"
        assert lines[-1]["timing_sha256"] == str(timing_digest(found.timing))
        assert [line["sequence"] for line in lines] == sorted({line["sequence"] for line in lines})
        spans = {line["span"]["name"] for line in lines if line["event"] == "span-ended"}
        assert spans == {span.name for span in found.timing.spans}
        own = kit.tools.state.receipts / f"{found.operation_id}.json"
        assert hashlib.sha256(own.read_bytes()).digest() == hashlib.sha256(receipt.read_bytes()).digest()


def test_a_failure_has_a_receipt_that_a_success_may_follow(
    coldsnap: Coldsnap, kit: Desk, artifact: Path, tmp_path: Path
) -> None:
    request, receipt = tmp_path / "request.json", tmp_path / "receipt.json"
    request.write_text(coldsnap("restore", artifact, "--dry-run", "--quiet").out)
    words = ["restore", "--request-json", request, "--receipt-json", receipt, "--json", "--quiet"]
    kit.failed["criu-process-tree"] = "no CRIU here"
    assert coldsnap(*words).code == 3
    failed = parse_receipt(receipt.read_bytes())
    assert failed.state.value == "failed"
    assert failed.error is not None
    assert failed.error.kind == "Refused"
    assert any("no CRIU here" in reason.message for reason in failed.error.reasons)
    kit.failed.clear()
    assert coldsnap(*words).code == 0
    assert parse_receipt(receipt.read_bytes()).state.value == "succeeded"
    kit.units.calls.clear()
    again = coldsnap(*words)
    assert again.code == 3
    assert "a success is final" in again.err
    assert kit.units.calls == [], "refused before anything ran"


def test_a_receipt_in_no_folder_is_refused_before_anything(coldsnap: Coldsnap, kit: Desk, artifact: Path) -> None:
    kit.units.calls.clear()
    for flag in ("--receipt-json", "--timing-events"):
        ran = coldsnap("restore", artifact, flag, "/nonexistent/x.json", "--quiet")
        assert ran.code == 2
        assert flag in ran.err
    assert kit.units.calls == []


# -- the life of a service ----------------------------------------------------------------------------


def test_from_recipe_to_delete(coldsnap: Coldsnap, kit: Desk, artifact: Path) -> None:
    assert coldsnap("prepare", artifact, "--json", "--quiet").said["source"] == "native"
    assert coldsnap("explain", artifact, "--json").said["restorable"] is True
    restored = coldsnap("restore", artifact, "--json", "--quiet").said
    assert (restored["name"], restored["state"]) == ("svc", "ready")
    assert restored["prepared_from_record"] is True
    (service,) = coldsnap("status", "--json").said["services"]
    assert (service["name"], service["state"], service["port"]) == ("svc", "ready", restored["port"])
    table = coldsnap("status").out
    assert "svc" in table
    assert "ready" in table
    assert coldsnap("sleep", "svc", "--json", "--quiet").said["name"] == "svc"
    assert coldsnap("status", "svc", "--json").said["services"][0]["state"] == "asleep"
    assert coldsnap("wake", "svc", "--json", "--quiet").said["workers"]["w0"]["source"] == "native"
    busy = coldsnap("delete", artifact, "--yes", "--json")
    assert (busy.code, busy.said["error"]) == (4, "ResourceBusy")
    assert coldsnap("stop", "svc", "--json").said == {"name": "svc", "ended_units": 1}
    assert coldsnap("verify", artifact, "--json", "--quiet").said["proved"] is True
    assert coldsnap("gc", "--json").said["items"] == []
    deleted = coldsnap("delete", artifact, "--yes", "--json").said
    assert deleted["bytes"] > 0
    assert not artifact.exists()
    assert list(kit.tools.state.payloads.iterdir()) == []
    assert coldsnap("status").out == "no service is recorded here\n"


def test_status_of_a_restore_that_was_killed_says_what_to_do(coldsnap: Coldsnap, kit: Desk, artifact: Path) -> None:
    coldsnap("restore", artifact, "--json", "--quiet")
    record = kit.tools.services.must_load("svc")
    kit.units.end_all()
    kit.tools.services.save(record.model_copy(update={"state": "restoring", "units": ()}))
    shown = coldsnap("status")
    assert shown.code == 0
    assert "lost" in shown.out
    assert "ended before it was done" in shown.out
    assert f"`coldsnap restore {artifact} --name svc --port {record.port}` brings it back" in shown.out
    (said,) = coldsnap("status", "--json").said["services"]
    assert said["state"] == "lost"
    assert "`coldsnap stop svc` only forgets it" in said["problem"]["cure"]
    assert coldsnap("stop", "svc").out == "svc was not running; its record is gone\n"


def test_a_record_that_cannot_be_read_hides_no_other_service(coldsnap: Coldsnap, kit: Desk, artifact: Path) -> None:
    coldsnap("restore", artifact, "--json", "--quiet")
    folder = kit.tools.services.folder("broken")
    folder.mkdir(mode=0o700)
    record = folder / "service.json"
    record.write_text("{}")
    record.chmod(0o600)
    told = coldsnap("status", "--json")
    assert told.code == 2
    assert [one["name"] for one in told.said["services"]] == ["svc"]
    (problem, *_) = told.said["unknown"]["broken"]["problems"]
    assert str(record) in problem["field"]
    shown = coldsnap("status")
    assert shown.code == 2
    assert "ready" in shown.out
    assert str(record) in shown.err
    assert coldsnap("stop", "svc", "--json").code == 0


def test_gc_says_which_copy_in_memory_it_could_not_take(coldsnap: Coldsnap, kit: Desk, artifact: Path) -> None:
    assert coldsnap("prepare", artifact, "--stage", "--json", "--quiet").code == 0

    def busy(folder: Path) -> None:
        raise HostError(f"{folder} could not be taken away: busy", cure="look what uses it")

    kit.memory_fs.unmount = busy  # type: ignore[method-assign]
    ran = coldsnap("gc", "--json")
    assert (ran.code, ran.said["items"]) == (0, [])
    assert "stays in memory" in ran.err
    assert "could not be taken away: busy" in ran.err


def test_warm_then_wake(coldsnap: Coldsnap, kit: Desk, artifact: Path) -> None:
    assert coldsnap("warm", artifact, "--json", "--quiet").said["state"] == "warm"
    assert coldsnap("wake", "svc", "--json", "--quiet").said["name"] == "svc"


def test_flags_choose_name_port_and_weights(coldsnap: Coldsnap, kit: Desk, artifact: Path) -> None:
    from coldsnap.testing.engine_harness import free_port

    port = free_port()
    words = ["restore", artifact, "--name", "n", "--port", port, "--weights", "recovery", "--json", "--quiet"]
    said = coldsnap(*words).said
    assert (said["name"], said["port"], said["source"]) == ("n", port, "recovery")


def test_delete_asks_and_takes_no_for_an_answer(coldsnap: Coldsnap, kit: Desk, artifact: Path) -> None:
    ran = coldsnap("delete", artifact)
    assert ran.code == 2
    assert "add --yes" in ran.err
    assert artifact.exists()


@pytest.mark.parametrize("point", ["delete.swept", "delete.forgotten"])
def test_an_interrupted_delete_says_so_and_goes_on(coldsnap: Coldsnap, kit: Desk, artifact: Path, point: str) -> None:
    def interrupt(name: str) -> None:
        if name == point:
            raise KeyboardInterrupt

    install(interrupt)
    try:
        ran = coldsnap("delete", artifact, "--yes", "--json")
    finally:
        install(None)
    assert (ran.code, ran.said["error"], artifact.exists()) == (130, "OperationInterrupted", True)
    assert "still says what is left" in ran.said["message"]
    assert coldsnap("delete", artifact, "--yes").code == 0
    assert not artifact.exists()


def test_logs_shows_the_end(coldsnap: Coldsnap, kit: Desk, artifact: Path) -> None:
    assert coldsnap("restore", artifact, "--quiet").code == 0
    (kit.tools.services.folder("svc") / "u0.log").write_text("".join(f"line {i}\n" for i in range(100)))
    assert coldsnap("logs", "svc", "-n", "2").out == "line 98\nline 99\n"


@pytest.mark.parametrize("name", ["../../etc", "..", "a/b"])
def test_no_name_leads_out_of_the_state_root(coldsnap: Coldsnap, kit: Desk, name: str) -> None:
    for command in ("logs", "stop", "status"):
        ran = coldsnap(command, name)
        assert ran.code == 2
        assert "is no service name" in ran.err


def test_explain_groups_reasons_by_who_must_act(coldsnap: Coldsnap, kit: Desk, artifact: Path) -> None:
    kit.failed["criu-process-tree"] = "no CRIU here"
    ran = coldsnap("explain", artifact)
    assert ran.code == 3
    assert "to be done by whoever keeps this machine:" in ran.out
    assert "no CRIU here" in ran.out
    said = coldsnap("explain", artifact, "--json")
    assert said.code == 3
    assert [gate["name"] for gate in said.said["gates"] if not gate["open"]] == ["machine"]


def test_inspect_reads_the_descriptor_alone(coldsnap: Coldsnap, kit: Desk, artifact: Path) -> None:
    said = coldsnap("inspect", artifact, "--json").said
    loaded = load_artifact(artifact)
    assert said["digest"] == str(loaded.digest)
    table = coldsnap("inspect", artifact).out
    for words in (loaded.artifact.capture_id, "fake", "worker/w0", "accepts"):
        assert words in table


def test_verify_says_what_is_wrong(coldsnap: Coldsnap, kit: Desk, artifact: Path) -> None:
    (pack,) = kit.tools.state.payloads.glob("*.pack")
    data = bytearray(pack.read_bytes())
    data[5000] ^= 1
    pack.write_bytes(data)
    ran = coldsnap("verify", artifact, "--json", "--quiet")
    assert (ran.code, ran.said["proved"]) == (5, False)
    wrong = [proof["subject"] for proof in ran.said["proofs"] if proof["problems"]]
    assert wrong == ["pack of w0"]
    assert "NOT proved" in coldsnap("verify", artifact, "--quiet").out


def test_gc_tells_what_it_took(coldsnap: Coldsnap, kit: Desk, artifact: Path) -> None:
    artifact.unlink()
    assert coldsnap("gc", "--json").said["items"] == []
    said = coldsnap("gc", "--forget-missing", "--json").said
    assert said["forgotten"] == [str(artifact)]
    assert {item["kind"] for item in said["items"]} >= {"pack"}
    assert said["bytes"] == sum(item["bytes"] for item in said["items"]) > 0


def test_capabilities_and_doctor(coldsnap: Coldsnap, kit: Desk, tmp_path: Path) -> None:
    kit.failed["cuda-checkpoint-api"] = "no GPU"
    said = coldsnap("capabilities", "--json").said
    usable = {driver["driver"]: driver["usable"] for driver in said["drivers"]}
    assert (usable["host"], usable["n610"]) == (True, False)
    assert [engine["engine"] for engine in said["engines"]] == ["fake"]
    here = {"python": sys.executable, "versions": {"fake": "1"}, "problems": []}
    assert said["engines"][0]["installed"] == here
    other = ("--python", "/venv/bin/python")
    doctor = coldsnap("doctor", "--state-root", tmp_path / "absent" / "state", *other, "--json")
    assert doctor.code == (0 if doctor.said["healthy"] else 4)
    needs = {need["name"]: need for need in doctor.said["needs"]}
    assert {"Python", "root", "kernel", "CRIU", "state root", "engine fake"} <= set(needs)
    assert needs["engine fake"]["state"] == "ok"
    assert needs["engine fake in /venv/bin/python"]["found"] == "fake 1"
    assert all(need["cure"] for need in needs.values() if need["state"] == "missing")
    assert not (tmp_path / "absent").exists(), "doctor changes nothing"


def test_quiet_and_json_print_one_thing(coldsnap: Coldsnap, kit: Desk, model: Path, tmp_path: Path) -> None:
    planned = plan(model, tmp_path / "a.json")
    capture(kit.tools, planned.request, planned.model)
    loud = coldsnap("restore", tmp_path / "a.json", "--json")
    assert loud.said["state"] == "ready"
    assert "unpack capsule u0" in loud.err, "progress goes to stderr and never into the JSON"
    quiet: Any = coldsnap("restore", tmp_path / "a.json", "--json", "--quiet")
    assert quiet.said["evicted"] is True
    assert quiet.err == ""
